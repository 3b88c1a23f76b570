"""Answers in OpenAI's JSON, and the server-sent events of a stream."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Protocol

from sluice.v1 import sampling_pb2
from sluice_router.api.logprobs import format_chat_logprobs, format_completion_logprobs
from sluice_router.errors import RouterError, error_status_of

if TYPE_CHECKING:
    from sluice_router.scheduling.requests import Finish, Usage
    from sluice_router.text.output import Delta, OutputSettings
    from sluice_router.text.tokenizer import ModelText

DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"
# What an answer's id has before the router's id of the request; of completions and of chats.
ID_PREFIXES = ("cmpl-", "chatcmpl-")
FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


class AnswerFormat(Protocol):
    """One request's answer in the form of its endpoint."""

    def start(self) -> bytes:
        """Formats the events before the first text."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether events carry text alone, so that ``plain_chunk`` formats them."""
        ...

    def plain_chunk(self, text: str) -> bytes:
        """Formats one event of text alone."""
        ...

    def chunk(self, delta: Delta) -> bytes:
        """Formats one event."""
        ...

    def end(self, delta: Delta, finish: Finish, stop: str | None) -> bytes:
        """Formats the last events: rest of the text, reason, usage if asked for, and the end mark."""
        ...

    def whole(self, delta: Delta, finish: Finish, stop: str | None) -> dict[str, Any]:
        """Formats the whole answer, for requests that do not stream."""
        ...


class _Format:
    """What both endpoints share.

    Args:
        answer_id: Id of the answer.
        kind: OpenAI's object name of a chunk.
        created_s: Unix time.
        model: Served name.
        settings: How the request wants its output.
        text: Decodes single tokens.
        includes_usage: Whether a stream ends with usage.
        prompt_token_ids: The prompt, for requests that want token ids.
    """

    def __init__(
        self,
        *,
        answer_id: str,
        kind: str,
        created_s: int,
        model: str,
        settings: OutputSettings,
        text: ModelText,
        includes_usage: bool,
        prompt_token_ids: list[int] | None,
    ) -> None:
        self._head = {"id": answer_id, "object": kind, "created": created_s, "model": model}
        self._settings = settings
        self.is_plain = not settings.keeps_tokens
        self._text = text
        self._includes_usage = includes_usage
        self._prompt_token_ids = prompt_token_ids
        self._event_start = "data: " + _dump(self._head)[:-1]
        self._event_end = ',"usage":null}\n\n' if includes_usage else "}\n\n"
        # What an event of text alone has before and behind its text; made once, which saves most of an event's cost.
        self._prefix = self._suffix = ""

    def plain_chunk(self, text: str) -> bytes:
        """Formats one event of text alone."""
        return (self._prefix + encode_basestring(text) + self._suffix).encode()

    def chunk(self, delta: Delta) -> bytes:
        """Formats one event."""
        if self.is_plain:
            return self.plain_chunk(delta.text)
        return self._event(self._choice(delta, '"finish_reason":null'))

    def end(self, delta: Delta, finish: Finish, stop: str | None) -> bytes:
        """Formats the last events."""
        return self._event(self._choice(delta, _format_end(finish, stop))) + self._last(finish)

    def _choice(self, delta: Delta, end: str) -> str:
        raise NotImplementedError

    def _event(self, choice: str) -> bytes:
        return f'{self._event_start},"choices":[{choice}]{self._event_end}'.encode()

    def _token_ids(self, delta: Delta) -> str:
        """Formats the tokens' part of a choice; the prompt goes with the first."""
        if not self._settings.returns_token_ids:
            return ""
        prompt = ""
        if delta.first_index == 0 and self._prompt_token_ids is not None:
            prompt = f',"prompt_token_ids":{_dump(self._prompt_token_ids)}'
        return f',"token_ids":{_dump(delta.token_ids)}{prompt}'

    def _last(self, finish: Finish) -> bytes:
        if not self._includes_usage:
            return DONE
        usage = _dump(format_usage(finish.usage))
        return f'{self._event_start},"choices":[],"usage":{usage}}}\n\n'.encode() + DONE

    def _whole(self, kind: str, choice: dict[str, Any], delta: Delta, finish: Finish) -> dict[str, Any]:
        if self._settings.returns_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = self._prompt_token_ids
        return {**self._head, "object": kind, "choices": [choice], "usage": format_usage(finish.usage)}


class CompletionFormat(_Format):
    """Answers of ``/v1/completions``; for the arguments see ``_Format``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(kind="text_completion", **arguments)
        self._prefix = f'{self._event_start},"choices":[{{"index":0,"text":'
        self._suffix = f',"logprobs":null,"finish_reason":null}}]{self._event_end}'

    def start(self) -> bytes:
        """Formats nothing: completions start with their text."""
        return b""

    def whole(self, delta: Delta, finish: Finish, stop: str | None) -> dict[str, Any]:
        """Formats the whole answer."""
        choice = {"index": 0, "text": delta.text, "logprobs": self._logprobs(delta), **_describe_end(finish, stop)}
        return self._whole("text_completion", choice, delta, finish)

    def _choice(self, delta: Delta, end: str) -> str:
        logprobs = _dump(self._logprobs(delta))
        text = encode_basestring(delta.text)
        return f'{{"index":0,"text":{text},"logprobs":{logprobs},{end}{self._token_ids(delta)}}}'

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        wanted = self._settings.num_logprobs
        return None if wanted is None else format_completion_logprobs(delta, self._text, wanted)


class ChatFormat(_Format):
    """Answers of ``/v1/chat/completions``; for the arguments see ``_Format``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(kind="chat.completion.chunk", **arguments)
        self._prefix = f'{self._event_start},"choices":[{{"index":0,"delta":{{"content":'
        self._suffix = f'}},"logprobs":null,"finish_reason":null}}]{self._event_end}'

    def start(self) -> bytes:
        """Formats the event that names the speaker."""
        delta = '"delta":{"role":"assistant","content":""}'
        return self._event(f'{{"index":0,{delta},"logprobs":null,"finish_reason":null}}')

    def whole(self, delta: Delta, finish: Finish, stop: str | None) -> dict[str, Any]:
        """Formats the whole answer."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(delta), **_describe_end(finish, stop)}
        return self._whole("chat.completion", choice, delta, finish)

    def _choice(self, delta: Delta, end: str) -> str:
        content = f'"content":{encode_basestring(delta.text)}' if delta.text else ""
        logprobs = _dump(self._logprobs(delta) if delta.token_ids else None)
        return f'{{"index":0,"delta":{{{content}}},"logprobs":{logprobs},{end}{self._token_ids(delta)}}}'

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        wanted = self._settings.num_logprobs
        return None if wanted is None else format_chat_logprobs(delta, self._text, wanted)


def format_usage(usage: Usage) -> dict[str, Any]:
    """Formats usage: OpenAI's fields, and how the request was served."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "ttft_ms": round(usage.ttft_s * 1e3, 3),
        "tpot_ms": None if usage.tpot_s is None else round(usage.tpot_s * 1e3, 3),
        "hand_offs": usage.num_hand_offs,
        "recoveries": usage.num_recoveries,
        "slo_met": usage.is_slo_met,
    }


def format_error(error: RouterError) -> dict[str, Any]:
    """Formats an error in OpenAI's form."""
    return {
        "error": {
            "message": error.message,
            "type": error_status_of(error).type,
            "param": error.param,
            "code": error.code,
        }
    }


def format_error_event(error: RouterError) -> bytes:
    """Formats the end of a stream that fails after its first byte."""
    return f"data: {_dump(format_error(error))}\n\n".encode() + DONE


def strip_id_prefix(answer_id: str) -> str:
    """Returns the router's id of the request whose answer has this id; another id stays what it is."""
    prefix = next((prefix for prefix in ID_PREFIXES if answer_id.startswith(prefix)), "")
    return answer_id.removeprefix(prefix)


def _describe_end(finish: Finish, stop: str | None) -> dict[str, Any]:
    """Describes why an output ended; ``stop_reason`` is vLLM's: the stop string or stop token, none for EOS."""
    return {
        "finish_reason": FINISH_REASONS.get(finish.reason, "stop"),
        "stop_reason": finish.stop_token_id if stop is None else stop,
    }


def _format_end(finish: Finish, stop: str | None) -> str:
    return _dump(_describe_end(finish, stop))[1:-1]


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
