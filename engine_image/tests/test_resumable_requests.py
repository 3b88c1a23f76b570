"""Requests of a router that died: engines keep them, and another router goes on with them by their key."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from engine_server_harness import LENGTH, STOP, Engine, output, settle, submit
from fake_core import FINGERPRINT, Builder, Clock, Core

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2
from sluice_engine import core_messages
from sluice_engine.server.engine_server import EngineServer
from sluice_engine.server.resumption import resumable_requests

KEY = b"key of a"
CLAIMED = sampling_pb2.FINISH_REASON_CLAIMED


@pytest.fixture
def engine() -> Engine:
    core, clock = Core(), Clock()
    hello = wire.EngineHello(engine_id="engine-1", epoch=7, fingerprint=FINGERPRINT, max_batch_tokens=512)
    return Engine(EngineServer(hello, core, Builder(), clock=clock, transport="tcp"), core, clock)


def resumable(slot: int = 0, request_id: str = "a", **fields) -> wire.Submit:
    return submit(slot, request_id, **{"resume_key": KEY, "resume_state": b"state", **fields})


async def claim(router, key: bytes = KEY) -> wire.ClaimAnswer:
    router.receive()
    await router.send(claims=[wire.Claim(resume_key=key)])
    [answer] = [answer for message in router.receive() for answer in message.claim_answers]
    assert answer.resume_key == key
    return answer


def ends(router) -> list[tuple[int, int]]:
    return [(item.slot, item.reason) for message in router.receive() for item in message.finished]


async def test_a_router_whose_stream_breaks_behind_its_claim_is_not_told_of_the_request_by_its_id(engine):
    """It would end there what it does not know, and its client would find the answer nowhere."""
    first = engine.attached("router-1")
    await first.send(submits=[resumable()])
    second = engine.attached("router-2")
    await claim(second)
    second.lose_stream()
    again = engine.attach("router-2")
    assert [item for message in again.receive() for item in message.hello.held] == []
    answer = await claim(again)
    await again.send(resumes=[wire.Resume(slot=3, request_id="a", fence=answer.submit.fence)])
    again.lose_stream()
    held = [item.request_id for message in engine.attach("router-2").receive() for item in message.hello.held]
    assert held == ["a"]


@pytest.mark.parametrize("is_lost", [True, False], ids=["its router is lost", "its router seems to live"])
async def test_another_router_goes_on_with_a_request_at_its_next_token(engine, is_lost):
    first = engine.attached("router-1")
    await first.send(submits=[resumable(7, output_token_ids=[90], fence=5)])
    engine.put_out(output(engine.core_id("a"), [10, 11]))
    first.receive()
    if is_lost:
        first.lose_stream()
    assert engine.server.num_held == is_lost
    engine.clock.now_s += 3
    second = engine.attached("router-2")
    answer = await claim(second)
    assert (list(answer.submit.output_token_ids), answer.num_tokens_before) == ([90, 10, 11], 1)
    assert (answer.submit.fence, answer.submit.resume_state, answer.elapsed_s) == (5, b"state", pytest.approx(3))
    assert not answer.HasField("ended")
    assert ends(first) == ([] if is_lost else [(7, CLAIMED)])
    engine.put_out(output(engine.core_id("a"), [12]))
    await second.send(resumes=[wire.Resume(slot=2, request_id="a", fence=5, next_output_index=3)])
    engine.put_out(output(engine.core_id("a"), [13], finish_reason=LENGTH))
    columns = [
        column
        for message in second.receive()
        for column in zip(message.slots, message.output_indexes, message.token_ids, strict=True)
    ]
    assert columns == [(2, 3, 12), (2, 4, 13)]
    assert not any(message.slots for message in first.receive())
    assert engine.core.aborted == []


@pytest.mark.parametrize("key", [b"", b"key of b"], ids=["empty", "another"])
async def test_a_key_that_nobody_submitted_finds_nothing(engine, key):
    first = engine.attached("router-1")
    await first.send(submits=[resumable(), submit(1, "b")])
    assert not (await claim(engine.attached("router-2"), key)).HasField("submit")
    assert engine.server.num_requests == 2


async def test_an_end_that_the_client_may_have_missed_is_kept_and_can_be_claimed_again(engine):
    first = engine.attached("router-1")
    await first.send(submits=[resumable()])
    engine.put_out(output(engine.core_id("a"), [10, 2], finish_reason=STOP, stop_reason=2))
    await first.send(submits=[submit(0, "b")])  # the slot is another request's now
    for name in ("router-2", "router-3"):
        answer = await claim(engine.attached(name))
        assert list(answer.submit.output_token_ids) == [10, 2]
        assert (answer.ended.reason, answer.ended.stop_token_id) == (sampling_pb2.FINISH_REASON_STOP, 2)
    engine.put_out(output(engine.core_id("b"), [20]))
    assert [list(message.token_ids) for message in first.receive() if message.slots][-1] == [20]
    assert (engine.server.num_kept_ends, engine.server.num_requests) == (1, 1)
    engine.clock.now_s += 30.1
    engine.server.tick(engine.clock.now_s)
    assert engine.server.num_kept_ends == 0
    assert not (await claim(engine.attached("router-2"))).HasField("submit")


async def test_an_aborted_request_can_be_recomputed_by_the_router_that_asks(engine):
    first = engine.attached("router-1")
    await first.send(submits=[resumable()])
    engine.put_out(output(engine.core_id("a"), [10]))
    await first.send(aborts=[wire.Abort(slot=0)])
    answer = await claim(engine.attached("router-2"))
    assert (list(answer.submit.output_token_ids), answer.ended.reason) == ([10], sampling_pb2.FINISH_REASON_ABORTED)
    assert engine.core.aborted == [engine.core_id("a")]


@pytest.mark.parametrize("is_lost", [True, False], ids=["told to by a router that died", "and its router died then"])
async def test_a_request_survives_between_hand_off_and_submit(engine, is_lost):
    first = engine.attached("router-1")
    await first.send(submits=[resumable()])
    if is_lost:
        first.lose_stream()
    params = {core_messages.NUM_TOKENS_KEY: 3}
    engine.put_out(output(engine.core_id("a"), [1], finish_reason=LENGTH, kv_transfer_params=params))
    first.lose_stream()
    await settle()
    answer = await claim(engine.attached("router-2"))
    assert (list(answer.submit.output_token_ids), answer.ended.reason) == ([1], sampling_pb2.FINISH_REASON_HANDED_OFF)


async def test_a_submit_that_comes_behind_another_routers_claim_does_not_run(engine):
    first, second = engine.attached("router-1"), engine.attached("router-2")
    await claim(second)
    await first.send(submits=[resumable(3, output_token_ids=[10, 11], fence=2)])
    assert ends(first) == [(3, CLAIMED)]
    assert engine.core.requests == {}
    # Its router may have been the only one that had it.
    answer = await claim(second)
    assert (list(answer.submit.output_token_ids), answer.ended.reason) == ([10, 11], CLAIMED)
    await second.send(submits=[resumable(4)])
    assert list(engine.core.requests) == [engine.core_id("a")]
    # What claims is forgotten too.
    engine.clock.now_s += 31
    engine.server.tick(engine.clock.now_s)
    await first.send(submits=[resumable(5)])
    assert ends(first) == []


async def test_unclaimed_requests_end_after_their_time_and_free_their_blocks(engine):
    first = engine.attached("router-1")
    await first.send(submits=[resumable(), submit(1, "b")])
    first.lose_stream()
    engine.clock.now_s += 10
    assert engine.server.tick(engine.clock.now_s) == [engine.core_id("b")]
    engine.clock.now_s += 19.9
    assert engine.server.tick(engine.clock.now_s) == []
    engine.clock.now_s += 0.2
    assert engine.server.tick(engine.clock.now_s) == [engine.core_id("a")]
    assert engine.server.num_requests == 0
    assert not (await claim(engine.attached("router-2"))).HasField("submit")


async def test_a_claimed_request_that_its_router_drops_ends(engine):
    first = engine.attached("router-1")
    await first.send(submits=[resumable()])
    second = engine.attached("router-2")
    await claim(second)
    await second.send(aborts=[wire.Abort(held_request_id="a")])
    assert engine.core.aborted == [engine.core_id("a")]
    assert engine.server.num_requests == 0


async def test_a_moved_request_that_comes_back_is_known_by_its_last_stay(engine):
    first = engine.attached("router-1")
    await first.send(submits=[resumable(0, fence=1)])
    params = {core_messages.NUM_TOKENS_KEY: 3}
    engine.put_out(output(engine.core_id("a"), [1], finish_reason=LENGTH, kv_transfer_params=params))
    await first.send(submits=[resumable(1, fence=3, output_token_ids=[1, 5])])
    engine.clock.now_s += 31
    engine.server.tick(engine.clock.now_s)
    answer = await claim(engine.attached("router-2"))
    assert (answer.submit.fence, list(answer.submit.output_token_ids)) == (3, [1, 5])
    assert not answer.HasField("ended")


async def test_memory_of_ends_is_bounded(engine, monkeypatch):
    monkeypatch.setattr(engine.server._sessions.resumable, "_max_ended_bytes", 3 * resumable_requests.RECORD_BYTES)
    first = engine.attached("router-1")
    for number in range(4):
        await first.send(submits=[resumable(number, f"r{number}", resume_key=b"%d" % number)])
        engine.put_out(output(engine.core_id(f"r{number}"), [1], finish_reason=LENGTH))
    second = engine.attached("router-2")
    found = [(await claim(second, b"%d" % number)).HasField("submit") for number in range(4)]
    assert found == [False, False, True, True]
    assert engine.server.counters.num_evicted_ends == 2


async def test_a_router_with_too_long_a_state_has_a_request_that_cannot_be_resumed(engine):
    first = engine.attached("router-1")
    state = bytes(resumable_requests.MAX_STATE_BYTES + 1)
    await first.send(submits=[resumable(resume_state=state)])
    assert not (await claim(engine.attached("router-2"))).HasField("submit")


async def test_bounded_claims_forget_the_oldest(engine, monkeypatch):
    monkeypatch.setattr(resumable_requests, "MAX_CLAIMS", 2)
    second = engine.attached("router-2")
    for key in (KEY, b"b", b"c"):
        await claim(second, key)
    first = engine.attached("router-1")
    await first.send(submits=[resumable(0), resumable(1, "b", resume_key=b"b")])
    assert ends(first) == [(1, CLAIMED)]


async def test_a_claim_brings_the_logprobs_of_the_tokens_made_here(engine):
    first = engine.attached("router-1")
    await first.send(submits=[resumable(output_token_ids=[90])])
    rows = SimpleNamespace(
        logprob_token_ids=np.array([[10, 10]]),
        logprobs=np.array([[-0.25, -0.25]], dtype=np.float32),
        sampled_token_ranks=np.array([1]),
    )
    engine.put_out(output(engine.core_id("a"), [10], new_logprobs=rows))
    answer = await claim(engine.attached("router-2"))
    assert [entry.logprob for entry in answer.logprobs] == [-0.25]


@pytest.mark.parametrize("fence", [1, 9])
async def test_a_refused_submit_hides_nothing_that_runs(engine, fence):
    first, second = engine.attached("router-1"), engine.attached("router-2")
    await second.send(submits=[resumable(0, fence=5)])
    await claim(second)
    await first.send(submits=[resumable(3, fence=fence)])
    assert ends(first) == [(3, CLAIMED)]
    answer = await claim(engine.attached("router-3"))
    assert answer.submit.fence == 5
    assert not answer.HasField("ended")
