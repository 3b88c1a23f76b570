"""Requests that come while there is to be no engine: they are held until one serves, and their clients hear of it."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from data_plane_harness import Harness
from edge_fakes import FakePlane, connect, read_until, request_bytes, say
from fake_engine import expected_output, make_plan

from sluice_router.api.http.http_api import HttpApi, HttpSettings
from sluice_router.errors import NoEngineError
from sluice_router.settings import make_limits

ONE = {"d0": "D"}
HOLD_S = 600
COMMENT = b": waiting for an engine\n\n"


def make_holding(**changes: object) -> Harness:
    """A router whose plan names no engine, and says that the first request brings one."""
    harness = Harness({}, limits=make_limits(wait_limit_s=5))
    harness.router.apply_plan(make_plan({}, hold_seconds=HOLD_S, **changes))
    return harness


def start(harness: Harness, generation: int = 2, **changes: object) -> None:
    """An engine comes, and the plan names it."""
    harness.router.apply_plan(make_plan(ONE, generation=generation, hold_seconds=HOLD_S, **changes))
    harness.attach("d0")
    harness.run()


def test_a_router_that_holds_is_ready_without_engines():
    harness = make_holding()
    assert harness.router.is_ready
    assert harness.router.describe().is_ready
    harness.router.apply_plan(make_plan(ONE, generation=2, hold_seconds=HOLD_S))
    assert harness.router.not_ready_reason == "no engine has acknowledged the plan yet"


def test_a_plan_without_a_time_holds_nothing():
    harness = Harness({}, limits=make_limits(wait_limit_s=5))
    harness.router.apply_plan(make_plan({}))
    assert not harness.router.is_ready


def test_a_held_request_is_answered_by_the_engine_that_comes():
    harness = make_holding()
    _, response_stream = harness.admit(20, 8)
    for _ in range(50):
        harness.clock.advance(10.0)
        harness.router.tick()
    assert (harness.router.describe().num_waiting, harness.router.describe().num_arrived) == (1, 1)
    start(harness)
    assert response_stream.token_ids == expected_output(response_stream.prompt, 8)
    harness.assert_idle()


def test_a_request_is_held_no_longer_than_the_plan_says():
    harness = make_holding()
    _, response_stream = harness.admit()
    harness.clock.advance(HOLD_S - 0.1)
    harness.router.tick()
    assert response_stream.error is None
    harness.clock.advance(0.2)
    harness.router.tick()
    assert isinstance(response_stream.error, NoEngineError)
    assert "600 s" in response_stream.error.message


def test_a_request_is_held_at_least_as_long_as_one_waits_otherwise():
    harness = Harness({}, limits=make_limits(wait_limit_s=5))
    harness.router.apply_plan(make_plan({}, hold_seconds=1))
    _, response_stream = harness.admit()
    harness.clock.advance(4.9)
    harness.router.tick()
    assert response_stream.error is None
    harness.clock.advance(0.2)
    harness.router.tick()
    assert "within 5 s" in response_stream.error.message


def test_the_usual_wait_begins_when_an_engine_is_to_serve():
    harness = make_holding()
    _, response_stream = harness.admit()
    harness.clock.advance(100.0)
    harness.router.tick()
    harness.router.apply_plan(make_plan(ONE, generation=2, hold_seconds=HOLD_S))
    harness.clock.advance(4.9)
    harness.router.tick()
    assert response_stream.error is None
    harness.clock.advance(0.2)
    harness.router.tick()
    assert isinstance(response_stream.error, NoEngineError)


def test_for_placement_and_early_rejection_a_held_request_arrived_when_it_was_held_last(monkeypatch):
    harness = make_holding()
    harness.admit()
    harness.clock.advance(100.0)
    harness.router.tick()
    held_s = harness.clock.now_s
    harness.clock.advance(1.0)
    harness.router.apply_plan(make_plan(ONE, generation=2, hold_seconds=HOLD_S))
    policy, seen = harness.state.active.policy, []
    assign = policy.assign
    monkeypatch.setattr(
        policy, "assign", lambda now, waiting, table: seen.extend(waiting) or assign(now, waiting, table)
    )
    harness.attach("d0")
    harness.admit()
    harness.run()
    assert [request.arrival_s for request in seen[-2:]] == [held_s, held_s + 1.0]
    harness.assert_idle()


def test_requests_that_come_while_the_last_engine_drains_are_held():
    harness = Harness(ONE, limits=make_limits(wait_limit_s=5))
    harness.router.apply_plan(make_plan({"d0": "D-drain"}, generation=2, hold_seconds=HOLD_S))
    _, response_stream = harness.admit()
    harness.clock.advance(60.0)
    harness.router.tick()
    assert response_stream.error is None
    assert harness.router.is_holding


def test_the_scrape_says_that_requests_are_held():
    assert b"sluice_holding 1.0" in make_holding().router.format_metrics()
    assert b"sluice_holding 0.0" in Harness(ONE).router.format_metrics()


# What clients see.


USUAL, QUICK = HttpSettings(), HttpSettings(comment_interval_s=0.01)


@contextlib.asynccontextmanager
async def serve(plane: FakePlane, text, settings: HttpSettings = USUAL):
    api = HttpApi(plane, text, settings)
    port = await api.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await api.close(0.1)


@contextlib.asynccontextmanager
async def ask_for_stream(port: int):
    """A client that has asked for a stream; yields its reader."""
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", {"prompt": "hi", "max_tokens": 1, "stream": True}))
        yield reader


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """Reads a chunk of an answer behind its head; empty: the answer is over."""
    async with asyncio.timeout(60):
        size = int(await reader.readline(), 16)
        data = await reader.readexactly(size + 2)
    assert data.endswith(b"\r\n")
    return data[:-2]


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """Reads what is left of an answer."""
    data = b""
    while chunk := await read_chunk(reader):
        data += chunk
    return data


def make_holding_plane() -> FakePlane:
    plane = FakePlane()
    plane.is_holding = True
    return plane


async def test_a_held_stream_gets_comments_and_then_its_answer(text):
    plane = make_holding_plane()
    async with serve(plane, text, QUICK) as port, ask_for_stream(port) as reader:
        head = await read_until(reader, b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream")
        assert [await read_chunk(reader), await read_chunk(reader)] == [COMMENT, COMMENT]
        (request_id,) = plane.live
        plane.is_holding = False
        tokens = say(text, "hello world")(plane.admitted[0])
        plane.emit(request_id, tokens)
        plane.finish(request_id)
        body = await read_chunks(reader)
    # A reader of server-sent events takes the lines that begin with "data:".
    events = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert "hello world" in "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)
    assert b"data: [DONE]" in body


async def test_a_held_stream_that_fails_says_so_in_an_event(text):
    plane = make_holding_plane()
    async with serve(plane, text, QUICK) as port, ask_for_stream(port) as reader:
        await read_until(reader, b"\r\n\r\n")
        assert await read_chunk(reader) == COMMENT
        (request_id,) = plane.live
        plane.fail(request_id, NoEngineError("no engine has started", retry_after_s=1.0))
        body = await read_chunks(reader)
    assert b'"code": "no_engine"' in body or b'"code":"no_engine"' in body


async def test_a_held_stream_that_fails_before_its_first_comment_gets_a_status(text):
    plane = make_holding_plane()
    async with serve(plane, text) as port, ask_for_stream(port) as reader:
        async with asyncio.timeout(60):
            while not plane.live:
                await plane.changed.wait()
                plane.changed.clear()
        (request_id,) = plane.live
        plane.fail(request_id, NoEngineError("no engine has started", retry_after_s=1.0))
        assert (await read_until(reader, b"\r\n\r\n")).startswith(b"HTTP/1.1 503 ")


async def test_a_client_of_a_held_stream_that_leaves_is_forgotten(text):
    plane = make_holding_plane()
    async with serve(plane, text, QUICK) as port:
        async with ask_for_stream(port) as reader:
            await read_until(reader, COMMENT)
        async with asyncio.timeout(60):
            while plane.live:
                await plane.changed.wait()
                plane.changed.clear()
    assert [reason for _, reason in plane.cancelled] == ["client_gone"]


@pytest.mark.parametrize("is_holding", [False, True])
async def test_an_answer_that_comes_at_once_has_no_comments(text, *, is_holding: bool):
    plane = FakePlane(say(text, "hello world"))
    plane.is_holding = is_holding
    async with serve(plane, text) as port, ask_for_stream(port) as reader:
        assert COMMENT not in await read_until(reader, b"0\r\n\r\n")
