"""From a checked body to a request for the data plane, for HTTP and gRPC: all that needs to know the model."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice.v1 import sampling_pb2
from sluice_core.records import RequestId
from sluice_router.api.choices import PreparedRequest, list_choices
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.length_limits import check_num_characters, check_prompt_size, limit_output
from sluice_router.api.objectives import RequestObjectives
from sluice_router.api.openai_requests import VLLM_DEFAULTS, ChatBody, CompletionBody, FieldError, SamplingFields, quote
from sluice_router.api.structured_output import check_constraint, find_constraint
from sluice_router.errors import InvalidRequestError, ModelNotFoundError
from sluice_router.event_loop_bursts import BurstQueue
from sluice_router.scheduling.requests import DataPlane, NewRequest
from sluice_router.text.chat_template import ChatTemplateError
from sluice_router.text.output import OutputSettings
from sluice_router.text.tokenizer import ModelText

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


def to_router_error(error: FieldError) -> InvalidRequestError:
    """Turns a wrong field into the error that clients see."""
    return InvalidRequestError(str(error), param=error.field or None, code=error.code)


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
        return list_choices(prepared, body.n or 1, self._plane.make_request_id)

    async def prepare_chat(self, body: ChatBody, caller: Caller) -> list[PreparedRequest]:
        """Prepares a chat; see ``prepare_completion``."""
        self.check_model(body.model)
        await self._burst_queue.wait()
        # Templates write BOS themselves.
        ids = await self._encode("messages", self._render(body), add_special_tokens=body.add_special_tokens is True)
        prepared = self._finish(body, "messages", ids, caller, await _read_structure(body))
        return list_choices([prepared], body.n or 1, self._plane.make_request_id)

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
        max_tokens = limit_output(
            body,
            field,
            ids,
            default_tokens=self._text.defaults.max_tokens or caller.default_output_tokens,
            owner=caller.owner,
            owner_limit_tokens=self._plane.find_output_limit(caller.owner) if caller.owner else None,
            max_model_len_tokens=self._max_model_len_tokens,
        )
        sampling = self._build_sampling(body, max_tokens)
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
