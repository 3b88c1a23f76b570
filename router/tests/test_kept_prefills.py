"""Finished prefills whose KV waits on their engine until an engine that decodes has room."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness
from fake_engine import expected_output, make_plan

from sluice.v1 import plan_pb2
from sluice_core.records import EngineId

PD = {"p0": "P", "d0": "D"}


def make_disaggregated_plan(roles: dict[str, str], *, generation: int = 2, wait_ms: int = 10_000) -> plan_pb2.Plan:
    plan = make_plan(
        roles,
        generation=generation,
        strategy="disaggregated",
        strategy_parameters={"grant_wait_milliseconds": str(wait_ms)},
    )
    for engine in plan.engines:
        if engine.role == plan_pb2.ROLE_DECODE_HEAVY:
            engine.chunk_size_tokens = 0
    return plan


def make_harness(roles: dict[str, str], *, wait_ms: int = 10_000) -> Harness:
    harness = Harness(roles)
    harness.router.apply_plan(make_disaggregated_plan(roles, wait_ms=wait_ms))
    harness.deliver()
    for name, role in roles.items():
        harness.cores[name].hands_off_prefills = role == "P"
    return harness


def start(harness: Harness, number: int, max_tokens: int = 10):
    """Requests whose prefill has ended, while decode engines have no room."""
    for name, core in harness.cores.items():
        core.refuse_grants = "kv" if name.startswith("d") else ""
    started = [harness.admit(20, max_tokens, first=1 + index) for index in range(number)]
    for _ in range(3):
        harness.step_all()
    assert set(harness.state.requests.kept) == {request_id for request_id, _ in started}
    return started


def make_room(harness: Harness) -> None:
    for core in harness.cores.values():
        core.refuse_grants = ""


def check_end(harness: Harness, started, num_tokens: int = 10) -> None:
    harness.run()
    for _, stream in started:
        assert stream.token_ids == expected_output(stream.prompt, num_tokens)
        assert stream.finish is not None
    assert not harness.state.requests.kept
    harness.assert_idle()


def test_a_finished_prefill_does_not_decode_in_place_and_goes_on_where_there_is_room():
    harness = make_harness(PD)
    started = start(harness, 2)
    for _ in range(20):
        harness.step_all()
    assert [len(stream.token_ids) for _, stream in started] == [1, 1]
    assert len(harness.cores["p0"].pinned) == 2, "their KV stays where it is"
    make_room(harness)
    check_end(harness, started)
    submits = harness.cores["d0"].submitted
    assert [submit.request_id for submit in submits] == [request_id for request_id, _ in started]
    assert [submit.kv.engine_id for submit in submits] == ["p0", "p0"]
    assert harness.count("moves", "prefill_done", "done") == 2
    assert all(stream.finish.usage.num_hand_offs == 1 for _, stream in started)


def test_with_room_a_finished_prefill_goes_on_at_once():
    harness = make_harness(PD)
    started = [harness.admit(20, 10)]
    check_end(harness, started)
    assert [len(submit.output_token_ids) for submit in harness.cores["d0"].submitted] == [1]
    kinds = [event["event"] for event in harness.router.explain(started[0][0])["events"]]
    assert [kind for kind in kinds if kind not in {"placement", "submitted"}] == [
        *("admitted", "first_token", "kept", "grant_asked", "granted", "handed_off", "moved", "finished")
    ]


def list_asked(harness: Harness, started) -> list[bool]:
    """Which of them have asked for room and wait for the answer."""
    return [harness.state.requests.live[request_id].migration is not None for request_id, _ in started]


def test_one_tick_asks_for_everybody_for_whom_there_is_room():
    harness = make_harness(PD)
    started = start(harness, 3)
    make_room(harness)
    harness.clock.advance(0.03)
    harness.router.tick()
    assert list_asked(harness, started) == [True, True, True]
    check_end(harness, started)


def test_whoever_has_asked_keeps_nobody_from_asking():
    harness = make_harness(PD)
    started = start(harness, 1)
    make_room(harness)
    harness.clock.advance(0.03)
    harness.router.tick()
    started.append(harness.admit(20, 10, first=5))
    harness.deliver_down("p0")
    harness.step("p0")
    while harness.up["p0"]:
        harness.deliver_up("p0")
    assert list_asked(harness, started) == [True, True]
    check_end(harness, started)


def test_a_short_request_does_not_overtake_a_long_one_that_finds_no_room():
    harness = make_harness(PD)
    harness.cores["d0"].kv_blocks_total = 10
    harness.step_all()
    started = [harness.admit(200, 10), harness.admit(20, 10)]
    for _ in range(5):
        harness.step_all()
    assert list_asked(harness, started) == [False, False]
    assert not harness.cores["d0"].submitted
    assert len(harness.state.requests.kept) == 2
    harness.cores["d0"].kv_blocks_total = 100
    check_end(harness, started)
    assert [len(submit.prompt_token_ids) for submit in harness.cores["d0"].submitted] == [200, 20]


def test_a_request_that_was_refused_room_asks_again_when_its_pause_is_over_and_not_before():
    harness = make_harness(PD)
    started = start(harness, 1)
    kept = harness.state.requests.live[started[0][0]].kept_kv
    make_room(harness)
    for now_s, is_asked in ((kept.not_before_s - 0.001, False), (kept.not_before_s, True)):
        harness.clock.now_s = now_s
        harness.router.tick()
        assert list_asked(harness, started) == [is_asked]
    check_end(harness, started)


def test_what_is_kept_waits_while_no_plan_is_known():
    """A router that has just begun can adopt a prefill that ends before its first plan comes."""
    harness = make_harness(PD)
    started = start(harness, 1)
    policy, harness.state.active.policy = harness.state.active.policy, None
    make_room(harness)
    harness.clock.advance(0.03)
    harness.router.tick()
    assert list_asked(harness, started) == [False]
    harness.state.active.policy = policy
    check_end(harness, started)
    assert len(harness.cores["d0"].submitted) == 1


def test_a_wait_that_takes_too_long_ends_with_a_recompute_in_place():
    harness = make_harness(PD, wait_ms=100)
    started = start(harness, 1)
    check_end(harness, started)
    assert [submit.is_recovery for submit in harness.cores["p0"].submitted] == [False, True]
    assert harness.count("recoveries", "grant_wait") == 1


def test_a_wait_lasts_until_the_moment_of_its_end():
    harness = make_harness(PD)
    started = start(harness, 1)
    until_s = harness.state.requests.live[started[0][0]].kept_kv.until_s
    for now_s, num_kept in ((until_s - 0.001, 1), (until_s, 0)):
        harness.clock.now_s = now_s
        for name in PD:
            harness.step(name)
            harness.deliver_up(name)
        harness.router.tick()
        assert len(harness.state.requests.kept) == num_kept
    assert harness.count("recoveries", "grant_wait") == 1
    check_end(harness, started)


def test_without_a_decode_engine_left_nobody_waits():
    harness = make_harness(PD)
    started = start(harness, 2)
    harness.kill("d0")
    for _ in range(3):
        harness.step_all()
    assert not harness.state.requests.kept
    check_end(harness, started)
    assert harness.count("recoveries", "no_decode_engine") == 2


def test_when_the_prefill_engine_dies_what_waits_there_is_recovered_elsewhere():
    harness = make_harness({"p0": "P", "p1": "P", "d0": "D"})
    started = start(harness, 4)
    assert all(len(harness.cores[name].pinned) == 2 for name in ("p0", "p1"))
    harness.kill("p0")
    make_room(harness)
    check_end(harness, started)
    assert harness.count("moves", "prefill_done", "done") == 2


def test_when_the_decode_engine_dies_before_it_answers_another_is_asked():
    harness = make_harness({"p0": "P", "d0": "D", "d1": "D"})
    started = start(harness, 1)
    request = harness.state.requests.live[started[0][0]]
    make_room(harness)
    while request.migration is None:
        harness.clock.advance(0.01)
        harness.router.tick()
    asked = request.migration.target.engine_id
    harness.kill(asked)
    assert request.kept_kv is not None
    check_end(harness, started)
    (other,) = {"d0", "d1"} - {asked}
    assert len(harness.cores[other].submitted) == 1


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_client_that_leaves_meanwhile_frees_the_kv_and_the_grant(is_asked):
    harness = make_harness(PD)
    ((request_id, stream),) = start(harness, 1)
    request = harness.state.requests.live[request_id]
    if is_asked:
        make_room(harness)
        while request.migration is None:
            harness.clock.advance(0.01)
            harness.router.tick()
    stream.is_cancelled = True
    harness.router.cancel(request_id)
    harness.run(3)
    harness.assert_idle()
    assert not harness.state.requests.kept


def test_a_switch_of_the_strategy_keeps_what_waits():
    harness = make_harness(PD)
    started = start(harness, 2)
    harness.router.apply_plan(make_plan(PD, generation=3))
    make_room(harness)
    check_end(harness, started)
    assert len(harness.cores["d0"].submitted) == 2


def test_a_switch_to_a_strategy_without_moves_ends_the_waits():
    harness = make_harness(PD)
    started = start(harness, 2)
    plan = make_plan(PD, generation=3, strategy="aggregated", strategy_parameters={})
    for engine in plan.engines:
        engine.chunk_size_tokens = 256
    harness.router.apply_plan(plan)
    harness.cores["p0"].hands_off_prefills = False
    check_end(harness, started)
    assert harness.count("recoveries", "no_decode_engine") == 2


def test_a_hand_off_while_the_router_asks_for_the_move_is_one_move():
    """The router's plan is ahead of the engine's: both let the first decode leave."""
    harness = Harness(PD)
    harness.cores["p0"].hands_off_prefills = True
    harness.state.engines.table.configure(
        EngineId("d0"), role=harness.engines["d0"].role, chunk_size_tokens=0, is_draining=False
    )
    started = [harness.admit(20, 10)]
    check_end(harness, started)
    assert harness.count("moves", "prefill_done", "done") == 1
    assert len(harness.cores["d0"].submitted) == 1


def test_a_plan_that_drains_the_last_decode_engine_ends_the_waits_at_once():
    """Not with the next tick: they are recomputed, and decode where that is done."""
    harness = make_harness(PD)
    started = start(harness, 2)
    plan = make_disaggregated_plan(PD, generation=3)
    (decode,) = [engine for engine in plan.engines if engine.engine_id == "d0"]
    decode.is_draining = True
    harness.router.apply_plan(plan)
    assert not harness.state.requests.kept
    harness.cores["p0"].hands_off_prefills = False
    check_end(harness, started)
    assert harness.count("recoveries", "no_decode_engine") == 2
