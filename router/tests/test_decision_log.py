"""Decisions are explainable afterwards, from a ring that does not grow."""

from __future__ import annotations

import json

import pytest
from data_plane_harness import Harness
from fake_engine import make_plan

from sluice_router.settings import Limits

PD = {"p0": "P", "d0": "D"}


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
    harness = Harness(PD, limits=Limits(ring_size=100))
    first, _ = harness.admit(20, 2)
    harness.run()
    for _ in range(num_requests):
        harness.admit(20, 2)
    harness.run()
    assert len(harness.state.decision_log) == 100
    story = harness.router.explain(first)
    assert story is None
