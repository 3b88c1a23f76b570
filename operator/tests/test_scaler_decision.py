"""When the scaler asks for more engines, for fewer, for none, and for the first one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice_core.planning.capacity_curve import CapacityCurve
from sluice_operator.autoscaling.decision import ScalerObservation, ScalerState, decide

CURVE = CapacityCurve(((1, 2.0),))
OBSERVATION = ScalerObservation(
    now=0.0,
    num_arrived=0.0,
    num_waiting=0,
    num_inside=0,
    replicas=4,
    capacity=CURVE,
    start_s=60.0,
    min_replicas=1,
    max_replicas=10,
)
STEP_S = 5.0


class Watched:
    """A scaler whose decisions are carried out at once; requests arrive evenly."""

    def __init__(self, **fields) -> None:
        self.observation = replace(OBSERVATION, **fields)
        self.state = ScalerState()

    def watch(self, rate_rps: float, duration_s: float, **fields) -> list[int]:
        """Returns the engines after each step."""
        sizes = []
        for _ in range(round(duration_s / STEP_S)):
            now, arrived = self.observation.now + STEP_S, self.observation.num_arrived + rate_rps * STEP_S
            self.observation = replace(self.observation, now=now, num_arrived=arrived, **fields)
            self.state = decide(self.state, self.observation)
            self.observation = replace(self.observation, replicas=self.state.replicas)
            sizes.append(self.state.replicas)
        return sizes


def test_more_engines_are_asked_for_at_once():
    scaler = Watched()
    assert set(scaler.watch(6.0, 600.0)) == {4}
    sizes = scaler.watch(13.0, 120.0)
    assert sizes == sorted(sizes)
    assert sizes[-1] >= 7


def test_fewer_engines_are_asked_for_when_no_more_were_wanted_for_the_window():
    scaler = Watched()
    scaler.watch(6.0, 600.0)
    sizes = scaler.watch(1.2, 900.0)
    assert set(sizes[: round(300.0 / STEP_S)]) == {4}
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_a_scaler_that_has_just_begun_takes_nothing_away():
    scaler = Watched(replicas=8)
    sizes = scaler.watch(1.2, 600.0)
    assert set(sizes[: round(290.0 / STEP_S)]) == {8}
    assert sizes[-1] == 1


def test_a_short_burst_within_the_window_adds_nothing():
    scaler = Watched(up_window_s=180.0, start_s=10.0)
    scaler.watch(6.0, 600.0)
    assert set(scaler.watch(30.0, 30.0) + scaler.watch(6.0, 150.0)) == {4}
    assert scaler.watch(15.0, 400.0)[-1] in (8, 9)  # 8 serve it; the burst has taught some headroom


@pytest.mark.parametrize(("rate_rps", "bound"), [(0.5, 3), (60.0, 5)])
def test_bounds_hold(rate_rps, bound):
    assert Watched(min_replicas=3, max_replicas=5).watch(rate_rps, 900.0)[-1] == bound


def test_bounds_hold_while_nothing_is_known_of_the_engines():
    """Without a search the number stays as it is, within the bounds."""
    assert set(Watched(capacity=None, replicas=4).watch(50.0, 600.0)) == {4}
    assert set(Watched(capacity=None, replicas=4, max_replicas=3).watch(50.0, 600.0)) == {3}


def test_an_idle_cluster_goes_to_zero_after_the_window_and_no_sooner():
    scaler = Watched(min_replicas=0)
    scaler.watch(1.2, 600.0)
    sizes = scaler.watch(0.0, 3000.0)
    assert set(sizes[: round(300.0 / STEP_S)]) == {1}
    assert sizes[-1] == 0


def test_a_request_that_still_runs_keeps_an_engine():
    scaler = Watched(min_replicas=0)
    scaler.watch(1.2, 600.0)
    assert scaler.watch(0.0, 3000.0, num_inside=1)[-1] == 1


def test_the_first_request_at_zero_starts_an_engine_at_once():
    scaler = Watched(min_replicas=0, replicas=0, up_window_s=600.0)
    assert set(scaler.watch(0.0, 600.0)) == {0}
    scaler.observation = replace(scaler.observation, num_arrived=scaler.observation.num_arrived + 1)
    assert scaler.watch(0.0, STEP_S, num_waiting=1, num_inside=1) == [1]


def test_the_first_request_needs_no_search():
    scaler = Watched(min_replicas=0, replicas=0, capacity=None)
    scaler.observation = replace(scaler.observation, num_arrived=1.0)
    assert scaler.watch(0.0, 2 * STEP_S, num_waiting=1, num_inside=1)[-1] == 1


def test_what_waits_counts_beside_what_arrives():
    scaler = Watched()
    scaler.watch(6.0, 600.0)
    assert scaler.watch(6.0, STEP_S, num_waiting=60, num_inside=80)[-1] == 5


def test_a_router_that_is_gone_takes_no_requests_back():
    """Its counters are missing from the sum: nothing has arrived, and the number falls no sooner."""
    scaler = Watched()
    scaler.watch(6.0, 600.0)
    scaler.observation = replace(scaler.observation, num_arrived=10.0)
    assert set(scaler.watch(6.0, 60.0)) == {4}
    assert scaler.state.demand.level_rps == pytest.approx(6.0, rel=0.2)


def test_the_quantile_of_the_headroom_is_kept_from_the_beginning():
    state = ScalerState(demand=replace(ScalerState().demand, quantile=0.5))
    assert decide(decide(state, OBSERVATION), OBSERVATION).demand.quantile == 0.5
