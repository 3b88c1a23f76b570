"""What the rate will be when an engine that is started now serves."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from sluice_core.planning.demand_forecast import BIN_S, DemandForecast


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


def test_a_steady_rate_is_forecast_as_it_is():
    demand = feed(DemandForecast(lead_s=120.0), [4.0] * 100)
    assert demand.level_rps == pytest.approx(4.0)
    assert demand.forecast_rps == pytest.approx(4.0)
    assert demand.headroom == pytest.approx(1.0)


def test_growth_is_carried_on_for_as_long_as_an_engine_takes_to_start():
    """0.01 requests/s more in each second, for 120 s beyond the middle of the last 150 s."""
    demand = feed(DemandForecast(lead_s=120.0), [20.0 + 0.15 * number for number in range(40)])
    assert demand.level_rps == pytest.approx(20.0 + 0.15 * 34.5)
    assert demand.forecast_rps == pytest.approx(demand.level_rps + 0.15 / BIN_S * (120.0 + 75.0))


def test_a_trend_needs_a_history_and_has_a_limit():
    few = feed(DemandForecast(lead_s=600.0), [1.0, 2.0, 4.0])
    assert few.forecast_rps == few.level_rps
    steep = feed(DemandForecast(lead_s=600.0), [0.1 * number for number in range(60)])
    assert steep.forecast_rps == pytest.approx(1.5 * steep.level_rps)


def test_headroom_is_what_forecasts_lacked():
    """Bursts that no trend foresees are learned: after an hour the headroom covers most of them."""
    assert DemandForecast(lead_s=60.0).headroom == pytest.approx(1.2)
    burst = [4.0] * 16 + [6.0] * 8
    demand = feed(DemandForecast(lead_s=60.0, quantile=0.9), burst * 12)
    assert 1.1 < demand.headroom < 1.5


def test_one_jump_does_not_cost_headroom_for_hours():
    demand = feed(DemandForecast(lead_s=120.0), [1.0] * 30 + [9.0] * 20 + [1.0] * 20)
    assert demand.headroom <= 1.5


def test_a_jump_counts_within_a_minute_and_chance_does_not():
    steady = feed(DemandForecast(lead_s=30.0), [9.0] * 40)
    assert feed(steady, [18.0] * 4).level_rps == pytest.approx(18.0)
    assert feed(steady, [10.0] * 4).level_rps == pytest.approx(9.4)


def test_a_late_call_spreads_what_it_brings():
    demand = DemandForecast(lead_s=30.0).count(0.0, 0.0).count(4 * BIN_S, 240.0)
    assert demand.counts == (60.0,) * 4
    assert demand.bin_start_s == 4 * BIN_S


class PlainForecast:
    """The same, read literally: all arrivals are kept, and everything is computed anew from whole bins."""

    def __init__(self, lead_s: float, quantile: float) -> None:
        self.lead_s, self.quantile = lead_s, quantile
        self.bins: list[float] = []
        self.forecasts: list[float] = []  # made when the bin of that number was over
        self.errors: list[float] = []
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
            for _ in range(min(num_over, 120)):  # half an hour
                self.close(share)
            self.open_count = 0.0
            self.begun_s += num_over * BIN_S

    def close(self, count: float) -> None:
        self.bins.append(count)
        # A forecast is due when as many bins are over as an engine takes to start.
        due = len(self.bins) - 1 - max(1, math.ceil(self.lead_s / BIN_S))
        if due >= 0 and self.forecasts[due] > 0.0:
            self.errors.append(self.level() / self.forecasts[due])
        self.forecasts.append(self.forecast())

    def level(self) -> float:
        if not self.bins:
            return 0.0
        usual = statistics.fmean(self.bins[-10:])  # 150 s
        minute = self.bins[-4:]
        expected = usual * len(minute)
        by_chance = 4.0 * expected**0.5
        has_jumped = sum(minute) > max(expected + by_chance, 1.2 * expected)
        return (statistics.fmean(minute) if has_jumped else usual) / BIN_S

    def forecast(self) -> float:
        reach = int(min(max(1200.0, 3.0 * self.lead_s), 1800.0) / BIN_S)
        recent = self.bins[-120:][-reach:]
        if len(recent) < reach // 2:
            return self.level()
        slope = statistics.linear_regression(range(len(recent)), recent).slope / BIN_S**2
        return min(self.level() + max(0.0, slope) * (self.lead_s + 75.0), 1.5 * self.level())

    def headroom(self) -> float:
        kept = sorted(self.errors[-720:])
        if len(kept) < 40:
            return 1.2
        return min(1.5, max(1.0, kept[min(int(self.quantile * len(kept)), len(kept) - 1)]))


@pytest.mark.parametrize("lead_s", [0.0, 20.0, 900.0, 2400.0])
@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_forecasts_are_as_a_plain_reading_of_all_arrivals_has_them(lead_s, quantile):
    rng = random.Random(f"{lead_s} {quantile}")
    demand, plain, now = DemandForecast(lead_s=lead_s, quantile=quantile), PlainForecast(lead_s, quantile), 3.0
    rate_rps = 4.0
    for step in range(1900):
        now += 2500.0 if step == 1500 else rng.choice((BIN_S / 3, BIN_S / 2, BIN_S, 4 * BIN_S))
        rate_rps = min(max(rate_rps * rng.uniform(0.9, 1.115), 0.0 if step % 500 < 20 else 0.5), 40.0)
        arrived = 0.0 if step % 500 < 20 else float(rng.randrange(int(10 * rate_rps) + 1))
        demand = demand.count(now, arrived)
        plain.count(now, arrived)
        if step % 7 == 0 or step < 50:
            assert demand.level_rps == pytest.approx(plain.level(), abs=1e-9)
            assert demand.forecast_rps == pytest.approx(plain.forecast(), rel=1e-9, abs=1e-9)
            assert demand.headroom == pytest.approx(plain.headroom(), rel=1e-9)
    assert len(plain.errors) > 720
