"""Makes vLLM's request out of a submit: the part of the edge that needs vLLM's own code.

It does what vLLM's front-end would do and this program leaves out: checks against the model, EOS ids, bad words to
tokens, grammar validation. Whatever is wrong with a request is found here, because past this point it could end the
EngineCore with everybody's requests.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from sluice.wire_fields import read_constraint, read_sampling
from sluice_engine.errors import SubmitRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig

    from sluice.v1 import engine_pb2 as wire
    from sluice.v1 import sampling_pb2
    from sluice_engine.core_messages import RequestExtras


VLLM_NO_SEED = -1


class VllmRequestBuilder:
    """Makes ``EngineCoreRequest`` records.

    Args:
        vllm_config: The engine's; lengths as the EngineCore has settled them.
        tokenizer: The model's, for bad words and grammars; None where there is none.
    """

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any) -> None:
        self._config = vllm_config
        self._model = vllm_config.model_config
        self._tokenizer = tokenizer
        self._vocabulary_tokens = self._model.get_vocab_size()
        self._generation_config = self._model.try_get_generation_config()
        self._eos_token_id = find_eos_token_id(vllm_config, tokenizer)

    def build(self, core_id: str, submit: wire.Submit, extras: RequestExtras) -> EngineCoreRequest:
        """Makes the EngineCore's request.

        Args:
            core_id: Its id in the EngineCore.
            submit: As the router sent it.
            extras: What vLLM's record has no place for.

        Raises:
            SubmitRefusedError: Names the field, the value and the limit.
        """
        prompt_token_ids = list(submit.prompt_token_ids)
        self._check_tokens("prompt_token_ids", prompt_token_ids)
        self._check_tokens("output_token_ids", extras.output_token_ids)
        self._check_lengths(submit)
        parameters = self._sampling_params(submit.sampling)
        if submit.split_prompt_tokens:
            # Other engines sample: here a token ends the part, and is void.
            del prompt_token_ids[submit.split_prompt_tokens :]
            parameters = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        parameters.extra_args = extras.encode()
        return EngineCoreRequest(
            request_id=core_id,
            prompt_token_ids=prompt_token_ids,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time() - submit.age_s,
            lora_request=None,
            cache_salt=submit.cache_salt or None,
            data_parallel_rank=None,
            priority=submit.priority,
        )

    def _check_tokens(self, field: str, token_ids: Sequence[int]) -> None:
        if token_ids and max(token_ids) >= self._vocabulary_tokens:
            raise SubmitRefusedError(
                f"{field}: token {max(token_ids)} is outside the vocabulary of {self._vocabulary_tokens}"
            )

    def _check_lengths(self, submit: wire.Submit) -> None:
        num_prompt, num_output = len(submit.prompt_token_ids), len(submit.output_token_ids)
        if not num_prompt:
            raise SubmitRefusedError("prompt_token_ids: empty")
        if num_prompt + num_output >= self._model.max_model_len:
            raise SubmitRefusedError(
                f"prompt_token_ids: {num_prompt} prompt and {num_output} output tokens leave no room for another one; "
                f"the limit is {self._model.max_model_len} in all"
            )
        if submit.split_prompt_tokens and not self._config.cache_config.enable_prefix_caching:
            raise SubmitRefusedError("split_prompt_tokens: this engine computes no parts of prompts")
        if submit.split_prompt_tokens and (num_output or submit.split_prompt_tokens >= num_prompt):
            raise SubmitRefusedError(
                f"split_prompt_tokens: {submit.split_prompt_tokens} of {num_prompt} prompt tokens, after {num_output} "
                "output tokens; the first part of a prompt is shorter than it, and before any output"
            )
        if num_output >= submit.sampling.max_tokens:
            raise SubmitRefusedError(
                f"sampling.max_tokens: {submit.sampling.max_tokens}, but {num_output} are generated already"
            )

    def _sampling_params(self, message: sampling_pb2.SamplingParams) -> SamplingParams:
        try:
            parameters = make_sampling_params(message)
            parameters.verify(
                self._model,
                self._config.speculative_config,
                self._config.structured_outputs_config,
                self._tokenizer,
            )
            parameters.update_from_generation_config(self._generation_config, self._eos_token_id)
            if message.bad_words:
                if self._tokenizer is None:
                    raise SubmitRefusedError("sampling.bad_words: this engine has no tokenizer")
                parameters.update_from_tokenizer(self._tokenizer)
        except (VLLMClientError, ValueError) as error:
            raise SubmitRefusedError(f"sampling: {error}") from error
        return parameters


def make_sampling_params(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Makes vLLM's sampling parameters, not yet checked against a model.

    Fields go to vLLM under their own names; an optional one that is absent means vLLM's default.

    Raises:
        ValueError: A value is out of its range.
        VLLMClientError: The same, found by vLLM.
    """
    values = read_sampling(message)
    if values.get("seed") == VLLM_NO_SEED:
        raise ValueError(f"seed: {VLLM_NO_SEED} means none to vLLM, and a request that moves needs one")
    return SamplingParams(
        # vLLM calls this field otherwise, and takes an empty bias for one.
        logprobs=values.pop("num_logprobs", None),
        logit_bias=values.pop("logit_bias") or None,
        structured_outputs=make_structured_outputs(message.structured_output),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **values,
    )


def make_structured_outputs(message: sampling_pb2.StructuredOutput) -> StructuredOutputsParams | None:
    """The constraint on the output's text, if there is one."""
    constraint = read_constraint(message)
    return None if constraint is None else StructuredOutputsParams(**dict([constraint]))


def find_eos_token_id(vllm_config: VllmConfig, tokenizer: Any) -> int | None:
    """The token that ends an output; further ones come from the generation config.

    Args:
        vllm_config: The engine's.
        tokenizer: The model's; without one its config is asked.
    """
    if tokenizer is not None:
        eos = tokenizer.eos_token_id
        return int(eos) if eos is not None else None
    eos = getattr(vllm_config.model_config.hf_text_config, "eos_token_id", None)
    if isinstance(eos, list):
        return int(eos[0]) if eos else None
    return int(eos) if eos is not None else None
