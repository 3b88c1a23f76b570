"""From a checked body and the tokens of its prompt to a request for the data plane. Without coroutines: compiled."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice.v1 import sampling_pb2
from sluice_core.records import RequestId
from sluice_router.api.choices import PreparedRequest
from sluice_router.api.length_limits import limit_output
from sluice_router.api.objectives import RequestObjectives
from sluice_router.api.openai_requests import VLLM_DEFAULTS, FieldError, SamplingFields, quote
from sluice_router.scheduling.requests import NewRequest
from sluice_router.text.output import OutputSettings
from sluice_router.text.tokenizer import GenerationDefaults

# Sampling fields that need more than the value of the body, the model or vLLM.
_RESOLVED_FIELDS = frozenset({"max_tokens", "stop_token_ids", "logit_bias", "num_logprobs", "structured_output"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and what is not in the body.

    Args:
        arrival_s: When the first byte came, on the data plane's clock.
        objectives: Of latency.
        request_id: The router's id of the request.
        client_request_id: The caller's id; empty: none.
        deadline_s: When the caller gives up, on the same clock; None: never.
        default_output_tokens: Most output tokens when neither caller nor model say; None: up to the model's length.
        owner: Whose API key it came with; empty where none is asked for.
        trace_headers: W3C trace context of the call; None: it has none.
    """

    arrival_s: float
    objectives: RequestObjectives
    request_id: RequestId
    client_request_id: str = ""
    deadline_s: float | None = None
    default_output_tokens: int | None = None
    owner: str = ""
    trace_headers: Mapping[str, str] | None = None


class NewRequestBuilder:
    """Builds requests for one model.

    Args:
        defaults: What the model's files say about sampling.
    """

    def __init__(self, defaults: GenerationDefaults) -> None:
        self._defaults = defaults
        # Models may have several ends; engines know one of them as EOS.
        self._eos_token_ids = sorted(defaults.eos_token_ids)
        # Fields of the proto that need no more than a value, and what they are without the client: the model's value,
        # or vLLM's. A copy of it costs a tenth of filling one in.
        names = [field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields]
        self._plain_fields = frozenset(names) - _RESOLVED_FIELDS
        values: dict[str, Any] = {
            name: defaults.sampling.get(name, VLLM_DEFAULTS.get(name)) for name in self._plain_fields
        }
        values["top_k"] = _limit_top_k(values["top_k"])
        self._default_sampling = sampling_pb2.SamplingParams(**values)

    def build(
        self,
        body: SamplingFields,
        field: str,
        ids: array[int],
        caller: Caller,
        *,
        max_model_len_tokens: int | None,
        owner_limit_tokens: int | None,
    ) -> PreparedRequest:
        """Builds the request of one prompt.

        Args:
            body: The checked body.
            field: Path of the prompt.
            ids: The prompt.
            caller: Who asks.
            max_model_len_tokens: Longest prompt + output; None: not known.
            owner_limit_tokens: Limit of the output of the API key's owner; None: none.

        Raises ``FieldError`` if a field is wrong for this model.
        """
        if not ids:
            raise FieldError(field, f"{field}: the prompt is empty; at least 1 token is needed")
        max_tokens = limit_output(
            body,
            field,
            ids,
            default_tokens=self._defaults.max_tokens or caller.default_output_tokens,
            owner=caller.owner,
            owner_limit_tokens=owner_limit_tokens,
            max_model_len_tokens=max_model_len_tokens,
        )
        sampling, objectives = self._build_sampling(body, max_tokens), caller.objectives
        request = NewRequest(
            request_id=caller.request_id,
            prompt_token_ids=ids,
            sampling=sampling,
            slo_class=objectives.slo_class,
            ttft_slo_s=objectives.ttft_slo_s,
            tpot_slo_s=objectives.tpot_slo_s,
            priority=objectives.priority,
            arrival_s=caller.arrival_s,
            deadline_s=caller.deadline_s,
            client_request_id=caller.client_request_id,
            owner=caller.owner,
            cache_salt=body.cache_salt or "",
            trace_headers=caller.trace_headers,
        )
        return PreparedRequest(request=request, output=self._describe_output(body, sampling))

    def check_token_ids(self, field: str, ids: list[int]) -> None:
        """Checks that token ids are the model's, or raises ``FieldError``."""
        limit = self._defaults.vocabulary_tokens
        if ids and max(ids) >= limit:
            index = next(index for index, token_id in enumerate(ids) if token_id >= limit)
            raise FieldError(f"{field}[{index}]", f"{field}[{index}]: token ids are below {limit}, not {ids[index]}")

    def _build_sampling(self, body: SamplingFields, max_tokens: int) -> sampling_pb2.SamplingParams:
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise FieldError("min_tokens", f"min_tokens: at most max_tokens, {max_tokens}, not {min_tokens}")
        given: dict[str, Any] = {name: getattr(body, name) for name in self._plain_fields & body.model_fields_set}
        if given.get("top_k") is not None:
            given["top_k"] = _limit_top_k(given["top_k"])
        sampling = sampling_pb2.SamplingParams()
        sampling.CopyFrom(self._default_sampling)
        sampling.MergeFrom(
            sampling_pb2.SamplingParams(
                **given,
                max_tokens=max_tokens,
                stop_token_ids=self._find_stop_token_ids(body),
                logit_bias=self._read_logit_bias(body.logit_bias or {}),
                num_logprobs=body.num_logprobs,
            )
        )
        return sampling

    def _find_stop_token_ids(self, body: SamplingFields) -> list[int]:
        given = body.stop_token_ids or []
        self.check_token_ids("stop_token_ids", given)
        if not given:
            return [] if body.ignore_eos else self._eos_token_ids
        return sorted({*given} if body.ignore_eos else {*given, *self._eos_token_ids})

    def _read_logit_bias(self, given: Mapping[str, float]) -> dict[int, float]:
        limit = self._defaults.vocabulary_tokens
        bias = {}
        for key, value in given.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < limit):
                raise FieldError(
                    "logit_bias", f"logit_bias: keys are token ids from 0 to {limit - 1}, not {quote(key)}"
                )
            bias[int(key)] = value
        return bias

    def _describe_output(self, body: SamplingFields, sampling: sampling_pb2.SamplingParams) -> OutputSettings:
        return OutputSettings(
            stops=tuple(body.stop or ()),
            is_stop_included=bool(body.include_stop_str_in_output),
            hidden_token_ids=self._share(frozenset(sampling.stop_token_ids)),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=sampling.min_tokens,
            num_logprobs=body.num_logprobs,
            returns_token_ids=bool(body.return_token_ids),
        )

    def _share(self, stop_token_ids: frozenset[int]) -> frozenset[int]:
        """Returns the model's own set where it is equal: what every token is looked up in had better be in a cache."""
        own = self._defaults.eos_token_ids
        return own if stop_token_ids == own else stop_token_ids


def _limit_top_k(value: float) -> int:
    return max(0, int(value))
