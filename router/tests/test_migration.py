"""Moves: grant, hand-off, release, whoever fails in between."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness
from fake_engine import PARAMETERS, expected_output, make_plan
from migration_harness import PDD, TWO, check_end, start_on

from sluice.v1 import engine_pb2, plan_pb2, sampling_pb2
from sluice_core.records import EngineId, RequestId
from sluice_router.scheduling.entities import MigrationPhase
from sluice_router.settings import make_limits

PD = {"p0": "P", "d0": "D"}


DEGRADE = engine_pb2.MOVE_CAUSE_DEGRADE


BACKFLOW = engine_pb2.MOVE_CAUSE_BACKFLOW


NO_PAUSE = {**PARAMETERS, "min_tokens_between_moves": "0"}


def test_finished_prefill_moves_to_a_decode_heavy_engine():
    harness = Harness(PD)
    request_id, response_stream = start_on(harness, "p0")
    for _ in range(4):
        harness.step_all()
    assert harness.engine_of(request_id) == "d0"
    check_end(harness, response_stream)
    submits = harness.cores["d0"].submitted
    assert [submit.fence for submit in submits] == [2]
    assert submits[0].kv.engine_id == "p0"
    assert submits[0].kv.num_tokens == len(submits[0].prompt_token_ids) + len(submits[0].output_token_ids) - 1
    assert submits[0].grant_id
    (asked,) = [item for message in harness.cores["d0"].commands for item in message.grant_requests]
    # Room for the next token too.
    assert asked.num_tokens == len(submits[0].prompt_token_ids) + 1 + 1
    assert asked.cause == engine_pb2.MOVE_CAUSE_PREFILL_DONE
    assert not submits[0].is_recovery
    assert submits[0].since_first_token_s > 0
    assert response_stream.finish.usage.num_hand_offs == 1
    assert harness.count("moves", "prefill_done", "done") == 1
    # The gap of the move counts as every other one does.
    assert sum(harness.state.metrics.itl_s[""].counts) == 39


def test_tokens_found_where_the_prefill_ran_count_after_a_move():
    harness = Harness(PD)
    harness.cores["p0"].num_cached_tokens = 16
    request_id, response_stream = harness.admit(20, 40)
    for _ in range(4):
        harness.step_all()
    assert harness.engine_of(request_id) == "d0"
    check_end(harness, response_stream)
    assert response_stream.finish.usage.cached_tokens == 16


def test_prefill_on_a_decode_heavy_engine_decodes_in_place():
    harness = Harness(PD)
    _, response_stream = start_on(harness, "d0")
    check_end(harness, response_stream)
    assert not harness.cores["p0"].submitted


def test_request_does_not_move_to_an_engine_that_it_died_on():
    harness = Harness(PD)
    request_id, response_stream = start_on(harness, "d0")
    harness.step_all()
    harness.kill("d0")
    harness.attach("d0", epoch=2)
    harness.step_all()
    assert harness.count("flow_blocked", "prefill_done", "no_target") == 1
    assert harness.engine_of(request_id) == "p0"
    check_end(harness, response_stream)


def test_one_token_answer_is_not_moved():
    harness = Harness(PD)
    request_id, response_stream = start_on(harness, "p0", 1)
    check_end(harness, response_stream, 1)
    assert not any(message.grant_requests for message in harness.cores["d0"].commands)
    # Not even a move is considered: nothing was blocked.
    assert not any(event["event"] == "proposed" for event in harness.router.explain(request_id)["events"])


def test_source_keeps_the_kv_until_the_target_has_the_first_token():
    harness = Harness(PD)
    request_id, response_stream = start_on(harness, "p0")
    harness.step_all()  # first token, grant, hand-off
    harness.step("p0")  # its part ends
    harness.deliver()
    assert harness.engine_of(request_id) == "d0"
    assert harness.cores["p0"].pinned
    harness.step("d0")
    harness.deliver()
    assert not harness.cores["p0"].pinned
    check_end(harness, response_stream)


def test_without_a_grant_the_request_goes_on_and_is_proposed_again():
    harness = Harness(PD)
    harness.cores["d0"].refuse_grants = "watermark"
    request_id, response_stream = start_on(harness, "p0")
    for _ in range(5):
        harness.step_all()
    assert harness.engine_of(request_id) == "p0"
    assert len(response_stream.token_ids) == 5
    assert harness.count("flow_blocked", "prefill_done", "watermark") == 1
    harness.cores["d0"].refuse_grants = ""
    harness.up["p0"].append(harness.cores["p0"].propose(engine_pb2.MOVE_CAUSE_PREFILL_DONE))
    harness.deliver()
    harness.step_all()
    assert harness.engine_of(request_id) == "d0"
    check_end(harness, response_stream)


def test_unanswered_grant_request_is_given_up_and_given_back():
    harness = Harness(PD, limits=make_limits(silence_limit_s=100, iteration_age_floor_s=100))
    request_id, response_stream = start_on(harness, "p0")
    harness.step("p0")
    harness.deliver_up("p0")
    assert harness.state.requests.live[request_id].migration is not None
    waiting = list(harness.down["d0"])
    harness.down["d0"].clear()
    harness.clock.advance(2.1)
    harness.router.tick()
    assert harness.state.requests.live[request_id].migration is None
    assert harness.count("flow_blocked", "prefill_done", "grant_timeout") == 1
    harness.down["d0"].extendleft(reversed(waiting))
    check_end(harness, response_stream)


def test_degradation_and_backflow_go_back_and_forth_and_backflow_resets_the_length():
    harness = Harness(PD)
    harness.router.apply_plan(make_plan(PD, generation=2, strategy_parameters=NO_PAUSE))
    harness.deliver()
    request_id, response_stream = start_on(harness, "d0")
    for cause, name in ((DEGRADE, "p0"), (BACKFLOW, "d0"), (DEGRADE, "p0"), (BACKFLOW, "d0")):
        for _ in range(3):
            harness.step_all()
        source = harness.engine_of(request_id)
        harness.up[source].append(harness.cores[source].propose(cause))
        harness.deliver()
        harness.step_all()
        assert harness.engine_of(request_id) == name
    last = harness.cores["d0"].submitted[-1]
    assert last.output_tokens_since_reset == 0
    assert harness.cores["p0"].submitted[0].output_tokens_since_reset == len(
        harness.cores["p0"].submitted[0].output_token_ids
    )
    check_end(harness, response_stream)
    fences = sorted(submit.fence for core in harness.cores.values() for submit in core.submitted)
    assert fences == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("field", ["num_output_tokens", "kv"])
def test_token_that_a_hand_off_lost_is_noticed_and_computed_again(field):
    """The source's count, or its KV, is of a token that never came."""
    harness = Harness({"d0": "D", "d1": "D"})
    request_id, response_stream = start_on(harness, "d0")
    for _ in range(3):
        harness.step_all()
    assert harness.router.move(request_id, "d1") == ""
    harness.deliver()
    harness.step("d0")
    (finished,) = harness.up["d0"][-1].finished
    assert finished.reason == sampling_pb2.FINISH_REASON_HANDED_OFF
    if field == "kv":
        finished.kv.num_tokens += 1
    else:
        finished.num_output_tokens += 1
    harness.deliver()
    assert harness.closed == [("d0", "protocol")]
    assert harness.engine_of(request_id) == "d1"
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, len(response_stream.token_ids))
    assert response_stream.finish is not None
    assert response_stream.finish.usage.num_recoveries == 1


@pytest.mark.parametrize("tokens_since", [1, 15, 16])
def test_degradation_within_so_many_tokens_of_a_move_is_blocked(tokens_since):
    """The plan says 16."""
    harness = Harness(PD)
    request_id, response_stream = start_on(harness, "p0")
    while harness.engine_of(request_id) != "d0":
        harness.step_all()
    at_move = len(harness.cores["d0"].submitted[0].output_token_ids)
    while len(response_stream.token_ids) < at_move + tokens_since:
        harness.step_all()
    harness.up["d0"].append(harness.cores["d0"].propose(DEGRADE))
    harness.deliver()
    assert harness.count("flow_blocked", "degrade", "too_soon") == (tokens_since < 16)
    for _ in range(3):
        harness.step_all()
    assert harness.engine_of(request_id) == ("d0" if tokens_since < 16 else "p0")
    check_end(harness, response_stream)


def test_refused_hand_off_gives_the_grant_back():
    harness = Harness(PD)
    harness.cores["p0"].refuse_hand_offs = "preempted"
    request_id, response_stream = start_on(harness, "p0")
    harness.step_all()
    assert harness.engine_of(request_id) == "p0"
    assert harness.cores["d0"].released_grants
    assert harness.count("moves", "prefill_done", "preempted") == 1
    check_end(harness, response_stream)


def test_request_that_ends_before_its_hand_off_gives_the_grant_back():
    harness = Harness(PD)
    _, response_stream = start_on(harness, "p0", 2)
    harness.step("p0")
    harness.step("p0")  # it ends on the wire, before the router knows its first token
    check_end(harness, response_stream, 2)


def advance_to(harness: Harness, request_id: RequestId, phase: MigrationPhase) -> None:
    """Lets a request that was placed on p0 get as far in its move to d0."""
    harness.step("p0")
    harness.deliver_up("p0")
    if phase >= MigrationPhase.HANDING_OFF:
        harness.deliver_down("d0")
        harness.deliver_up("d0")
    if phase >= MigrationPhase.SUBMITTED:
        harness.deliver_down("p0")
        harness.step("p0")
        harness.deliver_up("p0")
        harness.deliver_up("p0")
    move = harness.state.requests.live[request_id].migration
    assert move is not None
    assert move.phase is phase


# Engines that copy KV beforehand: test_kv_copies.
PHASES = [MigrationPhase.GRANT_ASKED, MigrationPhase.HANDING_OFF, MigrationPhase.SUBMITTED]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_death_in_any_phase_of_a_move_loses_no_token(phase, victim):
    harness = Harness(PDD)
    request_id, response_stream = start_on(harness, "p0")
    harness.kill("d1")  # so that the target is known
    harness.attach("d1", epoch=2)
    harness.state.engines.table.remove(EngineId("d1"))
    advance_to(harness, request_id, phase)
    harness.kill(victim)
    harness.router.apply_plan(make_plan(PDD, generation=2))
    check_end(harness, response_stream)


def test_kv_that_a_broken_stream_took_along_holds_back_no_message_to_the_next_stream():
    """Of two hand-offs that complete at once, one began before the source's stream broke and the other after it."""
    harness = Harness(PD)
    started = [start_on(harness, "p0")]
    advance_to(harness, started[0][0], MigrationPhase.SUBMITTED)
    harness.cut("p0")
    harness.reconnect("p0")
    harness.deliver()
    started.append(start_on(harness, "p0"))
    advance_to(harness, started[1][0], MigrationPhase.SUBMITTED)
    while harness.down["d0"]:
        harness.deliver_down("d0")
    core = harness.cores["d0"]
    core.running = dict(reversed(core.running.items()))  # the engine tells of the later one first
    harness.step("d0")
    harness.deliver()
    assert harness.count("moves", "prefill_done", "done") == 2
    assert not harness.cores["p0"].pinned
    for _, stream in started:
        check_end(harness, stream)


def hand_off_and_wait(harness: Harness, alive: tuple[str, ...], seconds: float, *, hung: str = ""):
    """Hands two requests off; then time passes in which the target gets no KV, and only ``alive`` report.

    All of them but ``hung`` compute.
    """
    started = [start_on(harness, "p0") for _ in range(2)]
    harness.step_all()
    harness.step("p0")
    harness.deliver()
    moves = [harness.state.requests.live[request_id].migration for request_id, _ in started]
    assert [move and move.phase for move in moves] == [MigrationPhase.SUBMITTED] * 2
    for _ in range(round(seconds * 10)):
        harness.clock.advance(0.1)
        for name in harness.engines.keys() & set(alive):
            load = harness.cores[name].load()
            load.iteration_age_s = 1e9 if name == hung else 0
            harness.router.handle_message(harness.engines[name], engine_pb2.AttachResponse(load=load))
        harness.router.tick()
    return [response_stream for _, response_stream in started]


def test_requests_whose_kv_does_not_come_in_time_are_recomputed():
    harness = Harness(PD, limits=make_limits(pull_timeout_s=1, silence_limit_s=50, iteration_age_floor_s=50))
    streams = hand_off_and_wait(harness, ("p0", "d0"), 1.2)
    assert harness.count("moves", "prefill_done", "pull_timeout") == 2
    for response_stream in streams:
        check_end(harness, response_stream)
    assert harness.count("recoveries", "pull_timeout") == 2


@pytest.mark.parametrize("fault", ["silence", "hang"])
def test_requests_that_pull_from_an_engine_that_stands_still_are_recomputed(fault):
    harness = Harness(PD, limits=make_limits(silence_limit_s=2, iteration_age_floor_s=2, pull_timeout_s=50))
    start_on(harness, "p0", 60)  # keeps it at work
    harness.cores["d0"].refuse_grants = "kv"
    harness.step_all()
    harness.cores["d0"].refuse_grants = ""
    streams = hand_off_and_wait(harness, ("d0",) if fault == "silence" else ("p0", "d0"), 2.3, hung="p0")
    assert harness.closed == [("p0", fault)]
    harness.router.apply_plan(make_plan({"d0": "D"}, generation=2))
    for response_stream in streams:
        check_end(harness, response_stream)
    assert harness.count("recoveries", "source_lost") == 2


@pytest.mark.parametrize("phase", PHASES)
def test_client_gone_in_any_phase_of_a_move_frees_everything(phase):
    harness = Harness(PD)
    request_id, response_stream = start_on(harness, "p0")
    advance_to(harness, request_id, phase)
    response_stream.is_cancelled = True
    harness.router.cancel(request_id)
    harness.deliver()
    for _ in range(3):
        harness.step_all()
    harness.assert_idle()


@pytest.mark.parametrize("num_routers", [1, 3])
def test_moves_in_flight_are_capped_per_engine_for_all_routers_together(num_routers):
    harness = Harness(PD, limits=make_limits(max_moves_per_engine=2 * num_routers), plan=False)
    harness.router.apply_plan(make_plan(PD, num_routers=num_routers))
    harness.deliver()
    for number in range(5):
        start_on(harness, "p0")
        del number
    harness.step("p0")
    harness.deliver_up("p0")
    assert harness.engines["p0"].migrations_out == 2
    assert harness.engines["d0"].migrations_in == 2
    assert harness.count("flow_blocked", "prefill_done", "source_busy") == 3
    harness.run()
    harness.assert_idle()


def test_moves_in_flight_are_capped_per_target_too():
    roles = {"p0": "P", "p1": "P", "d0": "D"}
    harness = Harness(roles, limits=make_limits(max_moves_per_engine=2))
    for name in ("p0", "p0", "p1", "p1"):
        start_on(harness, name)
    for name in ("p0", "p1"):
        harness.step(name)
        harness.deliver_up(name)
    assert harness.engines["d0"].migrations_in == 2
    assert harness.count("flow_blocked", "prefill_done", "no_target") == 2
    harness.run()
    harness.assert_idle()


@pytest.mark.parametrize(
    ("request_id", "engine_id", "reason"),
    [
        ("nobody", "d1", "unknown_request"),
        ("mine", "d9", "unknown_engine"),
        ("mine", "d0", "same_engine"),
        ("mine", "d1", ""),
    ],
)
def test_move_by_hand(request_id, engine_id, reason):
    harness = Harness({"d0": "D", "d1": "D"})
    _, response_stream = start_on_by_hand(harness)
    assert harness.router.move(request_id, EngineId(engine_id)) == reason
    if not reason:
        assert harness.router.move("mine", EngineId(engine_id)) == "moving"
    check_end(harness, response_stream)


def test_move_by_hand_needs_an_engine_that_can_read_the_kv():
    harness = Harness(TWO)
    harness.attach("d2", model="fp", fingerprint="other")
    harness.deliver()
    request_id, response_stream = start_on(harness, "d0")
    harness.step_all()
    assert harness.router.move(request_id, EngineId("d2")) == "fingerprint"
    check_end(harness, response_stream)


def test_moves_by_hand_are_capped_too():
    harness = Harness({"d0": "D", "d1": "D", "d2": "D"}, limits=make_limits(max_moves_per_engine=1))
    first, second = (start_on(harness, name)[0] for name in ("d0", "d1"))
    harness.step_all()
    assert harness.router.move(first, EngineId("d2")) == ""
    assert harness.router.move(second, EngineId("d2")) == "target_busy"
    harness.run()
    harness.assert_idle()


def start_on_by_hand(harness: Harness):
    harness.state.engines.table.configure(
        EngineId("d1"), role=harness.engines["d1"].role, chunk_size_tokens=0, is_draining=False
    )
    request_id, response_stream = harness.admit(20, 40, client_request_id="mine")
    harness.state.engines.table.configure(
        EngineId("d1"), role=harness.engines["d1"].role, chunk_size_tokens=256, is_draining=False
    )
    assert harness.router.move("mine", EngineId("d1")) == "not_decoding"
    harness.step_all()
    assert harness.engine_of(request_id) == "d0"
    return request_id, response_stream


@pytest.mark.parametrize("draining", [None, 256], ids=["all alike", "but for one that drains"])
def test_nothing_moves_where_roles_are_void(draining):
    harness = Harness(PDD if draining else PD)
    parts = [
        plan_pb2.EnginePlan(engine_id="p0", role=plan_pb2.ROLE_PREFILL_HEAVY, chunk_size_tokens=512),
        plan_pb2.EnginePlan(engine_id="d0", role=plan_pb2.ROLE_DECODE_HEAVY, chunk_size_tokens=512),
    ]
    if draining:
        last = plan_pb2.EnginePlan(engine_id="d1", role=plan_pb2.ROLE_DECODE_HEAVY, chunk_size_tokens=draining)
        last.is_draining = True
        parts.append(last)
    harness.router.apply_plan(make_plan(PD, generation=2, engines=parts))
    harness.deliver()
    assert {core.chunk_sizes_tokens for core in harness.cores.values()} == {(512,)}
    response_streams = [harness.admit(20, 20)[1] for _ in range(4)]
    harness.run()
    assert all(response_stream.finish.usage.num_hand_offs == 0 for response_stream in response_streams)
    harness.assert_idle()


SPLIT = engine_pb2.MOVE_CAUSE_SPLIT


def split_one(harness: Harness, *, output_tokens: int):
    """Admits a request to an idle pair, then cuts it where the test wants it."""
    fields = {"generation": 2, "strategy": "dynaserve", "strategy_parameters": {}}
    harness.router.apply_plan(make_plan({"p0": "P", "d0": "P"}, **fields))
    harness.deliver()
    request_id, response_stream = harness.admit(20, 40)
    request = harness.state.requests.live[request_id]
    first, second = request.route
    request.route = (first._replace(end_token=20 + output_tokens - 1), second)
    harness.deliver()
    return request, response_stream, first.engine_id, second.engine_id


def test_a_split_request_changes_engines_at_the_planned_token():
    harness = Harness({"p0": "P", "d0": "P"})
    request, response_stream, first, second = split_one(harness, output_tokens=9)
    assert harness.cores[first].submitted[0].split_output_tokens == 1  # a cold start cuts where the prompt ends
    for _ in range(4):
        harness.step_all()
    harness.up[first].append(harness.cores[first].propose(SPLIT))
    harness.deliver()
    (asked,) = [item for message in harness.cores[second].commands for item in message.grant_requests]
    assert (asked.num_tokens, asked.cause) == (20 + 9 + 1, SPLIT)
    (told,) = [item for message in harness.cores[first].commands for item in message.hand_offs]
    assert told.num_output_tokens == 9
    while harness.engine_of(request.request_id) == first:
        harness.step_all()
    (submit,) = harness.cores[second].submitted
    assert (len(submit.output_token_ids), submit.split_output_tokens) == (9, 0)
    assert request.route == ()
    check_end(harness, response_stream)
    events = harness.router.explain(request.request_id)["events"]
    (split,) = [event for event in events if event["event"] == "split"]
    assert (split["source"], split["target"], split["output_tokens"]) == (first, second, 1)
    assert harness.count("moves", "split", "done") == 1


def test_another_move_ends_the_plan():
    harness = Harness({"p0": "P", "d0": "P"})
    request, response_stream, first, second = split_one(harness, output_tokens=30)
    harness.step_all()
    assert harness.router.move(request.request_id, second) == ""
    harness.deliver()
    while harness.engine_of(request.request_id) == first:
        harness.step_all()
    assert request.route == ()
    assert len(harness.cores[second].submitted[0].output_token_ids) < 30
    harness.step_all()
    harness.up[second].append(harness.cores[second].propose(SPLIT))
    harness.deliver()
    assert harness.count("flow_blocked", "split", "no_target") == 1
    check_end(harness, response_stream)


def test_a_request_that_is_lost_is_placed_again_whole():
    harness = Harness({"p0": "P", "d0": "P"})
    request, response_stream, first, second = split_one(harness, output_tokens=30)
    harness.step_all()
    harness.kill(first)
    harness.deliver()
    assert harness.engine_of(request.request_id) == second
    assert request.route == ()
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 40)


def test_the_router_learns_how_long_answers_are():
    """Of a second request it expects what the first one had."""
    harness = Harness({"p0": "P", "d0": "P"})
    _, response_stream, _, _ = split_one(harness, output_tokens=20)
    check_end(harness, response_stream)
    request_id, _ = harness.admit(20, 2000)
    request = harness.state.requests.live[request_id]
    assert request.route[1].end_token == 20 + 40 + 20 - 1  # 20 tokens of margin; the last token has no KV
