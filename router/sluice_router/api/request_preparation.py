"""From a checked body to a request for the data plane, for HTTP and gRPC: all that needs to know the model."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sluice.v1 import sampling_pb2
from sluice_router.api.openai_requests import VLLM_DEFAULTS, FieldError, quote
from sluice_router.api.structured_output import check_constraint, find_constraint
from sluice_router.errors import InvalidRequestError, ModelNotFoundError
from sluice_router.event_loop_bursts import BurstQueue
from sluice_router.scheduling.requests import NewRequest
from sluice_router.text.chat_template import ChatTemplateError
from sluice_router.text.output import OutputSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_core.records import RequestId
    from sluice_router.api.edge_metrics import EdgeMetrics
    from sluice_router.api.objectives import RequestObjectives
    from sluice_router.api.openai_requests import ChatBody, CompletionBody, SamplingFields
    from sluice_router.scheduling.requests import DataPlane
    from sluice_router.text.tokenizer import ModelText

# When not even the model's length is known.
LAST_RESORT_OUTPUT_TOKENS = 16
MAX_REQUEST_ID_CHARACTERS = 128
# Validating and rendering so many takes the event loop about 20 ms.
MAX_MESSAGES = 4096
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request ready to be admitted.

    Args:
        request: For the data plane.
        output: How the response stream shall write it.
    """

    request: NewRequest
    output: OutputSettings


def to_router_error(error: FieldError) -> InvalidRequestError:
    """Turns a wrong field into the error that clients see."""
    return InvalidRequestError(str(error), param=error.field or None, code=error.code)


def choose_shown_id(given: str, request_id: RequestId) -> str:
    """Chooses the id that an answer or an error carries: the caller's, or the router's where that is missing or wrong.

    Args:
        given: The caller's id, unchecked; empty: none.
        request_id: The router's.
    """
    try:
        return check_request_id("", given) or request_id
    except FieldError:
        return request_id


def check_request_id(name: str, value: str) -> str:
    """Checks a caller's id.

    Args:
        name: Where it stands.
        value: The id.

    Raises:
        FieldError: Too long, or not printable ASCII.
    """
    if len(value) > MAX_REQUEST_ID_CHARACTERS:
        raise FieldError(name, f"{name}: at most {MAX_REQUEST_ID_CHARACTERS} characters, not {len(value)}")
    if not (value.isascii() and value.isprintable()):
        raise FieldError(name, f"{name}: only printable ASCII, not {quote(value)}")
    return value


class RequestPreparer:
    """Prepares requests for one model.

    Args:
        plane: Knows the served name and length.
        text: The model's text side.
        metrics: Where tokenizing is timed.
    """

    def __init__(self, plane: DataPlane, text: ModelText, metrics: EdgeMetrics) -> None:
        self._plane = plane
        self._text = text
        self._metrics = metrics
        self._burst_queue = BurstQueue()
        # What fields of the proto that need no more than a value are without the client: the model's, or vLLM's.
        self._sampling_defaults: dict[str, Any] = {
            field.name: text.defaults.sampling.get(field.name, VLLM_DEFAULTS.get(field.name))
            for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
            if field.name not in _RESOLVED_FIELDS
        }

    @property
    def _max_model_len_tokens(self) -> int | None:
        return self._plane.model.max_model_len_tokens or self._text.defaults.max_model_len_tokens

    def check_size(self, fields: dict[str, Any]) -> None:
        """Checks the size of a body's prompt, before anything else of it is.

        Raises:
            FieldError: It is too large.
        """
        check_prompt_size(fields, self._max_model_len_tokens)

    async def prepare_completion(self, body: CompletionBody, caller: Caller) -> list[PreparedRequest]:
        """Prepares a completion.

        Returns:
            A request for each choice of the answer, those of a prompt one after the other.

        Raises:
            FieldError: A field is wrong for this model.
            ModelNotFoundError: Another model is asked for.
        """
        self.check_model(body.model)
        structure = await _read_structure(body)
        prepared = []
        for field, prompt in body.list_prompts():
            # One per iteration of the loop: tokens of other requests go out between two of a burst.
            await self._burst_queue.wait()
            if isinstance(prompt, str):
                ids = await self._encode(field, prompt, add_special_tokens=body.add_special_tokens is not False)
            else:
                ids = prompt
                self._check_token_ids(field, ids)
            prepared.append(self._finish(body, field, ids, caller, structure))
        return self._list_choices(prepared, body.n or 1)

    async def prepare_chat(self, body: ChatBody, caller: Caller) -> list[PreparedRequest]:
        """Prepares a chat; see ``prepare_completion``."""
        self.check_model(body.model)
        await self._burst_queue.wait()
        # Templates write BOS themselves.
        ids = await self._encode("messages", self._render(body), add_special_tokens=body.add_special_tokens is True)
        prepared = self._finish(body, "messages", ids, caller, await _read_structure(body))
        return self._list_choices([prepared], body.n or 1)

    def check_model(self, name: str | None) -> None:
        """Checks that a model is the one served. Without a plan no name is known yet, and any passes.

        Raises:
            ModelNotFoundError: It is not.
        """
        served = self._plane.model.name
        if name and served and name != served:
            raise ModelNotFoundError(
                f"model {quote(name)} does not exist; this router serves {served!r}", param="model"
            )

    async def _encode(self, field: str, prompt: str, *, add_special_tokens: bool) -> list[int]:
        check_num_characters(field, prompt, self._max_model_len_tokens, self._text.max_token_characters)
        started_s = time.perf_counter()
        ids = await self._text.encode(prompt, add_special_tokens=add_special_tokens)
        self._metrics.tokenize_s.observe(time.perf_counter() - started_s)
        return ids

    def _render(self, body: ChatBody) -> str:
        if self._text.chat_template is None:
            raise FieldError("messages", "the model has no chat template; use /v1/completions")
        variables = dict(body.chat_template_kwargs or {})
        if body.documents is not None:
            variables["documents"] = body.documents
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        tools = None if body.tool_choice == "none" else body.tools
        try:
            return self._text.chat_template.render(
                [_open_tool_calls(message.to_template()) for message in body.messages],
                tools=tools,
                add_generation_prompt=body.add_generation_prompt is not False,
                variables=variables,
            )
        except ChatTemplateError as error:
            raise FieldError("messages", f"messages: {error}") from error

    def _check_token_ids(self, field: str, ids: list[int]) -> None:
        limit = self._text.defaults.vocabulary_tokens
        if ids and max(ids) >= limit:
            index = next(index for index, token_id in enumerate(ids) if token_id >= limit)
            raise FieldError(f"{field}[{index}]", f"{field}[{index}]: token ids are below {limit}, not {ids[index]}")

    def _list_choices(self, prepared: list[PreparedRequest], n: int) -> list[PreparedRequest]:
        """Lists the choices of an answer: ``n`` for each prompt, with ids and seeds of their own."""
        if len(prepared) * n == 1:
            return prepared
        choices = [(prompt, sample) for prompt in prepared for sample in range(n)]
        return [
            replace(prompt, request=self._derive_choice(prompt.request, index, sample))
            for index, (prompt, sample) in enumerate(choices)
        ]

    def _derive_choice(self, request: NewRequest, index: int, sample: int) -> NewRequest:
        if not index:
            return request
        sampling = sampling_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        if sampling.HasField("seed"):
            sampling.seed = derive_seed(sampling.seed, sample)
        shown_id = request.client_request_id or request.request_id
        return replace(
            request,
            request_id=self._plane.make_request_id(),
            client_request_id=f"{shown_id}-{index}",
            sampling=sampling,
        )

    def _finish(
        self,
        body: SamplingFields,
        field: str,
        ids: list[int],
        caller: Caller,
        structure: sampling_pb2.StructuredOutput | None,
    ) -> PreparedRequest:
        if not ids:
            raise FieldError(field, f"{field}: the prompt is empty; at least 1 token is needed")
        sampling = self._build_sampling(body, self._limit_output(body, field, ids, caller))
        if structure is not None:
            sampling.structured_output.CopyFrom(structure)
        objectives = caller.objectives
        request = NewRequest(
            request_id=caller.request_id,
            prompt_token_ids=array("I", ids),
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

    def _limit_output(self, body: SamplingFields, prompt_field: str, ids: list[int], caller: Caller) -> int:
        """Returns the most output tokens, within the model's length and the limit of the API key's owner.

        Raises:
            FieldError: The prompt, or prompt and output together, are too long.
        """
        wanted = body.output_limit_tokens
        default = self._text.defaults.max_tokens or caller.default_output_tokens
        limit = self._plane.find_output_limit(caller.owner) if caller.owner else None
        if limit is not None:
            if wanted is not None and wanted > limit:
                name = body.output_limit_field
                raise FieldError(name, f"{name}: at most {limit} for {caller.owner}, not {wanted}", "max_output_tokens")
            default = min(default or limit, limit)
        length = self._max_model_len_tokens
        if length is None:
            return wanted or default or LAST_RESORT_OUTPUT_TOKENS
        check_num_tokens(prompt_field, ids, length)
        room = length - len(ids)
        if wanted is not None and wanted > room:
            given = f"{len(ids)} tokens of prompt and max_tokens {wanted}, {len(ids) + wanted} in all"
            raise too_long(body.output_limit_field, length, given)
        return min(room, wanted or default or room)

    def _build_sampling(self, body: SamplingFields, max_tokens: int) -> sampling_pb2.SamplingParams:
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise FieldError("min_tokens", f"min_tokens: at most max_tokens, {max_tokens}, not {min_tokens}")
        stop_token_ids = set(body.stop_token_ids or ())
        self._check_token_ids("stop_token_ids", body.stop_token_ids or [])
        if not body.ignore_eos:
            # Models may have several ends; engines know one of them as EOS.
            stop_token_ids |= self._text.defaults.eos_token_ids
        values = self._choose_values(body)
        values["top_k"] = max(0, int(values["top_k"]))
        return sampling_pb2.SamplingParams(
            **values,
            max_tokens=max_tokens,
            stop_token_ids=sorted(stop_token_ids),
            logit_bias=self._read_logit_bias(body.logit_bias or {}),
            num_logprobs=body.num_logprobs,
        )

    def _choose_values(self, body: SamplingFields) -> dict[str, Any]:
        """Chooses what the client says, else the model, else vLLM, for each field of the proto that needs no more."""
        values = {}
        for name, default in self._sampling_defaults.items():
            value = getattr(body, name)
            if value is None:
                value = default
            if value is not None:
                values[name] = value
        return values

    def _read_logit_bias(self, given: Mapping[str, float]) -> dict[int, float]:
        limit = self._text.defaults.vocabulary_tokens
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
            hidden_token_ids=frozenset(sampling.stop_token_ids),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=sampling.min_tokens,
            num_logprobs=body.num_logprobs,
            returns_token_ids=bool(body.return_token_ids),
        )


def derive_seed(seed: int, sample: int) -> int:
    """Derives the seed of one of several samples: counted away from zero, as vLLM does above it, so never vLLM's -1.

    Args:
        seed: The request's, a 64-bit integer other than -1.
        sample: Number of the sample, from 0 on.
    """
    moved = seed + sample if seed >= 0 else seed - sample
    return (moved + 2**63) % 2**64 - 2**63


def check_prompt_size(fields: dict[str, Any], max_model_len_tokens: int | None) -> None:
    """Checks the size of a body's prompt, which may otherwise be anything.

    Args:
        fields: The body, unchecked.
        max_model_len_tokens: Longest prompt + output; None: not known.

    Raises:
        FieldError: There are too many messages or token ids.
    """
    messages = fields.get("messages")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise FieldError("messages", f"messages: at most {MAX_MESSAGES} messages, not {len(messages)}")
    prompt = fields.get("prompt")
    if not isinstance(prompt, list):
        return
    check_num_tokens("prompt", prompt, max_model_len_tokens)
    for index, item in enumerate(prompt):
        if isinstance(item, list):
            check_num_tokens(f"prompt[{index}]", item, max_model_len_tokens)


def check_num_tokens(field: str, token_ids: list[Any], max_model_len_tokens: int | None) -> None:
    """Checks that a prompt leaves room for one output token.

    Args:
        field: Path of the prompt.
        token_ids: The prompt.
        max_model_len_tokens: Longest prompt + output; None: not known.

    Raises:
        FieldError: It does not.
    """
    if max_model_len_tokens is not None and len(token_ids) >= max_model_len_tokens:
        raise too_long(field, max_model_len_tokens, f"{len(token_ids)} tokens of prompt")


def check_num_characters(field: str, prompt: str, max_model_len_tokens: int | None, max_token_characters: int) -> None:
    """Checks that a prompt may fit, whatever its text: tokenizing one that cannot would take seconds.

    Args:
        field: Path of the prompt.
        prompt: Its text.
        max_model_len_tokens: Longest prompt + output; None: not known.
        max_token_characters: Most characters that a token stands for.

    Raises:
        FieldError: It cannot.
    """
    if max_model_len_tokens is None:
        return
    limit = max_model_len_tokens * max_token_characters
    if len(prompt) > limit:
        given = f"{len(prompt)} characters of prompt, and no more than {limit} can fit"
        raise too_long(field, max_model_len_tokens, given)


def too_long(field: str, max_model_len_tokens: int, given: str) -> FieldError:
    """Makes the error for a request that is longer than the model's limit.

    Args:
        field: What is to blame.
        max_model_len_tokens: The limit.
        given: What the request has.
    """
    limit = f"the model's limit is {max_model_len_tokens} tokens for prompt and output"
    return FieldError(field, f"{field}: {limit}; the request has {given}", "context_length_exceeded")


async def _read_structure(body: SamplingFields) -> sampling_pb2.StructuredOutput | None:
    constraint = find_constraint(body)
    return None if constraint is None else await asyncio.to_thread(check_constraint, constraint)


def _open_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Parses the arguments of an assistant's tool calls: clients send JSON text, templates expect objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_open_call(call) for call in calls]}


def _open_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
