"""A response stream while its client keeps up, pauses and goes on: every event once, whenever the transport is full."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from edge_fakes import LENGTH, make_sse_response_stream

from sluice_router.api import openai_responses
from sluice_router.api.grpc.grpc_response_stream import GrpcResponseStream
from sluice_router.api.http.answer_progress import AnswerProgress
from sluice_router.api.http.response_streams import ClientStream, SseResponseStream
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.errors import DeadlineError, EngineFaultError
from sluice_router.scheduling.requests import Finish, Usage
from sluice_router.text.output import Output, OutputSettings

if TYPE_CHECKING:
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


class Pipe(ClientStream):
    """A connection and its client; full once it has taken so many events."""

    def __init__(self, *response_streams: SseResponseStream, room: int) -> None:
        self.response_streams = response_streams
        self.room = room
        self.events: list[bytes] = []
        self.is_cut = False

    @property
    def is_writable(self) -> bool:
        return self.room > 0

    @property
    def num_buffered_bytes(self) -> int:
        return 1000

    def write(self, data: bytes) -> None:
        if not data:
            return
        self.events.append(data)
        self.room -= 1
        if self.room == 0:
            for response_stream in self.response_streams:
                response_stream.on_paused(1.0)

    def end(self, data: bytes) -> None:
        self.write(data)
        self.room = 99

    def abort(self) -> None:
        self.is_cut = True

    def drain(self, room: int) -> None:
        self.room = room
        for response_stream in self.response_streams:
            response_stream.on_drained()


@pytest.fixture
def readers() -> SlowReaders:
    return SlowReaders(SlowReaderLimits())


def make_response_stream(
    text: ModelText, readers: SlowReaders, progress: AnswerProgress, index: int = 0
) -> SseResponseStream:
    return make_sse_response_stream(
        text, slow_readers=readers, cancel=lambda: pytest.fail("cancelled"), progress=progress, index=index
    )


def read_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole answer, whose end mark comes once and last."""
    assert body.count(openai_responses.DONE) == 1
    assert body.endswith(openai_responses.DONE)
    events = body.removesuffix(openai_responses.DONE).split(b"\n\n")[:-1]
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("room", range(1, 20))
async def test_every_event_goes_out_once_whenever_the_client_pauses(text, readers, room):
    progress = AnswerProgress(1, 1)
    response_stream = make_response_stream(text, readers, progress)
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
    await progress.wait_over()
    pipe.drain(99)
    assert len(readers) == 0
    body = b"".join(pipe.events)
    events = read_events(body)
    assert "".join(event["choices"][0]["text"] for event in events) == WORDS
    assert len(pipe.events) == min(room, len(token_ids)) + 1


@pytest.mark.parametrize("room", range(1, 20))
async def test_choices_share_a_client_that_pauses(text, readers, room):
    progress = AnswerProgress(2, 2)
    choices = [make_response_stream(text, readers, progress, index) for index in (0, 1)]
    pipe = Pipe(*choices, room=room)
    for choice in choices:
        choice.open(pipe, 0.0)
    for token_id in text.encode_now(WORDS, add_special_tokens=False):
        for choice in choices:
            choice.on_token(token_id, None)
            choice.flush(0.0)
    for choice in reversed(choices):
        choice.on_finished(FINISH)
    for _ in range(3):
        pipe.drain(99)
    await progress.wait_over()
    assert len(readers) == 0
    texts = {0: "", 1: ""}
    for event in read_events(b"".join(pipe.events)):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: WORDS, 1: WORDS}


async def test_an_answer_may_begin_while_its_client_is_paused(text, readers):
    progress = AnswerProgress(1, 1)
    response_stream = make_response_stream(text, readers, progress)
    token_ids = text.encode_now(WORDS, add_special_tokens=False)
    response_stream.on_token(token_ids[0], None)
    response_stream.flush(0.0)
    await progress.wait_first()
    pipe = Pipe(response_stream, room=0)
    response_stream.open(pipe, 7.0)
    assert (len(readers), response_stream.paused_since_s) == (1, 7.0)
    before = len(pipe.events)
    for token_id in token_ids[1:]:
        response_stream.on_token(token_id, None)
        response_stream.flush(8.0)
    assert (len(pipe.events), response_stream.paused_since_s) == (before, 7.0)
    # The transport's bytes count with those that are kept for it.
    assert response_stream.num_buffered_bytes > 1000
    pipe.drain(99)
    assert response_stream.num_buffered_bytes == 1000
    response_stream.on_finished(FINISH)
    assert "".join(event["choices"][0]["text"] for event in read_events(b"".join(pipe.events))) == WORDS


async def test_who_is_paused_behind_the_end_is_no_slow_reader(text, readers):
    response_stream = make_response_stream(text, readers, AnswerProgress(1, 1))
    pipe = Pipe(response_stream, room=99)
    response_stream.open(pipe, 0.0)
    response_stream.on_finished(FINISH)
    response_stream.on_paused(1.0)
    assert len(readers) == 0
    response_stream.on_drained()
    assert read_events(b"".join(pipe.events))


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_slow_reader_is_cancelled_and_cut(text, readers, is_open):
    cancelled: list[bool] = []
    response_stream = make_sse_response_stream(text, slow_readers=readers, cancel=lambda: cancelled.append(True))
    pipe = Pipe(response_stream, room=99)
    if is_open:
        response_stream.open(pipe, 0.0)
    response_stream.shed()
    assert (cancelled, pipe.is_cut) == ([True], is_open)


async def test_what_came_with_the_fault_goes_out_before_it(text, readers):
    progress = AnswerProgress(1, 1)
    response_stream = make_response_stream(text, readers, progress)
    first, *others = text.encode_now(WORDS, add_special_tokens=False)
    pipe = Pipe(response_stream, room=99)
    response_stream.on_token(first, None)
    response_stream.flush(0.0)
    response_stream.open(pipe, 0.0)
    for token_id in others:
        response_stream.on_token(token_id, None)
    response_stream.on_error(EngineFaultError("why"))
    *events, fault = read_events(b"".join(pipe.events))
    assert "".join(event["choices"][0]["text"] for event in events) == WORDS
    assert fault["error"]["code"] == "engine_fault"


async def test_the_first_choice_that_fails_fails_the_answer():
    progress = AnswerProgress(3, 3)
    progress.note_end(1, EngineFaultError("the first"))
    assert not progress.is_over
    progress.note_end(0, DeadlineError("the second"))
    progress.note_end(2, FINISH)
    assert progress.is_over
    progress.announce()
    progress.announce()
    with pytest.raises(EngineFaultError, match="the first"):
        await progress.wait_first()


@pytest.mark.parametrize("comes_first", [True, False])
async def test_answer_is_opened_once_by_the_first_that_there_is_to_send(comes_first):
    progress, opened = AnswerProgress(1, 1), []
    if comes_first:
        progress.announce()
    progress.open_with(lambda: opened.append(1))
    assert opened == [1] * comes_first
    progress.announce()
    progress.announce()
    assert opened == [1]


@pytest.mark.parametrize("comes_first", [True, False])
async def test_answer_that_fails_before_its_first_token_is_not_opened(comes_first):
    progress, opened = AnswerProgress(1, 1), []
    if not comes_first:
        progress.open_with(lambda: opened.append(1))
    progress.note_end(0, EngineFaultError("too early"))
    progress.announce()
    if comes_first:
        progress.open_with(lambda: opened.append(1))
    await progress.wait_over()
    assert opened == []
    with pytest.raises(EngineFaultError, match="too early"):
        progress.raise_error()


async def test_answer_that_cannot_be_opened_is_over_for_who_waits_and_for_the_data_plane():
    progress = AnswerProgress(1, 1)
    progress.open_with(lambda: divmod(1, 0))
    with pytest.raises(ZeroDivisionError):
        progress.announce()
    with pytest.raises(ZeroDivisionError):
        await progress.wait_over()


async def test_an_answer_is_over_once_though_its_client_has_gone_in_the_same_tick():
    progress = AnswerProgress(2, 2)
    assert not await progress.wait_news(0.0)
    assert [progress.note_written(), progress.note_written()] == [False, True]
    progress.conclude()
    progress.conclude()
    await progress.wait_over()
    progress.announce()
    assert await progress.wait_news(60.0)


@pytest.mark.parametrize(("now_s", "num_shed"), [(134.9, {}), (135.1, {"paused": 1})])
async def test_grpc_client_is_paused_from_the_first_delta_that_it_keeps_waiting(text, readers, now_s, num_shed):
    """It may stay so for 30 s, whatever comes meanwhile."""
    cut: list[bool] = []
    response_stream = GrpcResponseStream(
        Output(text, OutputSettings()), slow_readers=readers, cancel=lambda: cut.append(True)
    )
    for arrival_s in (100.0, 105.0, 120.0):
        response_stream.on_token(100, None)
        response_stream.flush(arrival_s)
        if arrival_s == 100.0:
            await response_stream.next()  # and its write takes from here on
    readers.sweep(now_s)
    assert readers.num_shed == num_shed
    assert cut == [True] * len(num_shed)


async def test_a_grpc_client_gets_at_the_end_what_might_have_begun_a_stop_string(text, readers):
    output = Output(text, OutputSettings(stops=("end of it",)))
    response_stream = GrpcResponseStream(output, slow_readers=readers, cancel=lambda: None)
    for token_id in text.encode_now(WORDS, add_special_tokens=False):
        response_stream.on_token(token_id, None)
    response_stream.flush(100.0)
    delta, end = await response_stream.next()
    assert (WORDS.startswith(delta.text), delta.text == WORDS, end) == (True, False, None)
    response_stream.on_finished(FINISH)
    rest, end = await response_stream.next()
    assert (delta.text + rest.text, end) == (WORDS, FINISH)
