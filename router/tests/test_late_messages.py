"""What comes too late, twice, too early, or before a plan is known: it changes nothing, and costs no stream."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness
from failover_harness import tick_with
from fake_engine import expected_output, make_plan
from migration_harness import TWO, check_end, start_on
from test_adopted_answers import list_events
from test_adoption import ABORTED, KEY, PD, adopt, claim, make_found

from sluice.v1 import control_pb2, engine_pb2, plan_pb2, sampling_pb2
from sluice_core.records import EngineId
from sluice_router.scheduling.entities import MigrationPhase
from sluice_router.settings import make_limits

DRAIN, UNKNOWN = engine_pb2.MOVE_CAUSE_DRAIN, 99


def say(harness: Harness, name: str, **fields: object) -> None:
    harness.router.handle_message(harness.engines[name], engine_pb2.AttachResponse(**fields))


def cancel(harness: Harness, request_id) -> None:
    harness.response_streams[request_id].is_cancelled = True
    harness.router.cancel(request_id)


def start_move(harness: Harness) -> tuple[str, object]:
    """A request that decodes on d0 is to move to d1, which has not answered."""
    request_id, stream = start_on(harness, "d0")
    harness.step("d0")
    harness.deliver()
    assert harness.router.move(request_id, EngineId("d1")) == ""
    return request_id, stream


# What the slot of a proposal holds, cause of the proposal, and what is said of it
PROPOSALS = {
    "a decode": (DRAIN, 1),
    "no known cause": (UNKNOWN, 0),
    "a prompt": (DRAIN, 0),
    "an aborted request": (DRAIN, 0),
    "nothing": (DRAIN, 0),
    "no slot": (DRAIN, 0),
}


@pytest.mark.parametrize("holds", PROPOSALS)
def test_only_a_decode_that_runs_is_moved_for_a_cause_that_is_known(holds):
    cause, num_proposed = PROPOSALS[holds]
    harness = Harness(TWO)
    request_id, _ = start_on(harness, "d0")
    if holds != "a prompt":
        harness.step("d0")
        harness.deliver()
    if holds == "an aborted request":
        cancel(harness, request_id)
    if holds == "nothing":
        harness.run()
    slot = 7 if holds == "no slot" else 0
    say(harness, "d0", proposals=[engine_pb2.Proposal(slot=slot, cause=cause)])
    assert len(list_events(harness, request_id, "proposed")) == num_proposed
    harness.run()
    assert not harness.closed
    harness.assert_idle()


def test_a_draining_engine_is_left_alone_about_what_was_just_aborted_there():
    harness = Harness(TWO)
    request_id, _ = start_on(harness, "d0")
    harness.step("d0")
    harness.deliver()
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    cancel(harness, request_id)
    harness.router.tick()
    harness.run()
    assert not list_events(harness, request_id, "proposed")
    harness.assert_idle()


def test_a_draining_engines_prompts_and_moves_under_way_are_not_proposed():
    harness = Harness(TWO)
    moving, _ = start_move(harness)
    prompt, _ = start_on(harness, "d0")
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    harness.router.tick()
    assert [event["cause"] for event in list_events(harness, moving, "proposed")] == ["manual"]
    assert not list_events(harness, prompt, "proposed")
    harness.run()
    harness.assert_idle()


def test_a_decode_behind_a_slot_that_is_free_leaves_a_draining_engine():
    harness = Harness(TWO)
    start_on(harness, "d0", 1)
    request_id, stream = start_on(harness, "d0")
    harness.step("d0")
    harness.deliver()
    assert harness.engines["d0"].slots[0] is None
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    harness.router.tick()
    assert [event["cause"] for event in list_events(harness, request_id, "proposed")] == ["drain"]
    check_end(harness, stream)


def test_a_move_that_failed_is_followed_at_once_by_one_off_the_draining_engine():
    harness = Harness(TWO)
    request_id, stream = start_move(harness)
    grant_id = harness.state.requests.live[request_id].migration.grant_id
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    harness.router.tick()
    harness.down["d1"].clear()
    say(harness, "d1", grants=[engine_pb2.Grant(grant_id=grant_id, reason="kv")])
    harness.clock.advance(0.05)
    harness.router.tick()
    assert [event["cause"] for event in list_events(harness, request_id, "proposed")] == ["manual", "drain"]
    check_end(harness, stream)


@pytest.mark.parametrize("pause_s", [0.1875, 0.25])
def test_a_draining_engines_decode_is_proposed_again_after_the_pause(pause_s):
    harness = Harness(TWO, limits=make_limits(drain_retry_s=0.25))
    harness.cores["d1"].refuse_grants = "kv"
    request_id, _ = start_on(harness, "d0")
    harness.step("d0")
    harness.deliver()
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    harness.router.tick()
    harness.deliver()
    harness.clock.advance(pause_s)
    harness.router.tick()
    assert len(list_events(harness, request_id, "proposed")) == (1 if pause_s < 0.25 else 2)


def test_why_a_request_left_the_last_engine_that_could_read_its_kv_is_told():
    harness = Harness(plan=False)
    for name in TWO:
        harness.attach(name, model="m", fingerprint=name)
    harness.router.apply_plan(make_plan(TWO))
    harness.deliver()
    request_id, stream = start_on(harness, "d0")
    harness.step_all()
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    harness.router.tick()
    assert list_events(harness, request_id, "lost") == [{"engine": "d0", "reason": "fingerprint", "output_tokens": 1}]
    check_end(harness, stream)


def test_a_hand_off_that_is_refused_after_its_request_was_cancelled_changes_nothing():
    harness = Harness(TWO)
    request_id, _ = start_move(harness)
    harness.deliver_down("d1")
    harness.deliver_up("d1")
    cancel(harness, request_id)
    say(harness, "d0", hand_offs_refused=[engine_pb2.HandOffRefused(slot=0, reason="late")])
    say(harness, "d0", hand_offs_refused=[engine_pb2.HandOffRefused(slot=9, reason="no such slot")])
    harness.run()
    assert not harness.closed
    assert harness.count("moves", "manual", "late") == 0
    harness.assert_idle()


@pytest.mark.parametrize("is_granted", [True, False])
def test_an_answer_to_a_grant_request_that_was_given_up_gives_back_only_what_was_granted(is_granted):
    harness = Harness(TWO)
    request_id, _ = start_move(harness)
    grant_id = harness.state.requests.live[request_id].migration.grant_id
    harness.down["d1"].clear()
    cancel(harness, request_id)
    harness.down["d1"].clear()
    say(harness, "d1", grants=[engine_pb2.Grant(grant_id=grant_id, is_granted=is_granted)])
    released = [item for message in harness.down["d1"] for item in message.released_grant_ids]
    assert released == [grant_id] * is_granted


def test_a_grant_that_is_said_twice_is_used_once():
    harness = Harness(TWO)
    request_id, stream = start_move(harness)
    harness.deliver_down("d1")
    harness.deliver_up("d1")
    move = harness.state.requests.live[request_id].migration
    assert move.phase is MigrationPhase.HANDING_OFF
    say(harness, "d1", grants=[engine_pb2.Grant(grant_id=move.grant_id, is_granted=True)])
    assert not any(message.released_grant_ids for message in harness.down["d1"])
    assert sum(len(message.hand_offs) for message in harness.down["d0"]) == 1
    check_end(harness, stream)
    assert harness.count("moves", "manual", "done") == 1


@pytest.mark.parametrize("reason", ["", "gone"])
def test_an_offer_that_nobody_waits_for_is_given_back_if_it_is_one(reason):
    harness = Harness(TWO)
    say(harness, "d0", kv_offers=[engine_pb2.KvOffer(offer_id=5, reason=reason)])
    assert [item for message in harness.down["d0"] for item in message.released_offer_ids] == [5] * (not reason)


def test_a_part_that_nobody_asked_for_changes_nothing():
    harness = Harness(TWO)
    request_id, stream = start_move(harness)
    grant_id = harness.state.requests.live[request_id].migration.grant_id
    for number in (grant_id, grant_id + 1):
        say(harness, "d1", parts_pulled=[engine_pb2.PartPulled(grant_id=number, reason="what?")])
    check_end(harness, stream)
    assert harness.count("moves", "manual", "done") == 1


def test_a_request_that_waits_for_anybody_is_not_resumed_by_an_engine_that_had_stood_still():
    """It goes on where it is placed; what the engine still has of it ends."""
    harness = Harness({"d0": "D"}, limits=make_limits(iteration_age_floor_s=1.0))
    request_id, stream = harness.admit(20, 20)
    harness.step_all()
    for _ in range(11):
        tick_with(harness, *harness.engines)
    assert harness.closed == [("d0", "hang")]
    assert request_id in harness.state.requests.waiting
    harness.cores["d0"].hold()
    harness.reconnect("d0")
    harness.deliver()
    assert harness.cores["d0"].aborted_held == [request_id]
    assert harness.count("resumed") == 0
    harness.clock.advance(0.01)
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 20)


def test_a_refused_engine_may_say_that_it_drains():
    harness = Harness(PD)
    harness.router.apply_plan(make_plan(PD, generation=2, model_fingerprint="another"))
    load = harness.cores["d0"].load()
    load.is_draining = True
    say(harness, "d0", load=load)
    states = {item.engine_id: item.state for item in harness.router.describe().engines}
    assert states["d0"] == control_pb2.ENGINE_STATE_REFUSED
    assert EngineId("d0") not in harness.state.engines.table


def test_a_router_of_a_model_waits_for_its_plan():
    harness = Harness(model_id="old")
    harness.attach("d0", model_id="old")
    harness.router.tick()
    assert harness.router.not_ready_reason == "no plan yet"
    assert not harness.closed


def test_an_address_that_nobody_knows_is_forgotten_without_a_word():
    harness = Harness(TWO)
    version = harness.state.status.version
    harness.router.forget("127.0.0.1:9999")
    harness.router.note_fault("127.0.0.1:9999", "refused")
    (first, *_) = harness.state.engines.endpoints
    harness.router.forget(first)  # its stream is well
    assert harness.state.status.version == version
    assert first in harness.state.engines.endpoints


def adopt_before_a_plan(name: str, num_output: int, **engine: object) -> tuple[Harness, str, object]:
    """An answer that another router began goes on at a router that has no plan yet."""
    first = Harness(PD)
    for core in first.cores.values():
        for field, value in engine.items():
            setattr(core, field, value)
    request_id, _ = start_on_with_key(first, name)
    for _ in range(num_output):
        first.step(name)
        first.deliver_up(name)
    harness = Harness()
    for each, core in first.cores.items():
        core.hold()
        harness.cores[each] = core
        kept, core.kept = core.kept, {}
        harness._attach(core)
        core.kept = kept
    results = claim(harness)
    harness.deliver()
    return harness, request_id, adopt(harness, results[0])


def start_on_with_key(harness: Harness, name: str):
    others = [other for other in harness.engines if other != name]
    for other in others:
        harness.state.engines.table.configure(
            EngineId(other), role=harness.engines[other].role, chunk_size_tokens=0, is_draining=True
        )
    request_id, stream = harness.admit(20, 8, resume_key=KEY)
    assert harness.engine_of(request_id) == name
    harness.deliver()
    return request_id, stream


@pytest.mark.parametrize("name", PD)
def test_an_adopted_answer_goes_on_before_a_plan_is_known(name):
    harness, request_id, stream = adopt_before_a_plan(name, 0)
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    assert not list_events(harness, request_id, "proposed")
    harness.assert_idle()


def test_a_move_that_an_engine_proposes_before_a_plan_is_known_waits_for_it():
    harness, request_id, stream = adopt_before_a_plan("d0", 2)
    harness.step_all()
    say(harness, "d0", proposals=[engine_pb2.Proposal(slot=0, cause=DRAIN)])
    assert [event["reason"] for event in list_events(harness, request_id, "blocked")] == ["no_plan"]
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)


def test_a_finished_prefill_is_kept_until_a_plan_is_known():
    """For as long as a strategy would keep it that says nothing."""
    harness, request_id, stream = adopt_before_a_plan("p0", 0, hands_off_prefills=True)
    harness.deliver()
    harness.step("p0")
    harness.deliver()
    harness.router.tick()
    assert list_events(harness, request_id, "kept") == [{"engine": "p0", "longest_s": 10.0}]
    harness.router.apply_plan(make_plan(PD))
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    harness.assert_idle()


def test_an_adopted_answer_that_no_engine_has_waits_for_a_plan():
    harness = Harness()
    found = make_found(num_output=3, reason=ABORTED)
    stream = adopt(harness, found)
    for name in PD:
        harness.attach(name)
    harness.router.tick()
    assert list(harness.state.requests.waiting) == [found.submit.request_id]
    harness.router.apply_plan(make_plan(PD))
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, 8)
    harness.assert_idle()


def test_what_an_engine_configured_before_a_plan_is_known_gives_it_no_role():
    harness = Harness()
    harness.attach("d0")
    say(
        harness,
        "d0",
        configured=engine_pb2.Configured(cluster_uid="uid-1", generation=3, role=plan_pb2.ROLE_PREFILL_HEAVY),
    )
    assert (harness.engines["d0"].role, harness.engines["d0"].acknowledged_generation) == (None, 0)
    assert len(harness.state.engines.table) == 0


@pytest.mark.parametrize("reason", ["FINISH_REASON_ABORTED", "FINISH_REASON_LENGTH", "FINISH_REASON_ERROR"])
def test_the_end_of_a_request_that_was_cancelled_meanwhile_frees_its_slot_alone(reason):
    harness = Harness({"d0": "D"})
    request_id, _ = harness.admit(20, 8)
    harness.step_all()
    cancel(harness, request_id)
    harness.cores["d0"].running.clear()
    ends = {"slot": 0, "reason": getattr(sampling_pb2, reason), "num_output_tokens": 5, "error": "why"}
    say(harness, "d0", finished=[engine_pb2.Finished(**ends)])
    assert harness.engines["d0"].num_taken_slots == 0
    assert not harness.closed
    assert harness.state.metrics.counters["requests"] == {("", "cancelled"): 1}
