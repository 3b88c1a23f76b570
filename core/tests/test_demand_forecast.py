"""What the rate will be when an engine that is started now serves."""

from __future__ import annotations

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
    """0.01 requests/s more in each second, for 120 s beyond the mean of the last 60 s."""
    demand = feed(DemandForecast(lead_s=120.0), [2.0 + 0.15 * number for number in range(40)])
    assert demand.forecast_rps == pytest.approx(demand.level_rps + 0.15 / BIN_S * 120.0)


def test_a_trend_needs_a_history_and_has_a_limit():
    few = feed(DemandForecast(lead_s=600.0), [1.0, 2.0, 4.0])
    assert few.forecast_rps == few.level_rps
    steep = feed(DemandForecast(lead_s=600.0), [0.1 * number for number in range(40)])
    assert steep.forecast_rps == pytest.approx(1.5 * steep.level_rps)


def test_headroom_is_what_forecasts_lacked():
    """Bursts that no trend foresees are learned: after an hour the headroom covers most of them."""
    assert DemandForecast(lead_s=60.0).headroom == pytest.approx(1.2)
    burst = [4.0] * 16 + [6.0] * 8
    demand = feed(DemandForecast(lead_s=60.0), burst * 12)
    assert 1.2 < demand.headroom < 1.6


def test_a_late_call_spreads_what_it_brings():
    demand = DemandForecast(lead_s=30.0).count(0.0, 0.0).count(4 * BIN_S, 240.0)
    assert demand.counts == (60.0,) * 4
    assert demand.bin_start_s == 4 * BIN_S
