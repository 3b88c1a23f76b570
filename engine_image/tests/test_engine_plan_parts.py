"""Parts of plans that engines take: generations, chunk sizes, drains."""

from __future__ import annotations

from typing import Any

import pytest
from engine_server_harness import LENGTH, Engine, output, submit
from fake_core import FINGERPRINT, Builder, Clock, Core

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import plan_pb2
from sluice_engine import core_messages
from sluice_engine.server.engine_server import EngineServer
from sluice_engine.server.plan_relay import PlanRelay


@pytest.fixture
def engine() -> Engine:
    core, clock = Core(), Clock()
    hello = wire.EngineHello(engine_id="engine-1", epoch=7, fingerprint=FINGERPRINT, max_batch_tokens=512)
    return Engine(EngineServer(hello, core, Builder(), clock=clock, transport="tcp"), core, clock)


# --- plans -----------------------------------------------------------------------------------------------------------


def configure(generation: int, chunk: int = 256, uid: str = "u", **fields: Any) -> wire.Configure:
    defaults = {"role": plan_pb2.ROLE_PREFILL_HEAVY, "strategy": "taichi"}
    return wire.Configure(cluster_uid=uid, generation=generation, chunk_size_tokens=chunk, **{**defaults, **fields})


async def test_the_highest_generation_wins_whoever_brings_it(engine):
    first, second = engine.attached("router-1"), engine.attached("router-2")
    await first.send(configure=configure(7, chunk=512))
    await second.send(configure=configure(6, chunk=64))
    await second.send(configure=configure(8, chunk=128))
    seen = [
        (message.configured.generation, message.configured.chunk_size_tokens)
        for message in second.receive()
        if message.HasField("configured")
    ]
    assert seen == [(7, 512), (7, 512), (8, 128)]
    assert [command.chunk_size_tokens for command in engine.core.commands] == [512, 128]
    assert engine.attach("router-3").receive()[0].configured.generation == 8


async def test_a_plan_of_another_cluster_is_newer_for_the_engine_core(engine):
    router = engine.attached()
    await router.send(configure=configure(7))
    await router.send(configure=configure(1, uid="v"))
    generations = [command.generation for command in engine.core.commands]
    assert generations == sorted(set(generations))
    assert router.receive()[-1].configured.cluster_uid == "v"


@pytest.mark.parametrize("refused_by", ["server", "scheduler"])
async def test_a_refused_plan_part_leaves_the_old_one_in_force(engine, refused_by):
    router = engine.attached()
    await router.send(configure=configure(1))
    router.receive()
    if refused_by == "server":
        await router.send(configure=configure(2, strategy=""))
    else:
        engine.core.answers[core_messages.ConfigureCommand] = core_messages.ConfigureAnswer(
            generation=1, role="P-heavy", chunk_size_tokens=256, error="chunk_size_tokens: too large"
        )
        await router.send(configure=configure(2))
        del engine.core.answers[core_messages.ConfigureCommand]
    [message] = router.receive()
    assert message.configured.generation == 2
    assert message.configured.error
    assert engine.attach("router-2").receive()[0].configured.generation == 1
    await router.send(configure=configure(2))
    assert router.receive()[-1].configured.error == ""


def test_the_refusal_of_an_older_plan_part_leaves_a_newer_one_that_is_on_its_way():
    relay = PlanRelay(chunk_size_tokens=512)
    assert relay.take(configure(2)) is not None
    assert relay.take(configure(3)) is not None
    assert relay.refuse(configure(2), "chunk_size_tokens: too large").generation == 2
    assert relay.take(configure(2)) is None
    assert relay.take(configure(3)) is None
    assert relay.take(configure(4)) is not None


def test_the_late_answer_to_an_older_plan_part_is_told_to_nobody():
    relay = PlanRelay(chunk_size_tokens=512)
    for generation, told in ((3, 3), (2, None), (3, 3), (4, 4)):
        answer = core_messages.ConfigureAnswer(generation=generation, role="P-heavy", chunk_size_tokens=256)
        configured = relay.acknowledge(configure(generation), answer)
        assert (configured and configured.generation) == told
    assert relay.in_force is not None
    assert relay.in_force.generation == 4


async def test_an_engine_that_the_plan_does_not_name_is_d_heavy(engine):
    router = engine.attached()
    await router.send(configure=configure(1, role=plan_pb2.ROLE_UNSPECIFIED))
    assert engine.core.commands[0].role == "D-heavy"


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_a_drain_is_reported_at_once_and_no_plan_ends_it(engine):
    router = engine.attached()
    await router.send(configure=configure(1, chunk=300))
    router.receive()
    await engine.server.drain()
    assert router.receive()[0].load.is_draining
    await router.send(configure=configure(2))
    assert [command.is_draining for command in engine.core.commands] == [False, True, True]
    assert engine.core.commands[1].chunk_size_tokens == 300


async def test_drained_means_no_request_and_no_pinned_block(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    assert not engine.server.is_drained
    pinned = core_messages.SchedulerReport(load=core_messages.SchedulerLoad(kv_blocks_pinned=2))
    engine.put_out(output(engine.core_id("a"), [1], finish_reason=LENGTH), report=pinned)
    assert not engine.server.is_drained
    engine.put_out(report=core_messages.SchedulerReport(load=core_messages.SchedulerLoad()))
    assert engine.server.is_drained


async def test_a_fault_is_the_last_message(engine):
    router = engine.attached()
    await engine.server.close("EngineCore died", timeout_s=0.0)
    assert [message.fault for message in router.receive()] == ["EngineCore died"]
    router.session.send(wire.AttachResponse())
    assert router.receive() == []


async def test_a_strategy_that_needs_more_than_this_engine_can_do_is_refused_by_name(engine, monkeypatch):
    monkeypatch.setattr(core_messages, "CAPABILITIES", frozenset())
    router = engine.attached()
    await router.send(configure=configure(7, strategy="ecoserve"))
    (message,) = [message for message in router.receive() if message.HasField("configured")]
    assert "ecoserve" in message.configured.error.lower()
    assert engine.core.commands == []
