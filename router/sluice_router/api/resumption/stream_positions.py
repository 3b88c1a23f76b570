"""How far a client is in a resumable stream: the ids of its server-sent events, and the events behind one of them.

The id of an event is the number of output tokens that the client has with it. Text that is held back, as it may begin
a stop string, belongs to a later event. So what the first events had follows from the tokens alone. The last two
events have names: ``57-finish`` has the finish reason, ``57-usage`` the usage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sluice_router.api.openai_requests import FieldError, quote
from sluice_router.api.openai_responses import DONE, AnswerFormat
from sluice_router.scheduling.requests import Finish, Usage
from sluice_router.text.output import Delta, Output

LAST_EVENT_ID_HEADER = "Last-Event-ID"
_FORM = re.compile(r"(\d{1,9})(-finish|-usage)?")


class Stage(IntEnum):
    """What a client has."""

    NOTHING = 0
    TOKENS = 1
    FINISH = 2
    USAGE = 3


_STAGES = {None: Stage.TOKENS, "-finish": Stage.FINISH, "-usage": Stage.USAGE}


@dataclass(frozen=True, slots=True)
class Position:
    """How far a client is.

    Args:
        num_tokens: Output tokens that it has.
        stage: What else it has.
    """

    num_tokens: int = 0
    stage: Stage = Stage.NOTHING


def read_position(event_id: str) -> Position:
    """Reads the id of the last event that a client has; empty: it has none.

    Raises:
        FieldError: It is no id of ours.
    """
    if not event_id:
        return Position()
    match = _FORM.fullmatch(event_id)
    if match is None:
        message = (
            f"{LAST_EVENT_ID_HEADER}: an id of the stream's events, such as 12 or 57-finish, not {quote(event_id)}"
        )
        raise FieldError(LAST_EVENT_ID_HEADER, message)
    return Position(int(match[1]), _STAGES[match[2]])


class NumberedFormat(AnswerFormat):
    """Gives the events of a stream their ids, and leaves out what a client has already; see ``AnswerFormat``.

    Args:
        answer: The endpoint's form.
        output: What has been taken of it is in the event.
        position: Where the client is.
    """

    def __init__(self, answer: AnswerFormat, output: Output, position: Position = Position()) -> None:
        self._answer = answer
        self.answer_id, self.created_s = answer.answer_id, answer.created_s
        self._output = output
        self._stage = position.stage
        self.is_plain = answer.is_plain

    def start(self) -> bytes:
        """Formats the events before the first text."""
        data = self._answer.start() if self._stage is Stage.NOTHING else b""
        return b"id: 0\n" + data if data else b""

    def plain_chunk(self, text: str) -> bytes:
        """Formats one event of text alone."""
        return self._number(self._answer.plain_chunk(text))

    def chunk(self, delta: Delta) -> bytes:
        """Formats one event."""
        return self._number(self._answer.chunk(delta))

    def end(self, delta: Delta, finish: Finish, stop: str | None) -> bytes:
        """Formats the event with the finish reason, unless the client has it."""
        if self._stage >= Stage.FINISH:
            return b""
        return self._number(self._answer.end(delta, finish, stop), b"-finish")

    def last(self, usage: Usage) -> bytes:
        """Formats usage, unless the client has it, and the end mark."""
        data = self._answer.last(usage)
        if data == DONE:
            return data
        return DONE if self._stage is Stage.USAGE else self._number(data, b"-usage")

    def choice(self, delta: Delta, finish: Finish, stop: str | None) -> dict[str, Any]:
        """Formats a whole choice."""
        return self._answer.choice(delta, finish, stop)

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Formats the whole answer."""
        return self._answer.whole(choices, usage)

    def _number(self, event: bytes, name: bytes = b"") -> bytes:
        return b"id: %d%b\n%b" % (self._output.first_index, name, event)
