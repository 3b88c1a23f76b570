"""A response stream while its client keeps up, pauses and goes on: every event once, whenever the transport is full."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from edge_fakes import LENGTH, make_sse_response_stream

from sluice_router.api import openai_responses
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.scheduling.requests import Finish, Usage

if TYPE_CHECKING:
    from sluice_router.api.response_streams import SseResponseStream
    from sluice_router.text.tokenizer import ModelText

WORDS = "hello world the end"
USAGE = Usage(
    prompt_tokens=1,
    output_tokens=4,
    cached_tokens=0,
    ttft_s=0.1,
    tpot_s=0.01,
    num_hand_offs=0,
    num_recoveries=0,
    is_slo_met=True,
)
FINISH = Finish(reason=LENGTH, stop_token_id=None, usage=USAGE)


class Pipe:
    """A connection and its client; full once it has taken so many events."""

    def __init__(self, response_stream: SseResponseStream, *, room: int) -> None:
        self.response_stream = response_stream
        self.room = room
        self.events: list[bytes] = []

    @property
    def is_writable(self) -> bool:
        return self.room > 0

    @property
    def num_buffered_bytes(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        if not data:
            return
        self.events.append(data)
        self.room -= 1
        if self.room == 0:
            self.response_stream.on_paused(1.0)

    def abort(self) -> None:
        raise AssertionError("nobody reads too slowly here")

    def drain(self, room: int) -> None:
        self.room = room
        self.response_stream.on_drained()


@pytest.fixture
def readers() -> SlowReaders:
    return SlowReaders(SlowReaderLimits())


def make_response_stream(text: ModelText, readers: SlowReaders) -> SseResponseStream:
    return make_sse_response_stream(text, slow_readers=readers, cancel=lambda: pytest.fail("cancelled"))


@pytest.mark.parametrize("room", range(1, 20))
async def test_every_event_goes_out_once_whenever_the_client_pauses(text, readers, room):
    response_stream = make_response_stream(text, readers)
    token_ids = text.encode_now(WORDS, add_special_tokens=False)
    assert len(token_ids) < 18, "the end never fills the transport"
    pipe = Pipe(response_stream, room=room)
    response_stream.on_token(token_ids[0], None)
    response_stream.flush(0.0)
    response_stream.open(pipe, 0.0)
    for token_id in token_ids[1:]:
        response_stream.on_token(token_id, None)
        response_stream.flush(0.0)
    response_stream.on_finished(FINISH)
    assert len(readers) == (room <= len(token_ids))
    pipe.drain(99)
    await response_stream.wait_sent()
    pipe.drain(99)
    assert len(readers) == 0
    body = b"".join(pipe.events)
    assert body.count(openai_responses.DONE) == 1
    assert body.endswith(openai_responses.DONE)
    events = [
        json.loads(event.removeprefix(b"data: "))
        for event in body.removesuffix(openai_responses.DONE).split(b"\n\n")[:-1]
    ]
    assert "".join(event["choices"][0]["text"] for event in events) == WORDS
    assert len(pipe.events) == min(room, len(token_ids)) + 1
