"""Streams that break: the engine holds requests, and routers resume them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from engine_server_harness import LENGTH, STOP, Engine, output, report, settle, submit
from fake_core import FINGERPRINT, Builder, Clock, Core

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2
from sluice_engine import core_messages
from sluice_engine.server import attach_stream, engine_server
from sluice_engine.server.engine_server import EngineServer


@pytest.fixture
def engine() -> Engine:
    core, clock = Core(), Clock()
    hello = wire.EngineHello(engine_id="engine-1", epoch=7, fingerprint=FINGERPRINT, max_batch_tokens=512)
    return Engine(EngineServer(hello, core, Builder(), clock=clock, transport="tcp"), core, clock)


# --- lost streams ----------------------------------------------------------------------------------------------------


async def test_requests_of_a_lost_stream_are_listed_in_the_next_hello(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a", fence=6)])
    engine.put_out(output(engine.core_id("a"), [1]))
    router.lose_stream()
    engine.put_out(output(engine.core_id("a"), [2]))
    [message] = engine.attach().receive()
    assert list(message.hello.held) == [wire.HeldRequest(request_id="a", fence=6, num_output_tokens=2)]


def resume(slot: int, request_id: str, next_index: int, fence: int = 1) -> wire.Resume:
    return wire.Resume(slot=slot, request_id=request_id, fence=fence, next_output_index=next_index)


@pytest.mark.parametrize("next_index", [2, 3, 5], ids=["all that it made", "what was on the way", "nothing"])
async def test_a_held_request_goes_on_from_the_token_that_its_router_names(engine, next_index):
    router = engine.attached()
    await router.send(submits=[submit(7, "a", output_token_ids=[90, 91])])
    engine.put_out(output(engine.core_id("a"), [10]))
    router.lose_stream()
    engine.put_out(output(engine.core_id("a"), [11, 12]))
    router = engine.attached()
    await router.send(resumes=[resume(4, "a", next_index)])
    engine.put_out(output(engine.core_id("a"), [13], finish_reason=LENGTH))
    messages = router.receive()
    columns = [column for message in messages for column in zip(message.output_indexes, message.token_ids, strict=True)]
    assert columns == [(2, 10), (3, 11), (4, 12), (5, 13)][next_index - 2 :]
    assert {slot for message in messages for slot in message.slots} == {4}
    assert [(item.slot, item.num_output_tokens) for item in messages[-1].finished] == [(4, 6)]
    assert engine.core.aborted == []
    engine.clock.now_s += 11
    assert engine.server.tick(engine.clock.now_s) == []


async def test_a_request_that_ended_while_it_was_held_ends_when_it_is_resumed(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    core_id = engine.core_id("a")
    router.lose_stream()
    engine.put_out(output(core_id, [10, 2], finish_reason=STOP, stop_reason=2))
    assert engine.server.num_requests == 0
    router = engine.attach()
    [hello] = router.receive()
    assert list(hello.hello.held) == [wire.HeldRequest(request_id="a", fence=1, num_output_tokens=2)]
    await router.send(resumes=[resume(3, "a", 0)])
    [message] = router.receive()
    assert list(message.token_ids) == [10, 2]
    [finished] = message.finished
    assert (finished.slot, finished.reason, finished.stop_token_id) == (3, sampling_pb2.FINISH_REASON_STOP, 2)
    assert list(engine.attach().receive()[0].hello.held) == []


@pytest.mark.parametrize(
    "wrong",
    [resume(3, "b", 1), resume(3, "a", 1, fence=2), resume(3, "a", 9), resume(3, "a", 0)],
    ids=["unknown", "another fence", "a token ahead of it", "a token of another engine"],
)
async def test_what_cannot_be_resumed_ends_its_slot(engine, wrong):
    router = engine.attached()
    await router.send(submits=[submit(0, "a", output_token_ids=[90])])
    router.lose_stream()
    router = engine.attached()
    await router.send(resumes=[wrong])
    [message] = router.receive()
    assert [(item.slot, item.reason) for item in message.finished] == [(3, sampling_pb2.FINISH_REASON_ABORTED)]
    assert not message.slots


async def test_logprobs_are_kept_with_the_tokens_of_a_held_request(engine):
    def rows(token: int) -> SimpleNamespace:
        return SimpleNamespace(
            logprob_token_ids=np.array([[token, token]]),
            logprobs=np.array([[-token, -token]], dtype=np.float32),
            sampled_token_ranks=np.array([1]),
        )

    router = engine.attached()
    await router.send(submits=[submit(0, "a"), submit(1, "b")])
    plain, with_logprobs = engine.core_id("a"), engine.core_id("b")
    engine.put_out(output(with_logprobs, [20], new_logprobs=rows(20)))
    router.lose_stream()
    engine.put_out(output(plain, [10]), output(with_logprobs, [21], new_logprobs=rows(21)))
    router = engine.attached()
    await router.send(resumes=[resume(5, "a", 0), resume(6, "b", 1)])
    [message] = router.receive()
    assert list(zip(message.slots, message.token_ids, strict=True)) == [(5, 10), (6, 21)]
    assert [(item.column, item.logprob) for item in message.logprobs] == [(1, -21.0)]


async def test_kv_of_a_hand_off_without_a_stream_is_freed_and_not_resumed(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    core_id = engine.core_id("a")
    router.lose_stream()
    params = {core_messages.NUM_TOKENS_KEY: 3}
    engine.put_out(output(core_id, [1], finish_reason=LENGTH, kv_transfer_params=params))
    await settle()
    assert engine.core.commands == [core_messages.ReleaseCommand(request_id=core_id)]
    assert list(engine.attach().receive()[0].hello.held) == []


async def test_requests_of_a_lost_stream_end_with_its_lease(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    router.lose_stream()
    engine.clock.now_s += 9.9
    assert engine.server.tick(engine.clock.now_s) == []
    engine.clock.now_s += 0.2
    assert engine.server.tick(engine.clock.now_s) == [engine.core_id("a")]
    assert engine.server.num_requests == 0
    assert list(engine.attach().receive()[0].hello.held) == []


async def test_a_router_that_comes_back_and_ignores_what_is_held_leaks_nothing(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    router.lose_stream()
    engine.clock.now_s += 5
    router = engine.attached()
    await router.send(submits=[submit(0, "b")])
    engine.clock.now_s += 5
    assert engine.server.tick(engine.clock.now_s) == [engine.core_id("a")]
    assert engine.server.num_requests == 1


@pytest.mark.parametrize(
    "fields",
    [{"aborts": [wire.Abort(held_request_id="a")]}, {"submits": [submit(0, "a", fence=2)]}],
    ids=["aborted", "submitted again"],
)
async def test_a_held_request_ends_when_its_router_aborts_it(engine, fields):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    core_id = engine.core_id("a")
    router.lose_stream()
    await engine.attached().send(**fields)
    assert engine.core.aborted == [core_id]


async def test_a_second_stream_of_a_router_takes_the_place_of_the_first(engine):
    old = engine.attached()
    await old.send(submits=[submit(0, "a")])
    new = engine.attached()
    old.lose_stream()  # its coroutine ends after the new one has begun
    engine.put_out(output(engine.core_id("a"), [1]), report=report())
    assert engine.server.num_routers == 1
    assert old.receive() == []
    assert all(not message.slots for message in new.receive())


async def test_a_router_that_does_not_read_loses_its_stream(engine):
    router = engine.attached()
    for _ in range(attach_stream.MAX_WAITING_MESSAGES + 1):
        router.session.send(wire.AttachResponse())
    written = []

    class Writer:
        async def write(self, message):
            written.append(message)

    await router.stream.write(Writer())  # returns: the stream is closed
    assert len(written) == attach_stream.MAX_WAITING_MESSAGES


# --- the clock -------------------------------------------------------------------------------------------------------


async def test_requests_whose_lease_is_over_end_in_the_engine_core_by_the_clock(engine, monkeypatch):
    monkeypatch.setattr(engine_server, "TICK_S", 0.0)
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    router.lose_stream()
    engine.clock.now_s += 10.0
    clock = asyncio.create_task(engine.server.keep_time())
    async with asyncio.timeout(10):
        while not engine.core.aborted:  # noqa: ASYNC110 - the clock ends it
            await asyncio.sleep(0)
    clock.cancel()
    assert engine.core.aborted == [engine.core_id("a")]
    assert engine.server.num_requests == 0


async def test_the_load_is_asked_for_once_while_the_engine_core_is_busy(engine, monkeypatch):
    calls: list[str] = []
    answers = asyncio.Event()

    async def call(method: str, *_arguments: object) -> list[object]:
        calls.append(method)
        await answers.wait()
        return []

    monkeypatch.setattr(engine.core, "call_utility_async", call)
    for _ in range(20):
        engine.clock.now_s += 0.1
        engine.server.tick(engine.clock.now_s)
        await settle()
    assert len(calls) == 1
    answers.set()
    await settle()
    engine.clock.now_s += 0.5
    engine.server.tick(engine.clock.now_s)
    await settle()
    assert len(calls) == 2


async def test_an_engine_that_ends_waits_no_longer_than_it_is_told_for_a_router_that_does_not_read(engine):
    router = engine.attached()
    async with asyncio.timeout(5):
        await engine.server.close("it is dead", timeout_s=0.01)
    assert [message.fault for message in router.receive()] == ["it is dead"]
