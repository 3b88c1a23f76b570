"""Rules of the data plane at their boundaries: what is forgiven, what is news, who waits how long."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness
from fake_engine import make_plan
from migration_harness import TWO, start_on
from test_adopted_answers import list_events
from test_adoption import KEY, PD
from test_kept_prefills import make_harness as make_disaggregated_harness
from test_kept_prefills import make_room, start

from sluice.v1 import engine_pb2, sampling_pb2
from sluice_core.records import EngineId
from sluice_router.errors import QueueFullError
from sluice_router.settings import make_limits

PATIENT = make_limits(silence_limit_s=1e6, iteration_age_floor_s=1e6)


def say(harness: Harness, name: str, **fields: object) -> None:
    harness.router.handle_message(harness.engines[name], engine_pb2.AttachResponse(**fields))


def test_engines_that_fall_silent_together_are_lost_together():
    harness = Harness(TWO, limits=make_limits(silence_limit_s=2.0))
    for _ in range(22):
        harness.clock.advance(0.1)
        harness.router.tick()
    assert sorted(harness.closed) == [("d0", "silence"), ("d1", "silence")]


def test_a_pause_of_the_router_is_forgiven_once_and_never_ahead_of_time():
    """What was heard in its midst is not worth more than what was heard at its end."""
    harness = Harness({"d0": "D"}, limits=make_limits(silence_limit_s=2.0, iteration_age_floor_s=2.0))
    harness.router.tick()
    harness.clock.advance(5.0)
    say(harness, "d0", load=harness.cores["d0"].load())
    harness.clock.advance(5.0)
    harness.router.tick()
    engine = harness.engines["d0"]
    assert (engine.last_heard_s, engine.progress_s) == (harness.clock.now_s, harness.clock.now_s)
    for _ in range(19):
        harness.clock.advance(0.1)
        harness.router.tick()
    assert not harness.closed
    for _ in range(2):
        harness.clock.advance(0.1)
        harness.router.tick()
    assert harness.closed == [("d0", "silence")]


@pytest.mark.parametrize(("pause_s", "is_forgiven"), [(0.125, False), (0.25, True)])
def test_only_pauses_longer_than_ticks_may_be_apart_are_forgiven(pause_s, is_forgiven):
    harness = Harness({"d0": "D"})
    harness.router.tick()
    before_s = harness.engines["d0"].last_heard_s
    harness.clock.advance(pause_s)
    harness.router.tick()
    assert harness.engines["d0"].last_heard_s - before_s == (pause_s if is_forgiven else 0.0)


def test_what_people_and_the_control_plane_see_is_news_and_nothing_else():
    harness = Harness(PD)
    versions = [harness.state.status.version]

    def is_news() -> bool:
        versions.append(harness.state.status.version)
        return versions[-1] > versions[-2]

    known = frozenset(harness.state.engines.endpoints)
    harness.router.set_addresses(known)
    assert not is_news()
    harness.router.set_addresses(known | {"127.0.0.1:99"})
    assert is_news()
    harness.router.set_edge_fault("no keys")
    assert is_news()
    harness.router.set_edge_fault("no keys")
    assert not is_news()
    harness.router.set_edge_fault("")
    assert is_news()
    assert harness.router.is_ready
    harness.cores["d0"].acknowledges = False
    harness.router.apply_plan(make_plan(PD, generation=2))
    harness.deliver()
    assert is_news()
    configured = harness.cores["p0"].configured
    configured.generation = 2
    say(harness, "d0", configured=configured)
    assert is_news()
    harness.attach("d1")
    assert is_news()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (("stop", "fault"), "shutting down"),
        (("fault",), "no keys"),
        ((), "no plan yet"),
        (("plan",), "no engine has acknowledged the plan yet"),
        (("plan", "fault"), "no keys"),
        (("plan", "engine"), ""),
    ],
)
def test_the_first_reason_that_keeps_a_router_from_serving_is_told(prepare, reason):
    harness = Harness()
    acts = {
        "stop": harness.router.stop_accepting,
        "fault": lambda: harness.router.set_edge_fault("no keys"),
        "plan": lambda: harness.router.apply_plan(make_plan({"d0": "D"})),
        "engine": lambda: (harness.attach("d0"), harness.deliver()),
    }
    for name in prepare:
        acts[name]()
    assert (harness.router.not_ready_reason, harness.router.is_ready) == (reason, not reason)
    assert harness.router.describe().is_ready is not bool(reason)


def test_output_is_limited_only_where_the_owners_limits_say_so():
    harness = Harness(PD)
    limits = [{"owner": "a", "max_output_tokens": 7, "weight": 1}, {"owner": "b", "weight": 1}]
    harness.router.apply_plan(make_plan(PD, generation=2, owner_limits=limits))
    assert [harness.router.find_output_limit(owner) for owner in ("a", "b", "c")] == [7, None, None]


def test_each_admission_is_timed_also_one_that_is_refused():
    harness = Harness(PD)
    harness.admit()
    with pytest.raises(Exception, match="no tokens"):
        harness.admit(0)
    assert sum(harness.state.metrics.decision_s.counts) == 2


@pytest.mark.parametrize(("timeouts_s", "kept_s"), [([], 0.0), ([5.0, 2.0], 5.0), ([2.0, 5.0], 5.0)])
def test_a_request_without_a_client_is_kept_as_long_as_any_engine_keeps_one(timeouts_s, kept_s):
    harness = Harness({f"d{number}": "D" for number in range(len(timeouts_s))}, limits=PATIENT, plan=False)
    for engine, timeout_s in zip(harness.engines.values(), timeouts_s, strict=True):
        engine.resume_timeout_s = timeout_s
    harness.router.apply_plan(make_plan({}))
    request_id, stream = harness.admit(max_tokens=100, resume_key=KEY)
    harness.router.detach(request_id)
    assert list_events(harness, request_id, "detached") == [{}]
    if kept_s:
        harness.clock.advance(kept_s - 0.5)
        harness.router.tick()
        assert request_id in harness.state.requests.live
        harness.clock.advance(0.5)
    stream.is_cancelled = True
    harness.router.tick()
    assert request_id not in harness.state.requests.live


def test_a_stream_that_ends_without_a_word_has_a_fault():
    harness = Harness({"d0": "D"})
    harness.router.lose(harness.engines["d0"], "")
    assert [item.last_fault for item in harness.router.describe().engines] == ["stream"]


def test_all_that_is_kept_is_asked_for_as_soon_as_there_is_room():
    harness = make_disaggregated_harness(PD)
    started = start(harness, 3)
    make_room(harness)
    harness.clock.advance(0.05)
    harness.router.tick()
    requests = [harness.state.requests.live[request_id] for request_id, _ in started]
    assert all(request.migration is not None for request in requests)
    harness.run()
    harness.assert_idle()


def test_room_that_was_refused_is_asked_for_again_after_a_pause():
    harness = make_disaggregated_harness(PD)
    ((request_id, _),) = start(harness, 1)
    request = harness.state.requests.live[request_id]
    while request.migration is None:
        harness.clock.advance(0.01)
        harness.router.tick()
    say(harness, "d0", grants=[engine_pb2.Grant(grant_id=request.migration.grant_id)])
    assert request.migration is None
    assert harness.count("flow_blocked", "prefill_done", "refused") == 1
    for seconds in (0.0, 0.015):
        harness.clock.advance(seconds)
        harness.router.tick()
        assert request.migration is None
    harness.clock.advance(0.006)
    harness.router.tick()
    assert request.migration is not None


@pytest.mark.parametrize("seconds", [2.0, 2.25])
def test_a_grant_has_as_long_to_come_as_the_limit_says(seconds):
    harness = Harness(TWO, limits=PATIENT)
    request_id, _ = start_on(harness, "d0")
    harness.step("d0")
    harness.deliver()
    assert harness.router.move(request_id, EngineId("d1")) == ""
    harness.clock.advance(seconds)
    harness.router.tick()
    assert harness.count("flow_blocked", "manual", "grant_timeout") == (seconds > 2.0)
    assert (harness.state.requests.live[request_id].migration is None) is (seconds > 2.0)


def test_more_routers_than_moves_or_places_leave_each_router_one():
    limits = make_limits(max_moves_per_engine=2, max_waiting=2)
    harness = Harness(TWO, limits=limits, plan=False)
    harness.router.apply_plan(make_plan(TWO, num_routers=5))
    harness.deliver()
    first, second = (start_on(harness, "d0")[0] for _ in range(2))
    harness.step("d0")
    harness.deliver()
    assert harness.router.move(first, EngineId("d1")) == ""
    assert harness.router.move(second, EngineId("d1")) == "source_busy"
    waiting = Harness(limits=limits)
    waiting.router.apply_plan(make_plan(TWO, num_routers=5))
    waiting.admit()
    with pytest.raises(QueueFullError):
        waiting.admit()


def test_a_request_that_is_resumed_before_its_first_token_has_not_stalled():
    harness = Harness({"d0": "D"})
    request_id, _ = harness.admit(20, 5)
    harness.deliver()
    harness.cut("d0")
    harness.clock.advance(0.1)
    harness.reconnect("d0")
    harness.deliver()
    assert list_events(harness, request_id, "resumed") == [{"engine": "d0", "output_tokens": 0, "stall_s": 0.0}]
    assert not harness.state.metrics.recovery_stall_s
    harness.run()
    harness.assert_idle()


@pytest.mark.parametrize(
    ("reason", "error", "code", "message"),
    [
        ("REFUSED", "too long", "invalid_value", "too long"),
        ("REFUSED", "", "invalid_value", "an engine refused the request"),
        ("ERROR", "out of memory", "engine_fault", "engine d0 cannot run the request: out of memory"),
        ("ERROR", "", "engine_fault", "engine d0 cannot run the request: no reason given"),
        ("CLAIMED", "", "taken_over", "the client goes on with the answer at another router"),
    ],
)
def test_a_bad_end_has_the_engines_words_or_ours(reason, error, code, message):
    harness = Harness({"d0": "D"})
    _, stream = harness.admit(20, 5)
    harness.deliver()
    harness.cores["d0"].running.clear()
    reason_value = getattr(sampling_pb2, f"FINISH_REASON_{reason}")
    say(harness, "d0", finished=[engine_pb2.Finished(slot=0, reason=reason_value, error=error)])
    assert (stream.error.code, stream.error.message) == (code, message)
    # What its client goes on with elsewhere has not failed.
    result = "cancelled" if reason == "CLAIMED" else "failed"
    assert harness.state.metrics.counters["requests"] == {("", result): 1}
    assert harness.count("rejected", code) == 1
    harness.assert_idle()
