"""From a checked body to a request for the data plane, for HTTP and gRPC: all that needs to know the model."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sluice.v1 import sampling_pb2
from sluice_router.api.choices import PreparedRequest, list_choices
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.length_limits import check_num_characters, check_prompt_size
from sluice_router.api.openai_requests import ChatBody, CompletionBody, FieldError, SamplingFields, quote
from sluice_router.api.request_building import Caller, NewRequestBuilder
from sluice_router.api.structured_output import check_constraint, find_constraint
from sluice_router.errors import InvalidRequestError, ModelNotFoundError
from sluice_router.event_loop_bursts import BurstQueue
from sluice_router.scheduling.requests import DataPlane
from sluice_router.text.chat_template import ChatTemplateError
from sluice_router.text.tokenizer import ModelText

# Each has a process that compiles constraints; two, so that one that takes its whole time does not hold up all others.
_GRAMMAR_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")


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
        self._builder = NewRequestBuilder(text.defaults)

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
                self._builder.check_token_ids(field, prompt)
                ids = array("I", prompt)
            prepared.append(self._build(body, field, ids, caller, structure))
        return list_choices(prepared, body.n or 1, self._plane.make_request_id)

    async def prepare_chat(self, body: ChatBody, caller: Caller) -> list[PreparedRequest]:
        """Prepares a chat; see ``prepare_completion``."""
        self.check_model(body.model)
        await self._burst_queue.wait()
        # Templates write BOS themselves.
        ids = await self._encode("messages", self._render(body), add_special_tokens=body.add_special_tokens is True)
        prepared = self._build(body, "messages", ids, caller, await _read_structure(body))
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

    async def _encode(self, field: str, prompt: str, *, add_special_tokens: bool) -> array[int]:
        check_num_characters(field, prompt, self._max_model_len_tokens, self._text.max_token_characters)
        started_s = time.perf_counter()
        ids = await self._text.encode(prompt, add_special_tokens=add_special_tokens)
        self._metrics.tokenize_s.observe(time.perf_counter() - started_s)
        return ids

    def _build(
        self,
        body: CompletionBody | ChatBody,
        field: str,
        ids: array[int],
        caller: Caller,
        structure: sampling_pb2.StructuredOutput | None,
    ) -> PreparedRequest:
        prepared = self._builder.build(
            body,
            field,
            ids,
            caller,
            max_model_len_tokens=self._max_model_len_tokens,
            owner_limit_tokens=self._plane.find_output_limit(caller.owner) if caller.owner else None,
        )
        if structure is not None:
            prepared.request.sampling.structured_output.CopyFrom(structure)
        return prepared

    def _render(self, body: ChatBody) -> str:
        if self._text.chat_template is None:
            raise FieldError("messages", "messages: the model has no chat template; send the prompt as text")
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


async def _read_structure(body: SamplingFields) -> sampling_pb2.StructuredOutput | None:
    constraint = find_constraint(body)
    if constraint is None:
        return None
    return await asyncio.get_running_loop().run_in_executor(_GRAMMAR_THREADS, check_constraint, constraint)


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
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
