"""Decisions are explainable afterwards, from a ring that does not grow."""

from __future__ import annotations

import json

import pytest
from data_plane_harness import Harness
from fake_engine import make_plan
from test_kept_prefills import make_harness as make_disaggregated_harness
from test_migration import start_on

from sluice_core.records import RequestId
from sluice_router.observability.decision_log import DecisionLog
from sluice_router.settings import make_limits

PD = {"p0": "P", "d0": "D"}
TWO = {"d0": "D", "d1": "D"}


def tell_of_a_move() -> list[dict[str, object]]:
    harness = Harness(PD)
    return tell(harness, start_on(harness, "p0", 6)[0])


def tell_of_a_refused_grant() -> list[dict[str, object]]:
    harness = Harness(PD)
    harness.cores["d0"].refuse_grants = "watermark"
    return tell(harness, start_on(harness, "p0", 3)[0])


def tell_of_a_kept_prefill() -> list[dict[str, object]]:
    harness = make_disaggregated_harness(PD)
    return tell(harness, harness.admit(20, 3)[0])


def tell_of_a_returned_prompt() -> list[dict[str, object]]:
    harness = Harness(TWO)
    request_id, _ = harness.admit(20, 5)
    first = harness.engine_of(request_id)
    harness.deliver()
    harness.up[first].append(harness.cores[first].return_unstarted())
    return tell(harness, request_id)


def tell_of_a_dead_engine() -> list[dict[str, object]]:
    harness = Harness(TWO)
    request_id, _ = harness.admit(20, 5)
    first = harness.engine_of(request_id)
    harness.step_all()
    harness.kill(first)
    return tell(harness, request_id)


def tell_of_a_cut_stream() -> list[dict[str, object]]:
    harness = Harness({"d0": "D"})
    request_id, _ = harness.admit(20, 5)
    harness.step_all()
    harness.cut("d0")
    harness.clock.advance(0.5)
    harness.reconnect("d0")
    return tell(harness, request_id)


def tell_of_a_client_that_leaves() -> list[dict[str, object]]:
    harness = Harness({"d0": "D"})
    request_id, _ = harness.admit(20, 5)
    harness.step_all()
    harness.router.cancel(request_id, "client_gone")
    return tell(harness, request_id)


def tell(harness: Harness, request_id) -> list[dict[str, object]]:
    """Runs to the end; lists the events of a request, without their times."""
    harness.run()
    story = harness.router.explain(request_id)
    assert story is not None
    return [{key: value for key, value in event.items() if key != "at_s"} for event in story["events"]]


PREFILL_MOVES = {"source": "p0", "target": "d0", "cause": "prefill_done"}


def test_story_has_every_decision_with_inputs_candidates_and_choice():
    harness = Harness(PD)
    request_id, _ = harness.admit(20, 6, client_request_id="abc")
    harness.run()
    story = harness.router.explain(request_id)
    assert story is not None
    json.dumps(story)
    events = [event["event"] for event in story["events"]]
    assert events[:3] == ["admitted", "placement", "submitted"]
    assert events[-1] == "finished"
    placement = story["events"][1]
    assert {candidate["engine_id"] for candidate in placement["candidates"]} == {"p0", "d0"}
    assert placement["decision"]["engine_id"] == story["events"][2]["engine"]
    assert [event["at_s"] for event in story["events"]] == sorted(event["at_s"] for event in story["events"])


@pytest.mark.parametrize(
    ("tell_story", "expected"),
    [
        (
            tell_of_a_move,
            [
                {"event": "submitted", "engine": "p0", "fence": 1, "output_tokens": 0, "is_recovery": False},
                {
                    "event": "first_token",
                    "engine": "p0",
                    "ttft_s": pytest.approx(0.01),
                    "predicted_ttft_s": pytest.approx(0.0252, abs=1e-4),
                },
                {"event": "proposed", "engine": "p0", "cause": "prefill_done", "output_tokens": 1},
                {"event": "grant_asked", **PREFILL_MOVES, "num_tokens": 22},
                {"event": "granted", "target": "d0", "cause": "prefill_done"},
                {"event": "handed_off", **PREFILL_MOVES, "fence": 2, "output_tokens": 1},
                {"event": "moved", **PREFILL_MOVES, "duration_s": pytest.approx(0.02)},
                {
                    "event": "finished",
                    "reason": "length",
                    "output_tokens": 6,
                    "ttft_s": pytest.approx(0.01),
                    "tpot_s": pytest.approx(0.012),
                    "is_slo_met": True,
                },
            ],
        ),
        (
            tell_of_a_refused_grant,
            [{"event": "blocked", "engine": "p0", "cause": "prefill_done", "reason": "watermark"}],
        ),
        (
            tell_of_a_kept_prefill,
            [
                {"event": "kept", "engine": "p0", "longest_s": 10.0},
                {"event": "granted", "target": "d0", "cause": "prefill_done"},
            ],
        ),
        (
            tell_of_a_returned_prompt,
            [
                {"event": "returned", "engine": "d1"},
                {"event": "submitted", "engine": "d0", "fence": 2, "output_tokens": 0, "is_recovery": False},
            ],
        ),
        (
            tell_of_a_dead_engine,
            [
                {"event": "lost", "engine": "d1", "reason": "stream", "output_tokens": 1},
                {"event": "submitted", "engine": "d0", "fence": 2, "output_tokens": 1, "is_recovery": True},
            ],
        ),
        (
            tell_of_a_cut_stream,
            [
                {"event": "lost", "engine": "d0", "reason": "stream", "output_tokens": 1},
                {"event": "resumed", "engine": "d0", "output_tokens": 1, "stall_s": 0.5},
            ],
        ),
        (tell_of_a_client_that_leaves, [{"event": "cancelled", "reason": "client_gone"}]),
    ],
    ids=lambda each: each.__name__.removeprefix("tell_of_") if callable(each) else "",
)
def test_each_event_says_what_its_names_promise(tell_story, expected):
    events = tell_story()
    kinds = {event["event"] for event in expected}
    assert [event for event in events if event["event"] in kinds][-len(expected) :] == expected


def test_admitted_says_what_was_asked_for():
    harness = Harness(PD)
    request_id, _ = harness.admit(20, 6, client_request_id="abc", slo_class="")
    assert tell(harness, request_id)[0] == {
        "event": "admitted",
        "client_request_id": "abc",
        "prompt_tokens": 20,
        "max_tokens": 6,
        "ttft_slo_s": 5.0,
        "tpot_slo_s": 0.5,
        "slo_class": "",
        "priority": 0,
    }


def test_requests_placed_in_one_pass_have_their_own_stories():
    harness = Harness({})
    harness.router.apply_plan(make_plan(PD))
    requests = {harness.admit(prompt_tokens, 2)[0]: prompt_tokens for prompt_tokens in (10, 20, 30)}
    harness.attach("d0")
    harness.run()
    for request_id, prompt_tokens in requests.items():
        story = harness.router.explain(request_id)
        assert story is not None
        placed = [event for event in story["events"] if event["event"] == "placement"][-1]
        assert (placed["prompt_tokens"], placed["decision"]["kind"]) == (prompt_tokens, "Place")


def test_client_id_finds_the_last_request_that_had_it():
    harness = Harness(PD)
    harness.admit(20, 2, client_request_id="abc")
    second, _ = harness.admit(20, 2, client_request_id="abc")
    harness.run()
    story = harness.router.explain("abc")
    assert story is not None
    assert story["request_id"] == second


def test_a_story_tells_microseconds():
    log = DecisionLog(9)
    for now in (100.0, 100.0012344, 100.25):
        log.record(now, RequestId("r"), "detached")
    story = log.explain("r")
    assert story is not None
    assert [event["at_s"] for event in story["events"]] == [0.0, 0.001234, 0.25]


def test_long_wait_is_one_event():
    harness = Harness({})
    harness.router.apply_plan(make_plan(PD))
    request_id, _ = harness.admit(20, 2)
    for _ in range(100):
        harness.clock.advance(0.1)
        harness.router.tick()
    story = harness.router.explain(request_id)
    assert story is not None
    assert [event["event"] for event in story["events"]] == ["admitted", "placement"]
    assert story["events"][1]["decision"]["reason"] == "no_engine"


def test_unknown_id_has_no_story():
    assert Harness(PD).router.explain("nobody") is None


@pytest.mark.parametrize("num_requests", [50])
def test_decision_log_is_bounded(num_requests):
    harness = Harness(PD, limits=make_limits(ring_size=100))
    first, _ = harness.admit(20, 2)
    harness.run()
    for _ in range(num_requests):
        harness.admit(20, 2)
    harness.run()
    assert len(harness.state.decision_log) == 100
    story = harness.router.explain(first)
    assert story is None
