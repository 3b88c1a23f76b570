"""Answers in OpenAI's JSON, and the server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from mypy_extensions import mypyc_attr

from sluice.v1 import sampling_pb2
from sluice_router.api.logprobs import format_chat_logprobs, format_completion_logprobs
from sluice_router.scheduling.requests import Finish, Usage
from sluice_router.text.output import Delta, OutputSettings
from sluice_router.text.tokenizer import ModelText

DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream; charset=utf-8"
# What an answer's id has before the router's id of the request; of completions and of chats.
ID_PREFIXES = ("cmpl-", "chatcmpl-")
# json.dumps makes one per call.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


@mypyc_attr(allow_interpreted_subclasses=True)
class AnswerFormat:
    """One choice of an answer in the form of its endpoint; the answer's own parts are the same for all choices.

    A base class.

    Attributes:
        answer_id: Id of the answer.
        created_s: When it began, Unix time.
        is_plain: Whether events carry text alone, so that ``plain_chunk`` formats them.
    """

    answer_id: str
    created_s: int
    is_plain: bool

    def start(self) -> bytes:
        """Formats the events before the first text."""
        raise NotImplementedError

    def plain_chunk(self, text: str) -> bytes:
        """Formats one event of text alone."""
        raise NotImplementedError

    def chunk(self, delta: Delta) -> bytes:
        """Formats one event."""
        raise NotImplementedError

    def end(self, delta: Delta, finish: Finish, stop: str | None) -> bytes:
        """Formats a choice's last event: rest of its text, and the reason."""
        raise NotImplementedError

    def last(self, usage: Usage) -> bytes:
        """Formats what follows all choices: usage if asked for, and the end mark."""
        raise NotImplementedError

    def choice(self, delta: Delta, finish: Finish, stop: str | None) -> dict[str, Any]:
        """Formats a whole choice, for requests that do not stream."""
        raise NotImplementedError

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Formats the whole answer."""
        raise NotImplementedError


class _Format(AnswerFormat):
    """What both endpoints share.

    Attributes:
        kind: OpenAI's object name of an answer.
        chunk_kind: OpenAI's object name of a streamed event.
        text_start: What a choice of text alone has between its index and its text.
        text_end: What it has behind its text.

    Args:
        answer_id: Id of the answer.
        index: Of the choice in the answer.
        created_s: Unix time.
        model: Served name.
        settings: How the request wants its output.
        text: Decodes single tokens.
        includes_usage: Whether a stream ends with usage.
        prompt_token_ids: The prompt, for requests that want token ids.
    """

    kind: str
    chunk_kind: str
    text_start: str
    text_end: str

    def __init__(
        self,
        *,
        answer_id: str,
        index: int,
        created_s: int,
        model: str,
        settings: OutputSettings,
        text: ModelText,
        includes_usage: bool,
        prompt_token_ids: list[int] | None,
    ) -> None:
        self.answer_id = answer_id
        self.created_s = created_s
        self._head = {"id": answer_id, "object": self.kind, "created": created_s, "model": model}
        self._index = index
        self._settings = settings
        self.is_plain = not settings.keeps_tokens
        self._text = text
        self._includes_usage = includes_usage
        self._prompt_token_ids = prompt_token_ids
        self._event_start = (
            f'data: {{"id":{encode_basestring(answer_id)},"object":"{self.chunk_kind}","created":{created_s},'
            f'"model":{encode_basestring(model)}'
        )
        self._event_end = ',"usage":null}\n\n' if includes_usage else "}\n\n"
        # What an event of text alone has before and behind its text; made once, which saves most of an event's cost.
        self._prefix = f'{self._event_start},"choices":[{{"index":{index},{self.text_start}'.encode()
        self._suffix = f"{self.text_end}]{self._event_end}".encode()

    def plain_chunk(self, text: str) -> bytes:
        """Formats one event of text alone."""
        return b"".join((self._prefix, encode_basestring(text).encode(), self._suffix))

    def chunk(self, delta: Delta) -> bytes:
        """Formats one event."""
        if self.is_plain:
            return self.plain_chunk(delta.text)
        return self._event(self._choice(delta, '"finish_reason":null'))

    def end(self, delta: Delta, finish: Finish, stop: str | None) -> bytes:
        """Formats a choice's last event."""
        return self._event(self._choice(delta, _format_end(finish, stop)))

    def last(self, usage: Usage) -> bytes:
        """Formats what follows all choices."""
        if not self._includes_usage:
            return DONE
        return f'{self._event_start},"choices":[],"usage":{_dump(format_usage(usage))}}}\n\n'.encode() + DONE

    def choice(self, delta: Delta, finish: Finish, stop: str | None) -> dict[str, Any]:
        """Formats a whole choice."""
        choice = {"index": self._index, **self._content(delta), **_describe_end(finish, stop)}
        if self._settings.returns_token_ids:
            choice |= {"token_ids": delta.token_ids, "prompt_token_ids": self._prompt_token_ids}
        return choice

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Formats the whole answer."""
        return {**self._head, "choices": choices, "usage": format_usage(usage)}

    def _content(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

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


class CompletionFormat(_Format):
    """Answers of ``/v1/completions``; for the arguments see ``_Format``."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    text_start = '"text":'
    text_end = ',"logprobs":null,"finish_reason":null}'
    _text_offset = 0

    def start(self) -> bytes:
        """Formats nothing: completions start with their text."""
        return b""

    def _content(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text, "logprobs": self._logprobs(delta)}

    def _choice(self, delta: Delta, end: str) -> str:
        logprobs = _dump(self._logprobs(delta))
        text = encode_basestring(delta.text)
        return f'{{"index":{self._index},"text":{text},"logprobs":{logprobs},{end}{self._token_ids(delta)}}}'

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        wanted = self._settings.num_logprobs
        if wanted is None:
            return None
        logprobs, self._text_offset = format_completion_logprobs(delta, self._text, wanted, self._text_offset)
        return logprobs


class ChatFormat(_Format):
    """Answers of ``/v1/chat/completions``; for the arguments see ``_Format``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    text_start = '"delta":{"content":'
    text_end = '},"logprobs":null,"finish_reason":null}'

    def start(self) -> bytes:
        """Formats the event that names the speaker."""
        delta = '"delta":{"role":"assistant","content":""}'
        return self._event(f'{{"index":{self._index},{delta},"logprobs":null,"finish_reason":null}}')

    def _content(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(delta)}

    def _choice(self, delta: Delta, end: str) -> str:
        content = f'"content":{encode_basestring(delta.text)}' if delta.text else ""
        logprobs = _dump(self._logprobs(delta) if delta.token_ids else None)
        return f'{{"index":{self._index},"delta":{{{content}}},"logprobs":{logprobs},{end}{self._token_ids(delta)}}}'

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        wanted = self._settings.num_logprobs
        return None if wanted is None else format_chat_logprobs(delta, self._text, wanted)


def add_usages(usages: Sequence[Usage], n: int) -> Usage:
    """Adds up the usages of an answer's choices: tokens are summed, times are the worst.

    Args:
        usages: Of the choices, in their order, at least one.
        n: Choices per prompt; a prompt counts once.
    """
    if len(usages) == 1:
        return usages[0]
    prompts = usages[::n]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        output_tokens=sum(usage.output_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
        ttft_s=max(usage.ttft_s for usage in usages),
        tpot_s=max((usage.tpot_s for usage in usages if usage.tpot_s is not None), default=None),
        num_hand_offs=sum(usage.num_hand_offs for usage in usages),
        num_recoveries=sum(usage.num_recoveries for usage in usages),
        is_slo_met=all(usage.is_slo_met for usage in usages),
    )


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
    end = _describe_end(finish, stop)
    return f'"finish_reason":"{end["finish_reason"]}","stop_reason":{_dump(end["stop_reason"])}'


def _dump(value: object) -> str:
    # Most values are absent, for which the encoder takes as long as for others.
    return "null" if value is None else _ENCODER.encode(value)
