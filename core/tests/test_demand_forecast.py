"""What the rate will be when an engine that is started now serves."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from sluice_core.autoscaling.demand_forecast import BIN_S, FADE_S, HOUR_S, DemandForecast
from sluice_core.autoscaling.demand_headroom import compute_headroom, remember_error


def feed(demand: DemandForecast, rates_rps) -> DemandForecast:
    """Counts so many requests per second in one bin after the other, in calls of 5 s."""
    now = demand.bin_start_s
    if now is None:
        now = 0.0
        demand = demand.count(now, 0.0)
    for rate in rates_rps:
        for _ in range(3):
            now += BIN_S / 3
            demand = demand.count(now, rate * BIN_S / 3)
    return demand


NUM_HOUR_BINS = round(HOUR_S / BIN_S)


def test_a_steady_rate_is_forecast_as_it_is():
    demand = feed(DemandForecast(lead_s=120.0), [4.0] * 100)
    assert demand.minute_rps == pytest.approx(4.0)
    assert demand.forecast_rps == pytest.approx(4.0)
    assert demand.headroom == pytest.approx(1.0)
    assert demand.planned_rps == pytest.approx(4.0)


@pytest.mark.parametrize("lead_s", [0.0, 30.0, 120.0, 600.0])
def test_of_a_minute_so_much_lasts_as_engines_start_fast(lead_s):
    """A minute of half the rate falls: no growth, and a distance from the mean that fades."""
    demand = feed(DemandForecast(lead_s=lead_s), [8.0] * (NUM_HOUR_BINS - 4) + [4.0] * 4)
    usual = 8.0 - 4.0 * 4 / NUM_HOUR_BINS
    assert demand.minute_rps == pytest.approx(4.0)
    assert demand.forecast_rps == pytest.approx(usual + math.exp(-lead_s / FADE_S) * (4.0 - usual))


def test_growth_is_carried_on_from_the_middle_of_the_hour():
    """0.01 requests/s more in each second: from half an hour ago until an engine serves in ten minutes."""
    demand = feed(DemandForecast(lead_s=600.0), [20.0 + 0.01 * BIN_S * number for number in range(NUM_HOUR_BINS)])
    usual = 20.0 + 0.01 * BIN_S * (NUM_HOUR_BINS - 1) / 2
    grown = min(usual + 0.01 * (600.0 + 1800.0), 1.5 * usual)
    assert demand.forecast_rps == pytest.approx(grown + math.exp(-6.0) * (demand.minute_rps - grown))


def test_growth_needs_a_history_and_has_a_limit():
    few = feed(DemandForecast(lead_s=6000.0), [1.0, 2.0, 4.0])
    assert few.forecast_rps == pytest.approx(7.0 / 3.0)
    steep = feed(DemandForecast(lead_s=6000.0), [0.1 * number for number in range(60)])
    assert steep.forecast_rps == pytest.approx(1.5 * 2.95)


def test_an_hour_without_growth_is_forecast_at_its_mean():
    demand = feed(DemandForecast(lead_s=6000.0), [9.0 - 0.01 * number for number in range(100)])
    assert demand.forecast_rps == pytest.approx(9.0 - 0.495)


def test_headroom_is_what_forecasts_lacked():
    """Bursts that nothing foresees are learned: after an hour the headroom covers nine moments in ten."""
    assert DemandForecast(lead_s=60.0).headroom == pytest.approx(1.2)
    demand = feed(DemandForecast(lead_s=60.0), ([4.0] * 16 + [6.0] * 8) * 12)
    assert 1.1 < demand.headroom < 1.5
    short = sum(error > demand.headroom for error in demand.errors)
    assert short <= 0.1 * len(demand.errors)


@pytest.mark.parametrize(
    ("errors", "quantile", "headroom"),
    [
        ([1.1] * 39, 0.9, 1.2),
        ([1.1] * 40, 0.9, 1.1),
        ([1.1] * 36 + [1.3] * 4, 0.9, 1.3),
        ([1.1] * 37 + [1.3] * 3, 0.9, 1.1),
        ([1.1] * 39 + [1.4], 1.0, 1.4),
        ([1.1] * 39 + [1.9], 1.0, 1.5),
        ([0.8] * 40, 0.9, 1.0),
    ],
)
def test_headroom_is_what_sufficed_at_that_share_of_the_moments(errors, quantile, headroom):
    assert compute_headroom(errors, quantile) == headroom


def test_the_last_three_hours_of_errors_are_kept():
    errors: tuple[float, ...] = ()
    for number in range(721):
        errors = remember_error(errors, float(number))
    assert errors == tuple(float(number) for number in range(1, 721))


@pytest.mark.parametrize(("lead_s", "quantile"), [(0.0, 0.9), (30.0, 0.9), (300.0, 0.9), (600.0, 0.95), (3000.0, 0.99)])
def test_a_shortage_that_lasts_longer_than_five_minutes_has_to_be_as_much_rarer(lead_s, quantile):
    assert DemandForecast(lead_s=lead_s).quantile == pytest.approx(quantile)


def test_one_jump_does_not_cost_headroom_for_hours():
    demand = feed(DemandForecast(lead_s=120.0), [1.0] * 30 + [9.0] * 20 + [1.0] * 20)
    assert demand.headroom <= 1.5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_comes_by_chance_costs_less_headroom_where_requests_may_wait(seed):
    """One request/s comes at random: minutes differ by an eighth, and an objective of 20 s waits half of that out."""
    rng = random.Random(seed)
    rates_rps = [sum(rng.random() < 0.05 for _ in range(300)) / BIN_S for _ in range(480)]
    urgent, patient = (feed(DemandForecast(lead_s=30.0, ttft_slo_s=slo_s), rates_rps) for slo_s in (2.0, 20.0))
    assert urgent.headroom > 1.1 > 1.08 > patient.headroom > 1.0


@pytest.mark.parametrize("lead_s", [30.0, 600.0])
def test_a_jump_is_planned_for_within_a_minute_and_chance_is_not(lead_s):
    steady = feed(DemandForecast(lead_s=lead_s), [9.0] * 400)
    assert feed(steady, [27.0] * 4).planned_rps == pytest.approx(1.2 * 27.0)
    assert feed(steady, [10.0] * 4).planned_rps < 1.1 * 10.0


@pytest.mark.parametrize("lead_s", [30.0, 600.0])
def test_a_steep_jump_is_planned_for_within_a_bin_and_chance_is_not(lead_s):
    steady = feed(DemandForecast(lead_s=lead_s), [3.0] * 400)
    assert feed(steady, [18.0]).planned_rps == pytest.approx(1.2 * 18.0)
    # Half as much again, and what comes by chance once in some thousand bins, are no jump of one bin.
    assert feed(feed(DemandForecast(lead_s=lead_s), [30.0] * 400), [44.0]).planned_rps < 36.0
    assert feed(feed(DemandForecast(lead_s=lead_s), [0.4] * 400), [1.0]).planned_rps < 0.6


def test_what_has_arrived_for_five_minutes_is_planned_for_however_low_the_hour_was():
    hour = [9.0] * 140 + [10.0] * 40 + [9.0] * 40 + [11.0] * 20
    demand = feed(DemandForecast(lead_s=120.0, short_share=0.5), hour)
    assert demand.forecast_rps * demand.headroom < 10.5
    assert demand.planned_rps == pytest.approx(11.0)


@pytest.mark.parametrize("lead_s", [30.0, 120.0, 600.0])
@pytest.mark.parametrize(("before_rps", "after_rps"), [(3.0, 18.0), (18.0, 3.0), (3.0, 0.0), (0.0, 3.0)])
def test_after_a_change_the_rate_before_and_what_it_had_said_count_no_more(before_rps, after_rps, lead_s):
    steady = feed(DemandForecast(lead_s=lead_s), [before_rps] * NUM_HOUR_BINS)
    late = feed(steady, [after_rps] * 15)
    assert len(late.counts) == NUM_HOUR_BINS
    demand = feed(late, [after_rps] * 5)
    assert demand.forecast_rps == pytest.approx(after_rps)
    # No forecast from before is compared with what comes now.
    assert set(feed(demand, [after_rps] * 100).errors) <= {1.0}


def test_a_burst_no_higher_than_another_of_the_hour_is_no_change():
    bursts = [3.0] * 80 + [9.0] * 5 + [3.0] * 80
    demand = feed(DemandForecast(lead_s=120.0), [*bursts, *[9.0] * 30])
    assert len(demand.counts) == len(bursts) + 30
    # A little more than that by chance is none either.
    assert len(feed(demand, [9.8] * 20).counts) == len(bursts) + 50


def test_a_late_call_spreads_what_it_brings():
    demand = DemandForecast(lead_s=30.0).count(0.0, 0.0).count(4 * BIN_S, 240.0)
    assert demand.counts == (60.0,) * 4
    assert demand.bin_start_s == 4 * BIN_S


class PlainForecast:
    """The same, read literally: all arrivals are kept, and everything is computed anew from whole bins."""

    def __init__(self, lead_s: float, short_share: float, ttft_slo_s: float) -> None:
        self.lead_s, self.short_share, self.ttft_slo_s = lead_s, short_share, ttft_slo_s
        self.bins: list[float] = []
        self.forecasts: list[float] = []  # made when the bin of that number was over; 0 where a change made it void
        self.first = 0  # bin, of those that count
        self.errors: list[float] = []
        self.num_errors = 0
        self.changes: set[bool] = set()  # whether the rate grew
        self.open_count, self.begun_s = 0.0, None

    def count(self, now: float, num_arrived: float) -> None:
        if self.begun_s is None:
            self.begun_s = now
            self.open_count = num_arrived
            return
        self.open_count += num_arrived
        num_over = math.floor((now - self.begun_s) / BIN_S)
        if num_over:
            share = self.open_count / num_over
            for _ in range(min(num_over, 240)):  # an hour
                self.close(share)
            self.open_count = 0.0
            self.begun_s += num_over * BIN_S

    def close(self, count: float) -> None:
        self.bins.append(count)
        # A forecast is due when as many bins are over as an engine takes to start.
        due = len(self.bins) - 1 - max(1, math.ceil(self.lead_s / BIN_S))
        if due >= 0 and self.forecasts[due] > 0.0:
            self.errors.append(self.recent() / self.forecasts[due])
            self.num_errors += 1
        if self.has_changed():
            self.first = len(self.bins) - 15
            self.changes.add(self.bins[-1] > self.bins[-40])
            self.forecasts = [0.0] * len(self.forecasts)
            self.errors = self.errors[-720:-20]
        self.forecasts.append(self.forecast())

    def has_changed(self) -> bool:
        hour = self.bins[self.first :][-240:]
        if len(hour) < 40:
            return False
        old, new = hour[:-20], hour[-20:]
        each = [sum(old[first : first + 5]) for first in range(len(old) - 4)]
        parts = [sum(new[0:5]), sum(new[5:10]), sum(new[10:15]), sum(new[15:20])]
        up, down = 1.1 * max(each) + 4 * max(each) ** 0.5, min(each) / 1.1 - 4 * min(each) ** 0.5
        return all(part > up for part in parts) or all(part < down for part in parts)

    def minute(self) -> float:
        return statistics.fmean(self.bins[self.first :][-4:]) / BIN_S if self.bins else 0.0

    def recent(self) -> float:
        num_bins = min(20, max(4, int(6 * self.ttft_slo_s / 15)))
        return statistics.fmean(self.bins[self.first :][-num_bins:]) / BIN_S if self.bins else 0.0

    def forecast(self) -> float:
        hour = self.bins[self.first :][-240:]
        if not hour:
            return 0.0
        usual, recent = statistics.fmean(hour) / BIN_S, hour[-100:]  # 25 minutes
        if len(recent) >= 50:
            slope = max(0.0, statistics.linear_regression(range(len(recent)), recent).slope / BIN_S**2)
            usual = min(usual * 1.5, usual + slope * (self.lead_s + len(hour) * BIN_S / 2.0))
        lasts = math.e ** -(self.lead_s / 100.0)
        return lasts * self.recent() + (1.0 - lasts) * usual

    def headroom(self) -> float:
        kept = sorted(self.errors[-720:])
        if len(kept) < 40:
            return 1.2
        quantile = 1.0 - self.short_share * (1.0 if self.lead_s <= 300.0 else 300.0 / self.lead_s)
        return min(1.5, max(1.0, kept[min(int(quantile * len(kept)), len(kept) - 1)]))

    def planned(self) -> float:
        planned = max(
            self.forecast() * self.headroom(), statistics.fmean(self.bins[self.first :][-20:] or [0.0]) / BIN_S
        )
        newest = self.bins[-1] if self.bins else 0.0
        if newest > 15.0 * planned * 1.5 and newest > 15.0 * planned + 4.0 * (15.0 * planned) ** 0.5:
            return 1.2 * max(self.minute(), newest / 15.0)
        has_jumped = 60.0 * self.minute() > 60.0 * planned + 4.0 * (60.0 * planned) ** 0.5
        return 1.2 * self.minute() if has_jumped else planned


@pytest.mark.parametrize("lead_s", [0.0, 20.0, 900.0, 2400.0])
@pytest.mark.parametrize(("short_share", "ttft_slo_s"), [(0.5, 2.0), (0.1, 2.0), (0.1, 20.0), (0.1, 90.0)])
def test_forecasts_are_as_a_plain_reading_of_all_arrivals_has_them(lead_s, short_share, ttft_slo_s):
    rng = random.Random(f"{lead_s} {short_share}")
    demand = DemandForecast(lead_s=lead_s, short_share=short_share, ttft_slo_s=ttft_slo_s)
    plain, now = PlainForecast(lead_s, short_share, ttft_slo_s), 3.0
    rate_rps = 4.0
    jumps, steep_jumps = [], []
    for step in range(1900):
        now += 2500.0 if step == 1500 else rng.choice((BIN_S / 3, BIN_S / 2, BIN_S, 4 * BIN_S))
        rate_rps = min(max(rate_rps * rng.uniform(0.9, 1.115), 0.0 if step % 500 < 20 else 0.5), 40.0)
        arrived = 0.0 if step % 500 < 20 else float(rng.randrange(int(10 * rate_rps) + 1))
        demand = demand.count(now, arrived)
        plain.count(now, arrived)
        if step % 7 == 0 or step < 50:
            assert demand.minute_rps == pytest.approx(plain.minute(), abs=1e-9)
            assert demand.forecast_rps == pytest.approx(plain.forecast(), rel=1e-9, abs=1e-9)
            assert demand.headroom == pytest.approx(plain.headroom(), rel=1e-9)
            assert demand.planned_rps == pytest.approx(plain.planned(), rel=1e-9, abs=1e-9)
            jumps.append(demand.planned_rps == 1.2 * demand.minute_rps)
            steep_jumps.append(demand.planned_rps == 1.2 * demand.counts[-1] / BIN_S if demand.counts else False)
    assert plain.num_errors > 720
    assert plain.changes == {True, False}
    assert not all(jumps)
    assert short_share > 0.1 or any(jumps)
    assert any(steep_jumps)
