"""Fields of the gRPC API in terms of the HTTP bodies, whose checks they share, and back for messages to clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from sluice.v1 import router_pb2
from sluice.wire_fields import constraint_names, read_constraint, read_sampling
from sluice_router.api.length_limits import check_num_messages
from sluice_router.api.openai_requests import FieldError, quote
from sluice_router.errors import RouterError
from sluice_router.scheduling.requests import Finish, Usage
from sluice_router.text.output import Delta

_PATH_HEAD = re.compile(r"[a-z_]+")
# Where a field of an HTTP body is not the proto's field of the same name in ``GenerateRequest.sampling``.
_NAMES = {
    "logprobs": "sampling.num_logprobs",
    "top_logprobs": "sampling.num_logprobs",
    "slo_ttft_ms": "ttft_slo_milliseconds",
    "slo_tpot_ms": "tpot_slo_milliseconds",
    "messages": "messages.values",
    "tools": "messages.tools",
    "documents": "messages.documents",
    "chat_template_kwargs": "messages.template_arguments",
    "structured_outputs": "sampling.structured_output",
}
_PROMPTS = {"text": "text", "token_ids": "token_ids.values"}


def rename(error: RouterError, request: router_pb2.GenerateRequest) -> RouterError:
    """Puts this API's name of a field into an error that has HTTP's.

    Args:
        error: Changed in place.
        request: What the client sent.
    """
    if error.param is not None:
        name = name_field(error.param, request)
        error.message = error.message.replace(error.param, name, 1)
        error.param = name
    return error


def name_field(path: str, request: router_pb2.GenerateRequest) -> str:
    """Translates the path of a field of an HTTP body, as ``messages[0].role``."""
    match = _PATH_HEAD.match(path)
    head = match.group() if match else ""
    rest = path.removeprefix(head)
    if head == "prompt":
        return _PROMPTS.get(request.WhichOneof("prompt") or "", head) + rest
    if head == "structured_outputs" and rest:
        kind = rest.removeprefix(".")
        rest = f".{constraint_names().get(kind, kind)}"
    if head in _NAMES:
        return _NAMES[head] + rest
    return f"sampling.{path}" if head in request.sampling.DESCRIPTOR.fields_by_name else path


def read_options(request: router_pb2.GenerateRequest) -> dict[str, Any]:
    """Reads the objectives into the body's field ``sluice``."""
    return {
        "slo_ttft_ms": request.ttft_slo_milliseconds or None,
        "slo_tpot_ms": request.tpot_slo_milliseconds or None,
        "slo_class": request.slo_class or None,
        "priority": request.priority if request.HasField("priority") else None,
    }


def read_chat(chat: router_pb2.ChatMessages) -> dict[str, Any]:
    """Reads a conversation into the fields of a chat's body.

    Raises:
        FieldError: There are too many messages, or a field that holds JSON text holds something else.
    """
    check_num_messages(len(chat.values))
    arguments = chat.template_arguments
    return {
        "messages": [_read_message(index, message) for index, message in enumerate(chat.values)],
        "tools": _read_objects("tools", chat.tools) or None,
        "documents": _read_objects("documents", chat.documents) or None,
        "chat_template_kwargs": _read_object("chat_template_kwargs", arguments) if arguments else None,
        "add_generation_prompt": chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
    }


def read_fields(request: router_pb2.GenerateRequest) -> dict[str, Any]:
    """Reads a request without its prompt into the fields of the HTTP bodies."""
    sampling = read_sampling(request.sampling)
    constraint = read_constraint(request.sampling.structured_output)
    num_logprobs = sampling.pop("num_logprobs", None)
    fields: dict[str, Any] = {
        **sampling,
        "model": request.model or None,
        # 0 asks for the default; JSON, which HTTP bodies are, has texts for keys.
        "max_tokens": sampling["max_tokens"] or None,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling["logit_bias"].items()},
        "stop": list(request.stop),
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": request.skip_special_tokens if request.HasField("skip_special_tokens") else None,
        "structured_outputs": None if constraint is None else dict([constraint]),
        "cache_salt": request.cache_salt or None,
        "add_special_tokens": request.add_special_tokens if request.HasField("add_special_tokens") else None,
        "return_token_ids": True,
    }
    if num_logprobs is not None:
        is_chat = request.WhichOneof("prompt") == "messages"
        fields |= {"logprobs": True, "top_logprobs": num_logprobs} if is_chat else {"logprobs": num_logprobs}
    return fields


def _read_message(index: int, message: router_pb2.ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = _read_objects(f"messages[{index}].tool_calls", message.tool_calls)
    return fields


def _read_objects(field: str, texts: Iterable[str]) -> list[dict[str, Any]]:
    return [_read_object(f"{field}[{index}]", text) for index, text in enumerate(texts)]


def _read_object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(field, f"{field}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FieldError(field, f"{field}: must be a JSON object, not {quote(value)}")
    return value


def format_response(request_id: str, delta: Delta, end: Finish | None) -> router_pb2.GenerateResponse:
    """Makes the message of a part of an answer; ``end`` is None but for the last one."""
    response = router_pb2.GenerateResponse(
        request_id=request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        first_output_index=delta.first_index,
        logprobs=[
            router_pb2.OutputLogprobs(
                logprob=entry.logprob, top_token_ids=entry.top_token_ids, top_logprobs=entry.top_logprobs
            )
            for entry in delta.logprobs
        ],
    )
    if end is not None:
        response.finish_reason = end.reason
        response.usage.CopyFrom(_format_usage(end.usage))
    return response


def _format_usage(usage: Usage) -> router_pb2.Usage:
    return router_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        ttft_ms=usage.ttft_s * 1e3,
        tpot_ms=None if usage.tpot_s is None else usage.tpot_s * 1e3,
        num_hand_offs=usage.num_hand_offs,
        is_slo_met=usage.is_slo_met,
        num_recoveries=usage.num_recoveries,
    )
