"""When the scaler asks for more engines, for fewer, for none, and for the first one."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from sluice_core.autoscaling.capacity_curve import CapacityCurve
from sluice_operator.autoscaling import decision
from sluice_operator.autoscaling.decision import ScalerObservation, ScalerState, decide, restart

CURVE = CapacityCurve(((1, 2.0),))
OBSERVATION = ScalerObservation(
    now=0.0,
    num_arrived=0.0,
    num_waiting=0,
    num_inside=0,
    num_serving=4,
    replicas=4,
    capacity=CURVE,
    start_s=60.0,
    ttft_slo_s=2.0,
    attainment=0.9,
    min_replicas=1,
    max_replicas=10,
    up_window_s=0.0,
    down_window_s=300.0,
)
STEP_S = 5.0


class Watched:
    """A scaler whose decisions are carried out at once, unless it is said how many serve; requests arrive evenly."""

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
            serving = fields.get("num_serving", self.state.replicas)
            self.observation = replace(self.observation, replicas=self.state.replicas, num_serving=serving)
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
    sizes = scaler.watch(1.2, 3600.0)
    assert set(sizes[: round(300.0 / STEP_S)]) == {4}
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_a_scaler_that_has_just_begun_takes_nothing_away():
    scaler = Watched(replicas=8)
    sizes = scaler.watch(1.2, 600.0)
    assert set(sizes[: round(290.0 / STEP_S)]) == {8}
    assert sizes[-1] == 1


def test_a_short_burst_within_the_window_adds_no_more_than_headroom():
    scaler = Watched(up_window_s=180.0, start_s=10.0)
    scaler.watch(6.0, 600.0)
    sizes = scaler.watch(30.0, 30.0) + scaler.watch(6.0, 150.0)
    assert set(sizes[: round(150.0 / STEP_S)]) == {4}
    assert sizes[-1] in (4, 5)  # ten would serve the burst
    assert scaler.watch(15.0, 400.0)[-1] >= 8  # 8 serve it; the burst has taught some headroom


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
    sizes = scaler.watch(0.0, 300.0)
    assert set(sizes[:-1]) == {1}
    assert sizes[-1] == 0
    assert set(scaler.watch(0.0, 3000.0)) == {0}


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
    assert scaler.watch(6.0, STEP_S, num_waiting=84, num_inside=90)[-1] == 5


@pytest.mark.parametrize(
    ("ttft_slo_s", "attainment", "usual"), [(2.0, 0.9, 24), (2.0, 1.0, 6), (20.0, 0.9, 78), (2.0, 0.5, 96)]
)
def test_what_waits_to_be_placed_or_may_come_late_asks_for_no_engine(ttft_slo_s, attainment, usual):
    """Four engines serve 8 requests/s, and 7.2 are planned for: of 24 more that wait, 0.8 are left for each second."""
    scaler = Watched(ttft_slo_s=ttft_slo_s, attainment=attainment)
    scaler.watch(6.0, 600.0)
    assert scaler.watch(6.0, STEP_S, num_waiting=usual + 20, num_inside=200)[-1] == 4
    assert scaler.watch(6.0, STEP_S, num_waiting=usual + 30, num_inside=200)[-1] == 5


def test_what_waits_asks_for_no_more_than_engines_that_start_will_serve():
    """Four engines of 2 requests/s meet 13 requests/s: what they leave waits until those asked for at once serve."""
    scaler = Watched()
    scaler.watch(6.0, 600.0)
    scaler.watch(13.0, 120.0, num_serving=4)
    planned = scaler.state.replicas
    assert planned in (7, 8)
    assert scaler.watch(13.0, STEP_S, num_serving=4, num_waiting=250, num_inside=350)[-1] == planned
    # What those that serve now and those that start cannot do asks for more: 550 in 30 s need nine beside the four.
    assert scaler.watch(13.0, STEP_S, num_serving=4, num_waiting=600, num_inside=700)[-1] == 10


def test_what_waits_for_the_first_engine_counts_in_full():
    """Routers hold it until an engine serves, however long that takes."""
    scaler = Watched(replicas=0, num_serving=0, min_replicas=0)
    scaler.observation = replace(scaler.observation, num_arrived=1.0)
    scaler.watch(1.0, 120.0, num_serving=0, num_waiting=1, num_inside=1)
    without = scaler.state.replicas
    assert scaler.watch(1.0, STEP_S, num_serving=0, num_waiting=120, num_inside=120)[-1] > without


def test_a_router_that_is_gone_takes_no_requests_back():
    """Its counters are missing from the sum: nothing has arrived, and the number falls no sooner."""
    scaler = Watched()
    scaler.watch(6.0, 600.0)
    scaler.observation = replace(scaler.observation, num_arrived=10.0)
    assert set(scaler.watch(6.0, 60.0)) == {4}
    assert scaler.state.demand.minute_rps == pytest.approx(6.0, rel=0.2)


def test_the_share_of_short_moments_is_kept_from_the_beginning():
    state = ScalerState(demand=replace(ScalerState().demand, short_share=0.5))
    assert decide(decide(state, OBSERVATION), OBSERVATION).demand.short_share == 0.5


@pytest.mark.parametrize(("start_s", "keep_s"), [(10.0, 90.0), (150.0, 150.0), (900.0, 300.0)])
def test_an_engine_that_is_not_needed_stays_for_as_long_as_a_new_one_takes_to_start(start_s, keep_s):
    """Of two, the second is wanted once more for what waits; after that it stays for so long."""
    scaler = Watched(start_s=start_s, down_window_s=None, replicas=2)
    scaler.watch(0.2, 1200.0)
    scaler.watch(0.2, STEP_S, num_waiting=90, num_inside=90)
    assert scaler.state.replicas == 2
    sizes = scaler.watch(0.2, 600.0, num_waiting=0, num_inside=0)
    assert sizes.index(1) == round(keep_s / STEP_S) - 1


def test_the_last_engine_of_an_idle_cluster_stays_for_five_minutes_however_fast_a_new_one_starts():
    scaler = Watched(start_s=10.0, down_window_s=None, min_replicas=0, replicas=1)
    scaler.watch(0.4, 600.0)
    assert scaler.watch(0.0, 600.0).index(0) == round(300.0 / STEP_S) - 1


def test_no_engine_leaves_while_sliders_are_on_trial_and_more_come():
    scaler = Watched(is_trial=True)
    scaler.watch(6.0, 600.0)
    assert set(scaler.watch(1.0, 900.0)) == {4}
    assert scaler.watch(15.0, 300.0)[-1] >= 8


def test_no_trial_keeps_more_engines_than_the_most():
    assert set(Watched(is_trial=True, max_replicas=3).watch(1.0, 60.0)) == {3}


def test_where_one_engine_serves_nothing_there_are_two_or_none():
    scaler = Watched(min_replicas=0, least_serving=2, replicas=2)
    assert set(scaler.watch(0.5, 900.0)) == {2}
    assert scaler.watch(0.0, 400.0)[-1] == 0
    assert scaler.watch(0.0, STEP_S, num_waiting=1, num_inside=1) == [2]


def test_an_edit_begins_anew_and_keeps_the_demand():
    scaler = Watched()
    scaler.watch(6.0, 600.0)
    scaler.state = restart(scaler.state, scaler.observation.now)
    scaler.observation = replace(scaler.observation, replicas=9)
    assert set(scaler.watch(6.0, 290.0)) == {9}
    assert scaler.watch(6.0, 60.0)[-1] == 4


# --- a plain reading -----------------------------------------------------------------------------------------------


class PlainScaler:
    """The same rules, with every recommendation kept and every window searched anew."""

    def __init__(self) -> None:
        self.began_s: float | None = None
        self.active_s = self.num_arrived = 0.0
        self.wanted: list[tuple[float, int]] = []

    def decide(self, state: ScalerState, seen: ScalerObservation) -> int:
        """Decides by the demand that the scaler has counted."""
        if self.began_s is None:
            self.began_s = self.active_s = seen.now
            self.num_arrived = seen.num_arrived
        if seen.num_arrived > self.num_arrived or seen.num_inside:
            self.active_s = seen.now
        self.num_arrived = seen.num_arrived
        bounded = partial(clamp, seen=seen)
        is_idle = not seen.num_inside and (seen.replicas == 0 or seen.now - self.active_s >= settle_s(seen))
        wanted = seen.min_replicas if is_idle else self.want(state, seen, bounded)
        self.wanted.append((seen.now, wanted))
        if seen.replicas == 0:
            return wanted
        is_up = wanted > seen.replicas
        if not is_up and seen.is_trial:
            return bounded(seen.replicas)
        if not is_up and is_idle:
            return wanted
        window_s = seen.up_window_s if is_up else down_window_s(seen)
        if seen.now - self.began_s < (seen.up_window_s if is_up else settle_s(seen)):
            return bounded(seen.replicas)
        recent = [number for at_s, number in self.wanted if at_s > seen.now - window_s] + [wanted]
        return bounded(max(min(recent), seen.replicas) if is_up else min(max(recent), seen.replicas))

    def want(self, state: ScalerState, seen: ScalerObservation, bounded) -> int:
        if seen.capacity is None:
            return bounded(max(seen.replicas, 1))
        usual_s = seen.ttft_slo_s / 2.0 + 30.0 * (1.0 - seen.attainment)
        late = seen.num_waiting - state.demand.minute_rps * usual_s
        planned_rps, late_rps = state.demand.planned_rps, max(late, 0.0) / 30.0
        serves = seen.capacity.estimate_goodput_rps
        sizes = [
            number
            for number in range(1, max(seen.max_replicas, 1))
            if serves(number) >= planned_rps + late_rps
            or (
                number > seen.num_serving > 0
                and serves(number) >= planned_rps
                and serves(number - seen.num_serving) >= late_rps
            )
        ]
        return bounded(1 if planned_rps + late_rps <= 0.0 else sizes[0] if sizes else seen.max_replicas)


def down_window_s(seen: ScalerObservation) -> float:
    """The manifest's, or what an engine takes to start, within bounds."""
    return sorted((90.0, seen.start_s, 300.0))[1] if seen.down_window_s is None else seen.down_window_s


def settle_s(seen: ScalerObservation) -> float:
    """The manifest's, or five minutes."""
    return 300.0 if seen.down_window_s is None else seen.down_window_s


def clamp(number: int, *, seen: ScalerObservation) -> int:
    """Within the bounds, and none or as many as can serve."""
    within = min(max(number, seen.min_replicas), seen.max_replicas)
    return max(within, seen.least_serving) if within else 0


@pytest.mark.parametrize("seed", range(40))
def test_the_scaler_decides_as_a_plain_reading_has_it(seed: int) -> None:
    rng = random.Random(seed)
    seen = replace(
        OBSERVATION,
        now=1000.0,
        replicas=rng.choice((0, 1, 4, 8)),
        min_replicas=rng.choice((0, 1, 3)),
        max_replicas=rng.choice((3, 8, 20)),
        up_window_s=rng.choice((0.0, 40.0, 180.0)),
        down_window_s=rng.choice((None, 0.0, 100.0, 300.0)),
        start_s=rng.choice((20.0, 300.0)),
        ttft_slo_s=rng.choice((1.0, 8.0)),
        attainment=rng.choice((0.9, 0.99)),
        least_serving=rng.choice((1, 1, 2)),
        capacity=rng.choice((None, CURVE, CapacityCurve(((1, 1.0), (4, 6.0))))),
    )
    state, plain, rate_rps = ScalerState(), PlainScaler(), rng.choice((0.0, 4.0))
    for _ in range(400):
        if rng.random() < 0.03:
            rate_rps = rng.choice((0.0, 0.0, 1.0, 6.0, 14.0))
        step_s = rng.choice((0.5, 1.0, 4.0, 5.0, 6.0, 20.0))
        arrived = round(rate_rps * step_s * rng.uniform(0.5, 1.5))
        waiting = rng.choice((0, 0, 0, 10, 90)) if rate_rps else 0
        seen = replace(
            seen,
            now=seen.now + step_s,
            num_arrived=seen.num_arrived + arrived if rng.random() > 0.01 else 0.0,
            num_waiting=waiting,
            num_inside=waiting + rng.randrange(3) if rate_rps else 0,
            is_trial=rng.random() < 0.1,
        )
        state = decide(state, seen)
        assert state.replicas == plain.decide(state, seen)
        assert state.num_arrived == seen.num_arrived
        if rng.random() < 0.9:
            seen = replace(seen, replicas=state.replicas)
        if rng.random() < 0.2:
            seen = replace(seen, num_serving=rng.randrange(seen.replicas + 1))
    # What is remembered does not grow with the calls.
    assert len(state.recommendations) <= 2 * max(seen.up_window_s, down_window_s(seen)) / 5.0 + 40


def test_arrivals_count_from_the_first_look_on_and_reach_as_far_as_a_start() -> None:
    first = decide(ScalerState(), replace(OBSERVATION, now=50.0, num_arrived=500.0))
    assert (first.num_arrived, first.began_s, first.demand.bin_count) == (500.0, 50.0, 0.0)
    assert first.demand.lead_s == OBSERVATION.start_s
    second = decide(first, replace(OBSERVATION, now=53.0, num_arrived=507.0, start_s=90.0))
    assert (second.num_arrived, second.began_s, second.demand.bin_count) == (507.0, 50.0, 7.0)
    assert second.demand.lead_s == 90.0


def test_another_number_of_engines_begins_its_windows_anew_and_keeps_the_demand() -> None:
    scaler = Watched()
    scaler.watch(6.0, 600.0)
    state = restart(scaler.state, 777.0)
    assert (state.began_s, state.active_s, state.recommendations, state.replicas) == (777.0, 777.0, (), None)
    assert (state.demand, state.num_arrived) == (scaler.state.demand, scaler.state.num_arrived)


def test_of_what_was_wanted_again_and_again_the_first_and_the_last_are_remembered() -> None:
    def remember(*wanted: tuple[float, int], kept_s: float = 60.0) -> tuple[tuple[float, int], ...]:
        kept: tuple[tuple[float, int], ...] = ()
        for at_s, number in wanted:
            kept = decision._remember(kept, at_s, number, kept_s)
        return kept

    interval_s = decision.RECORD_INTERVAL_S
    assert remember((0.0, 3), (1.0, 3), (2.0, 3), (3.0, 3)) == ((0.0, 3), (3.0, 3))
    # Another number is remembered beside all that came before it.
    assert remember((0.0, 3), (1.0, 3), (2.0, 4)) == ((0.0, 3), (1.0, 3), (2.0, 4))
    assert remember((0.0, 3), (1.0, 4), (2.0, 4), (3.0, 4)) == ((0.0, 3), (1.0, 4), (3.0, 4))
    assert remember((0.0, 3), (1.0, 4), (2.0, 3)) == ((0.0, 3), (1.0, 4), (2.0, 3))
    # One in every interval stays.
    assert remember((0.0, 3), (1.0, 3), (interval_s, 3)) == ((0.0, 3), (1.0, 3), (interval_s, 3))
    assert remember((0.0, 3), (1.0, 3), (interval_s - 0.1, 3)) == ((0.0, 3), (interval_s - 0.1, 3))
    # What is as old as the window is forgotten.
    assert remember((0.0, 3), (50.0, 4), (60.0, 4)) == ((50.0, 4), (60.0, 4))
    assert remember((0.0, 3), (59.9, 4)) == ((0.0, 3), (59.9, 4))
