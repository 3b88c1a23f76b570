"""The engine's server against a fake EngineCore: what routers receive, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from engine_server_harness import LENGTH, STOP, Engine, Router, output, report, settle, submit
from fake_core import FINGERPRINT, Builder, Clock, Core

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import engine_pb2_grpc, sampling_pb2
from sluice_engine import core_messages
from sluice_engine.server.engine_server import EngineServer
from sluice_engine.server.grpc_server import EngineService
from sluice_engine.server.session_table import choose_owner


@pytest.fixture
def engine() -> Engine:
    core, clock = Core(), Clock()
    hello = wire.EngineHello(engine_id="engine-1", epoch=7, fingerprint=FINGERPRINT, max_batch_tokens=512)
    return Engine(EngineServer(hello, core, Builder(), clock=clock, transport="tcp"), core, clock)


# --- tokens ----------------------------------------------------------------------------------------------------------


async def test_an_iteration_is_one_message_per_router_with_that_routers_tokens(engine):
    first, second = engine.attached("router-1"), engine.attached("router-2")
    await first.send(submits=[submit(4, "a"), submit(9, "b")])
    await second.send(submits=[submit(4, "c")])
    first.receive(), second.receive()
    engine.put_out(
        output(engine.core_id("a"), [10]),
        output(engine.core_id("c"), [30]),
        output(engine.core_id("b"), [20, 21]),
        report=report(),
    )
    [message] = first.receive()
    assert (list(message.slots), list(message.token_ids)) == ([4, 9, 9], [10, 20, 21])
    assert list(message.output_indexes) == [0, 0, 1]
    assert message.load.iteration.number == 1
    assert message.load.running_decodes == 1
    [message] = second.receive()
    assert (list(message.slots), list(message.token_ids)) == ([4], [30])


@pytest.mark.parametrize("fields", [{}, {"kv": wire.KvHandle(fingerprint=FINGERPRINT)}], ids=["recomputed", "with KV"])
async def test_output_indexes_go_on_where_other_engines_stopped(engine, fields):
    router = engine.attached()
    await router.send(submits=[submit(0, "a", output_token_ids=[7, 8], **fields)])
    engine.put_out(output(engine.core_id("a"), [9]))
    engine.put_out(output(engine.core_id("a"), [5], finish_reason=LENGTH))
    first, last = router.receive()
    assert list(first.output_indexes) == [2]
    assert list(last.output_indexes) == [3]
    assert last.finished[0].reason == sampling_pb2.FINISH_REASON_LENGTH
    assert last.finished[0].num_output_tokens == 4


async def test_logprobs_name_their_columns_and_others_have_none(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a"), submit(1, "b")])
    rows = SimpleNamespace(
        logprob_token_ids=np.array([[5, 5, 6]]),
        logprobs=np.array([[-0.5, -0.5, -1.5]], dtype=np.float32),
        sampled_token_ranks=np.array([1]),
    )
    engine.put_out(output(engine.core_id("a"), [4]), output(engine.core_id("b"), [5], new_logprobs=rows))
    [message] = router.receive()
    [logprobs] = message.logprobs
    assert (logprobs.column, logprobs.logprob, logprobs.rank) == (1, -0.5, 1)
    assert (list(logprobs.top_token_ids), list(logprobs.top_logprobs)) == ([5, 6], [-0.5, -1.5])


async def test_finished_carries_the_stop_token_and_the_cached_tokens(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    stats = SimpleNamespace(num_local_cached_tokens=32)
    engine.put_out(output(engine.core_id("a"), [2], finish_reason=STOP, stop_reason=2, prefill_stats=stats))
    [finished] = router.receive()[0].finished
    assert finished.reason == sampling_pb2.FINISH_REASON_STOP
    assert (finished.stop_token_id, finished.num_cached_tokens) == (2, 32)


async def test_returned_prompts_end_their_slots(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    engine.put_out(report=report(returned=[engine.core_id("a")]))
    [finished] = router.receive()[0].finished
    assert finished.reason == sampling_pb2.FINISH_REASON_RETURNED
    assert engine.server.num_requests == 0


async def test_proposals_go_to_the_router_of_the_request(engine):
    first, second = engine.attached("router-1"), engine.attached("router-2")
    await first.send(submits=[submit(3, "a")])
    proposal = core_messages.ProposedMove(
        request_id=engine.core_id("a"), cause="degrade", num_output_tokens=5, num_blocks=2
    )
    engine.put_out(output(engine.core_id("a"), [1]), report=report(proposals=[proposal]))
    [message] = first.receive()
    assert message.proposals[0] == wire.Proposal(
        slot=3, cause=wire.MOVE_CAUSE_DEGRADE, num_output_tokens=5, num_blocks=2
    )
    assert not any(message.proposals for message in second.receive())


# --- hello and load reports ------------------------------------------------------------------------------------------


async def test_the_first_message_is_the_hello(engine):
    [message] = engine.attach().receive()
    assert (message.hello.engine_id, message.hello.epoch, message.hello.fingerprint) == ("engine-1", 7, FINGERPRINT)
    assert message.HasField("load")
    assert not message.HasField("configured")


async def test_a_submit_is_reported_to_every_router_when_an_iteration_includes_it(engine):
    first, second = engine.attached("router-1"), engine.attached("router-2")
    await first.send(submits=[submit(0, "a", submit_number=8)])
    first.receive(), second.receive()
    engine.put_out(report=report(last_submit_numbers={first.session.number: 8}))
    [message] = first.receive()
    assert message.load.last_submit_number == 8
    [message] = second.receive()
    assert message.load.last_submit_number == 0


async def test_other_routers_see_a_submit_before_the_iteration_under_way_ends(engine):
    """Each counts its own submits itself, until a report includes them."""
    first, second = engine.attached("router-1"), engine.attached("router-2")
    kv = wire.KvHandle(fingerprint=FINGERPRINT)
    moved = submit(2, "moved", kv=kv, submit_number=3)
    await first.send(submits=[submit(0, "a"), submit(1, "b", output_token_ids=[9]), moved])
    assert first.receive() == []
    [message] = second.receive()
    load = message.load
    assert (load.queued_prefill_tokens, load.queued_requests, load.queued_attention_work) == (3 + 4, 2, 4.5 + 8)
    engine.put_out(report=report(last_submit_numbers={first.session.number: 1}))
    loads = [router.receive()[-1].load for router in (first, second)]
    assert [load.queued_prefill_tokens for load in loads] == [0, 4]
    engine.put_out(report=report(2, last_submit_numbers={first.session.number: 3}))
    assert second.receive()[-1].load.queued_prefill_tokens == 0


async def test_submits_of_a_lost_stream_are_news_no_more(engine):
    first, second = engine.attached("router-1"), engine.attached("router-2")
    await first.send(submits=[submit(0, "a")])
    first.lose_stream()
    second.receive()
    engine.clock.now_s += 1
    engine.server.tick(engine.clock.now_s)
    assert second.receive()[-1].load.queued_prefill_tokens == 0


async def test_an_engine_is_in_the_share_of_one_of_the_routers_that_are_here(engine):
    def owners(*routers: Router) -> list[str]:
        engine.clock.now_s += 1
        engine.server.tick(engine.clock.now_s)
        return [router.session.router_id for router in routers if not router.receive()[-1].load.is_of_others]

    alone = engine.attached("router-1")
    assert owners(alone) == ["router-1"]
    routers = [alone, *(engine.attached(f"router-{number}") for number in (2, 3, 4))]
    [owner] = owners(*routers)
    leaving = next(router for router in routers if router.session.router_id == owner)
    leaving.lose_stream()
    staying = [router for router in routers if router is not leaving]
    [heir] = owners(*staying)
    assert heir != owner
    assert owners(*staying, engine.attached(owner)) == [owner]


def test_shares_are_about_equal_and_change_for_the_routers_concerned_only():
    engines = [f"engine-{number}" for number in range(400)]
    routers = [f"router-{number}" for number in range(4)]
    owners = {name: choose_owner(name, routers) for name in engines}
    assert all(60 < list(owners.values()).count(router) < 140 for router in routers)
    left = {name: choose_owner(name, routers[1:]) for name in engines}
    assert all(left[name] == owner for name, owner in owners.items() if owner != "router-0")
    assert choose_owner("engine-0", []) == ""


async def test_load_reports_without_news_come_every_50_ms_at_most(engine):
    router = engine.attached()
    for number in range(10):
        engine.clock.now_s += 0.02
        engine.put_out(report=report(number))
    assert [message.load.iteration.number for message in router.receive()] == [2, 5, 8]


async def test_an_idle_engine_reports_every_500_ms_without_an_iteration(engine):
    router = engine.attached()
    times = []
    for _ in range(20):
        engine.clock.now_s += 0.1
        engine.server.tick(engine.clock.now_s)
        times += [(round(engine.clock.now_s - 100, 1), message.load) for message in router.receive()]
    assert [time_s for time_s, _ in times] == [0.5, 1.0, 1.5, 2.0]
    assert not any(load.HasField("iteration") for _, load in times)
    assert times[-1][1].iteration_age_s == pytest.approx(2.0)


async def test_an_idle_engine_reads_its_load_because_blocks_come_back_without_iterations(engine):
    router = engine.attached()
    for _ in range(11):
        engine.clock.now_s += 0.1
        engine.server.tick(engine.clock.now_s)
        await settle()
    assert engine.core.commands == [core_messages.ReadLoadCommand()] * 2
    assert router.receive()[-1].load.kv_blocks_total == 99


@pytest.mark.parametrize("is_compiling", [True, False])
async def test_an_engine_that_waits_for_a_grammar_has_no_iteration_that_is_late(engine, is_compiling):
    load = core_messages.SchedulerLoad(queued_prefill_tokens=3)
    answer = core_messages.CompilingAnswer(load=load) if is_compiling else load
    engine.core.answers[core_messages.ReadLoadCommand] = answer
    router = engine.attached()
    ages_s = []
    for _ in range(60):
        engine.clock.now_s += 0.1
        engine.server.tick(engine.clock.now_s)
        await settle()
        ages_s += [message.load.iteration_age_s for message in router.receive()]
    assert engine.server.load == load
    # A router takes an engine for one that hangs from two seconds on.
    assert (max(ages_s) < 1.5) is is_compiling, ages_s


async def test_a_load_that_could_not_be_read_is_read_again(engine):
    engine.core.is_broken = True
    for _ in range(12):
        engine.clock.now_s += 0.1
        engine.server.tick(engine.clock.now_s)
        await settle()
        engine.core.is_broken = engine.clock.now_s < 100.75
    assert engine.core.commands == [core_messages.ReadLoadCommand()]
    assert engine.server.load.kv_blocks_total == 99


async def test_an_offer_for_a_stream_that_has_ended_meanwhile_is_given_back(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    key = router.session.make_grant_key(5)
    engine.core.answers[core_messages.OfferCommand] = core_messages.OfferAnswer(
        key=key, num_tokens=16, transfer_params="{}"
    )
    carry_out = engine.core.call_utility_async

    async def replace_the_stream(method: str, *args: Any) -> Any:
        engine.core.call_utility_async = carry_out
        engine.attach()
        return await carry_out(method, *args)

    engine.core.call_utility_async = replace_the_stream
    await router.send(kv_offer_requests=[wire.KvOfferRequest(offer_id=5, slot=0, fence=1)])
    assert engine.core.commands[1:] == [core_messages.ReleaseOfferCommand(key=key)]


# --- submits that cannot run -----------------------------------------------------------------------------------------


async def test_a_bad_submit_ends_its_slot_and_counts_as_reported(engine):
    router = engine.attached()
    await router.send(submits=[submit(5, "a", prompt_token_ids=[], submit_number=3)])
    [message] = router.receive()
    assert message.finished[0].slot == 5
    assert message.finished[0].reason == sampling_pb2.FINISH_REASON_REFUSED
    assert message.finished[0].error == "prompt_token_ids: empty"
    assert message.load.last_submit_number == 3
    assert engine.core.requests == {}


async def test_a_refused_submit_does_not_count_before_the_accepted_one_ahead_of_it(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a", submit_number=1), submit(1, "b", prompt_token_ids=[], submit_number=2)])
    assert router.receive()[0].load.last_submit_number == 0
    engine.put_out(report=report(last_submit_numbers={router.session.number: 1}))
    assert router.receive()[0].load.last_submit_number == 2


async def test_a_slot_in_use_ends_once_and_takes_its_request_along(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    await router.send(submits=[submit(0, "b")])
    [message] = router.receive()
    assert [finished.error for finished in message.finished] == ["slot: 0 is in use"]
    assert engine.core.aborted == [engine.core_id("a")]
    assert engine.server.num_requests == 0


@pytest.mark.parametrize(
    ("fingerprint", "transfer_params"), [(FINGERPRINT, '{"x":1}'), ("other/model", "")], ids=["equal", "foreign"]
)
async def test_kv_moves_only_between_equal_fingerprints(engine, fingerprint, transfer_params):
    router = engine.attached()
    kv = wire.KvHandle(fingerprint=fingerprint, transfer_params_json='{"x":1}')
    await router.send(submits=[submit(0, "a", kv=kv)])
    assert engine.core.requests[engine.core_id("a")].extras.transfer_params == transfer_params
    assert engine.server.counters.num_foreign_kv == (not transfer_params)


# --- aborts ----------------------------------------------------------------------------------------------------------


async def test_an_abort_is_answered_and_late_tokens_are_dropped(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    core_id = engine.core_id("a")
    await router.send(aborts=[wire.Abort(slot=0)])
    [message] = router.receive()
    assert message.finished[0].reason == sampling_pb2.FINISH_REASON_ABORTED
    assert engine.core.aborted == [core_id]
    await router.send(submits=[submit(0, "b")])
    engine.put_out(output(core_id, [1]))
    assert router.receive() == []


async def test_an_abort_of_an_ended_slot_is_answered_by_nothing(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    engine.put_out(output(engine.core_id("a"), [1], finish_reason=LENGTH))
    router.receive()
    await router.send(aborts=[wire.Abort(slot=0)])
    assert (router.receive(), engine.core.aborted) == ([], [])


# --- grants and hand-offs --------------------------------------------------------------------------------------------


async def test_a_grant_for_a_cause_that_is_not_known_is_refused_by_it(engine):
    router = engine.attached()
    await router.send(grant_requests=[wire.GrantRequest(grant_id=5, num_tokens=40)])
    assert list(router.receive()[0].grants) == [wire.Grant(grant_id=5, reason="cause")]
    assert not engine.core.commands


async def test_grants_of_two_routers_with_one_number_are_two_grants(engine):
    routers = engine.attached("router-1"), engine.attached("router-2")
    for router in routers:
        await router.send(grant_requests=[wire.GrantRequest(grant_id=5, num_tokens=40, cause=wire.MOVE_CAUSE_BACKFLOW)])
        assert router.receive()[0].grants[0] == wire.Grant(grant_id=5, is_granted=True, ttl_s=2.0)
    keys = [command.key for command in engine.core.commands]
    assert len(set(keys)) == 2
    await routers[0].send(submits=[submit(0, "a", grant_id=5)], released_grant_ids=[5])
    assert engine.core.requests[engine.core_id("a")].extras.grant_key == keys[0]
    assert engine.core.commands[-1] == core_messages.ReleaseGrantCommand(key=keys[0])


async def test_the_first_part_of_a_prompt_is_handed_off_without_a_token(engine):
    router = engine.attached()
    await router.send(submits=[submit(2, "a", prompt_token_ids=[1, 2, 3, 4, 5], split_prompt_tokens=3)])
    core_id = engine.core_id("a")
    assert engine.core.requests[core_id].extras.is_first_part
    where = {core_messages.NUM_TOKENS_KEY: 3, "remote_block_ids": [[1]]}
    engine.put_out(output(core_id, [9], finish_reason=LENGTH, kv_transfer_params=where))
    [message] = router.receive()
    assert not message.slots
    [finished] = message.finished
    assert (finished.reason, finished.num_output_tokens) == (sampling_pb2.FINISH_REASON_HANDED_OFF, 0)
    assert finished.kv.num_tokens == 3
    await router.send(released_slots=[2])
    assert engine.core.commands[-1] == core_messages.ReleaseCommand(request_id=core_id)


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"split_prompt_tokens": 3}, 3),
        ({"kv": wire.KvHandle(num_tokens=3)}, 5),
        ({}, 8),
        ({"kv": wire.KvHandle(num_tokens=7)}, 0),
    ],
    ids=["first part", "the rest", "whole", "a decode"],
)
async def test_other_routers_hear_of_the_tokens_that_a_submit_has_to_compute(engine, fields, num_tokens):
    first, second = engine.attached("router-1"), engine.attached("router-2")
    await first.send(submits=[submit(0, "b"), submit(1, "a", prompt_token_ids=range(1, 9), **fields)])
    [message] = second.receive()
    assert message.load.queued_prefill_tokens == 3 + num_tokens


async def test_a_handed_off_slot_carries_the_kv_handle_until_its_release(engine):
    router = engine.attached()
    await router.send(submits=[submit(2, "a", fence=3)])
    core_id = engine.core_id("a")
    await router.send(hand_offs=[wire.HandOff(slot=2, fence=3)])
    assert engine.core.commands == [core_messages.HandOffCommand(request_id=core_id)]
    where = {core_messages.NUM_TOKENS_KEY: 4, "remote_block_ids": [[1]]}
    engine.put_out(output(core_id, [1], finish_reason=LENGTH, kv_transfer_params=where))
    [message] = router.receive()
    assert (list(message.slots), list(message.token_ids)) == ([2], [1])
    [finished] = message.finished
    assert (finished.reason, finished.num_output_tokens) == (sampling_pb2.FINISH_REASON_HANDED_OFF, 1)
    assert (finished.kv.engine_id, finished.kv.epoch, finished.kv.fingerprint) == ("engine-1", 7, FINGERPRINT)
    assert finished.kv.num_tokens == 4
    await router.send(released_slots=[2])
    await router.send(released_slots=[2])
    assert engine.core.commands[1:] == [core_messages.ReleaseCommand(request_id=core_id)]


@pytest.mark.parametrize(
    ("hand_off", "reason"),
    [(wire.HandOff(slot=1, fence=3), "unknown"), (wire.HandOff(slot=0, fence=2), "fence")],
    ids=["no such slot", "an older owner's"],
)
async def test_a_hand_off_that_means_another_request_is_refused(engine, hand_off, reason):
    router = engine.attached()
    await router.send(submits=[submit(0, "a", fence=3)])
    await router.send(hand_offs=[hand_off])
    [refused] = router.receive()[0].hand_offs_refused
    assert (refused.slot, refused.reason) == (hand_off.slot, reason)
    assert engine.core.commands == []


async def test_hand_offs_refused_by_the_scheduler_reach_the_router(engine):
    router = engine.attached()
    await router.send(submits=[submit(0, "a")])
    core_id = engine.core_id("a")
    engine.core.answers[core_messages.HandOffCommand] = core_messages.HandOffAnswer(
        request_id=core_id, is_accepted=False, reason="prefill"
    )
    await router.send(hand_offs=[wire.HandOff(slot=0, fence=1)])
    engine.put_out(report=report(refused=[core_messages.RefusedHandOff(request_id=core_id, reason="preempted")]))
    reasons = [refused.reason for message in router.receive() for refused in message.hand_offs_refused]
    assert reasons == ["prefill", "preempted"]


async def test_a_command_that_fails_costs_its_batch_and_not_the_engine(engine, caplog):
    router = engine.attached()
    engine.core.is_broken = True
    await router.send(grant_requests=[wire.GrantRequest(grant_id=1, cause=wire.MOVE_CAUSE_DRAIN)])
    assert "scheduler raised" in caplog.text
    engine.core.is_broken = False
    await router.send(submits=[submit(0, "a")])
    assert engine.server.num_requests == 1


# --- over gRPC -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def stub(engine):
    listener = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(EngineService(engine.server), listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield engine_pb2_grpc.EngineStub(channel)
    await listener.stop(None)


@pytest.mark.parametrize(
    "first", [wire.AttachRequest(), wire.AttachRequest(aborts=[wire.Abort(slot=1)])], ids=["empty", "no hello"]
)
async def test_a_stream_begins_with_hello(stub, first):
    call = stub.Attach()
    await call.write(first)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_router_streams_and_its_end_is_noticed(engine, stub):
    call = stub.Attach()
    await call.write(wire.AttachRequest(hello=wire.RouterHello(router_id="r")))
    assert (await call.read()).hello.epoch == 7
    await call.write(wire.AttachRequest(submits=[submit(0, "a"), submit(1, "b", prompt_token_ids=[])]))
    assert (await call.read()).finished[0].slot == 1
    engine.put_out(output(engine.core_id("a"), [5]))
    assert list((await call.read()).token_ids) == [5]
    call.cancel()
    async with asyncio.timeout(5):
        while engine.server.num_routers:  # noqa: ASYNC110 - another process ends it
            await asyncio.sleep(0.01)
    assert engine.server.num_requests == 1  # held for the lease


async def test_the_end_of_a_stream_is_orderly_for_the_router(engine, stub):
    call = stub.Attach()
    await call.write(wire.AttachRequest(hello=wire.RouterHello(router_id="r")))
    await call.read()
    await engine.server.close("EngineCore died")
    assert (await call.read()).fault == "EngineCore died"
    assert await call.read() is grpc.aio.EOF


# --- limits of owners of API keys -------------------------------------------------------------------------------------


def make_usage(second: int, number: int = 1, *, owner: str = "alice", running: int = 1, **seconds: int) -> Any:
    entries = [wire.SecondUsage(second=int(name[1:]), requests=count, tokens=9) for name, count in seconds.items()]
    owners = [wire.OwnerUsage(owner=owner, running=running, seconds=entries)]
    return wire.RouterUsage(second=second, number=number, owners=owners)


async def test_what_owners_have_used_on_one_router_is_passed_on_to_the_others_at_once(engine):
    first, second, third = (engine.attached(f"router-{number}") for number in (1, 2, 3))
    usage = make_usage(70, s69=2, s70=1)
    await first.send(usage=usage)
    usage.router_id = "router-1"
    for other in (second, third):
        [message] = other.receive()
        assert list(message.usage) == [usage]
    assert not any(message.usage for message in first.receive())


async def test_a_router_that_comes_later_hears_of_the_last_minute_also_of_one_that_has_left(engine):
    first = engine.attached("router-1")
    await first.send(usage=make_usage(70, s9=5, s10=3, s69=2))
    await first.send(usage=make_usage(71, number=2, s69=1, s71=4))
    engine.clock.now_s += 20
    late = engine.attach("router-2")
    [hello] = late.receive()
    [usage] = hello.usage
    assert (usage.router_id, usage.second, usage.number) == ("router-1", 91, 2)
    [owner] = usage.owners
    assert {entry.second: entry.requests for entry in owner.seconds} == {69: 1, 71: 4}
    again = engine.attach("router-1")
    assert not again.receive()[0].usage


async def test_an_owner_of_whom_nothing_runs_and_a_silent_router_are_forgotten_after_a_minute(engine):
    first = engine.attached("router-1")
    await first.send(usage=make_usage(70, s70=1))
    await first.send(usage=make_usage(70, number=2, owner="bob", running=0))
    [hello] = engine.attach("router-2").receive()
    assert [owner.owner for owner in hello.usage[0].owners] == ["alice"]
    # What runs is not forgotten, however long ago it was admitted.
    await first.send(usage=make_usage(140, number=3))
    [hello] = engine.attach("router-3").receive()
    assert [(owner.owner, owner.running, list(owner.seconds)) for owner in hello.usage[0].owners] == [("alice", 1, [])]
    engine.clock.now_s += 61.5
    engine.server.tick(engine.clock.now_s)
    assert not engine.attach("router-4").receive()[0].usage
