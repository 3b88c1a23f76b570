"""Engines that are silent or stand still: when they count as lost."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness
from failover_harness import TWO, tick_with
from fake_engine import expected_output

from sluice_core.latency import OnlineLatencyModel
from sluice_router.settings import load_profile, make_limits


def test_silent_engine_is_lost_after_its_limit(caplog):
    harness = Harness(TWO, limits=make_limits(silence_limit_s=2, iteration_age_floor_s=50))
    request_id, response_stream = harness.admit(20, 30)
    silent = harness.engine_of(request_id)
    other = next(name for name in TWO if name != silent)
    harness.deliver()
    for _ in range(19):
        tick_with(harness, other)
    assert silent in harness.engines
    for _ in range(3):
        tick_with(harness, other)
    assert harness.closed == [(silent, "silence")]
    assert f"engine {silent}: silent for 2." in caplog.text
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    harness.assert_idle()


@pytest.mark.parametrize("work", ["decode", "prefill", "submit that it does not take up"])
def test_engine_that_stands_still_with_work_is_lost(work):
    harness = Harness(TWO, limits=make_limits(iteration_age_floor_s=3))
    request_id, response_stream = harness.admit(20, 30)
    stuck = harness.engine_of(request_id)
    if work == "decode":
        harness.step_all()
    elif work == "prefill":
        harness.deliver()
    for _ in range(29):
        tick_with(harness, *TWO)
    assert stuck in harness.engines
    for _ in range(2):
        tick_with(harness, *harness.engines)
    assert harness.closed == [(stuck, "hang")]
    harness.run()
    assert response_stream.token_ids == expected_output(response_stream.prompt, 30)
    harness.assert_idle()


def test_engine_may_take_several_of_its_longest_iterations_before_it_counts_as_hung():
    """The longest one takes 0.11 s by the model's profile; the floor alone would end the engine earlier."""
    harness = Harness(
        {"d0": "D"},
        limits=make_limits(iteration_age_floor_s=0.05, iteration_age_factor=5),
        make_latency_model=lambda _: OnlineLatencyModel(load_profile("qwen2.5-32b@a100-80g")),
    )
    harness.admit(20, 30)
    harness.deliver()
    for _ in range(5):
        tick_with(harness, "d0")
    assert not harness.closed
    tick_with(harness, "d0")
    assert harness.closed == [("d0", "hang")]


def test_engine_that_works_for_other_routers_is_not_lost():
    harness = Harness({"d0": "D"}, limits=make_limits(iteration_age_floor_s=1))
    harness.admit(20, 30)
    harness.step_all()
    for _ in range(50):  # their iterations show in the age alone
        tick_with(harness, "d0", age_s=0.05)
    assert not harness.closed
    harness.run()
    harness.assert_idle()


def test_idle_engine_is_not_lost_however_old_its_iteration():
    harness = Harness(TWO, limits=make_limits(iteration_age_floor_s=1))
    for _ in range(50):
        tick_with(harness, *TWO)
    assert not harness.closed
    harness.admit()
    tick_with(harness, *TWO)
    assert not harness.closed
    harness.run()
    harness.assert_idle()


@pytest.mark.parametrize("has_work", [False, True], ids=["idle", "with work"])
def test_pause_of_the_router_does_not_count_against_engines(has_work):
    """Neither as silence nor as a hang; from there on their time runs as before."""
    harness = Harness({"d0": "D"}, limits=make_limits(silence_limit_s=2, iteration_age_floor_s=2))
    if has_work:
        harness.admit(20, 30)
        harness.step_all()
    harness.router.tick()
    harness.clock.advance(10)
    harness.router.tick()
    assert not harness.closed
    for _ in range(21):
        tick_with(harness, *harness.engines)
    assert harness.closed == ([("d0", "hang")] if has_work else [])
