"""How many engines a rate needs, and what the rate will be when they serve."""

from __future__ import annotations

import pytest

from sluice_core.planning.sizing import BIN_S, CapacityCurve, Demand

CURVE = CapacityCurve(((2, 2.0), (4, 6.0), (8, 16.0)))


@pytest.mark.parametrize(
    ("num_engines", "goodput_rps"),
    [(1, 1.0), (2, 2.0), (3, 3.75), (4, 6.0), (6, 10.5), (8, 16.0), (10, 20.0)],
)
def test_goodput_per_engine_lies_on_straight_lines(num_engines, goodput_rps):
    assert CURVE.estimate_goodput_rps(num_engines) == pytest.approx(goodput_rps)


@pytest.mark.parametrize(
    ("rate_rps", "least", "most", "wanted"),
    [
        (0.0, 0, 16, 0),
        (0.0, 2, 16, 2),
        (0.1, 0, 16, 1),
        (2.0, 1, 16, 2),
        (2.01, 1, 16, 3),
        (6.0, 1, 16, 4),
        (6.0, 5, 16, 5),
        (19.9, 1, 16, 10),
        (400.0, 1, 16, 16),
        (400.0, 3, 3, 3),
    ],
)
def test_the_fewest_engines_that_serve_a_rate(rate_rps, least, most, wanted):
    assert CURVE.count_engines(rate_rps, least, most) == wanted


def test_a_size_is_found_anew():
    assert CURVE.add(4, 5.0).points == ((2, 2.0), (4, 5.0), (8, 16.0))
    assert CURVE.add(16, 40.0).points[-1] == (16, 40.0)


@pytest.mark.parametrize("points", [(), ((4, 1.0), (2, 1.0)), ((0, 1.0),), ((2, 1.0), (2, 2.0))])
def test_curves_that_are_none_are_refused(points):
    with pytest.raises(ValueError, match="sizes are positive and ascend"):
        CapacityCurve(points)


def feed(demand: Demand, rates_rps) -> Demand:
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
    demand = feed(Demand(lead_s=120.0), [4.0] * 100)
    assert demand.level_rps == pytest.approx(4.0)
    assert demand.forecast_rps == pytest.approx(4.0)
    assert demand.headroom == pytest.approx(1.0)


def test_growth_is_carried_on_for_as_long_as_an_engine_takes_to_start():
    """0.01 requests/s more in each second, for 120 s beyond the mean of the last 60 s."""
    demand = feed(Demand(lead_s=120.0), [2.0 + 0.15 * number for number in range(40)])
    assert demand.forecast_rps == pytest.approx(demand.level_rps + 0.15 / BIN_S * 120.0)


def test_a_trend_needs_a_history_and_has_a_limit():
    few = feed(Demand(lead_s=600.0), [1.0, 2.0, 4.0])
    assert few.forecast_rps == few.level_rps
    steep = feed(Demand(lead_s=600.0), [0.1 * number for number in range(40)])
    assert steep.forecast_rps == pytest.approx(1.5 * steep.level_rps)


def test_headroom_is_what_forecasts_lacked():
    """Bursts that no trend foresees are learned: after an hour the headroom covers most of them."""
    assert Demand(lead_s=60.0).headroom == pytest.approx(1.2)
    burst = [4.0] * 16 + [6.0] * 8
    demand = feed(Demand(lead_s=60.0), burst * 12)
    assert 1.2 < demand.headroom < 1.6


def test_a_late_call_spreads_what_it_brings():
    demand = Demand(lead_s=30.0).count(0.0, 0.0).count(4 * BIN_S, 240.0)
    assert demand.counts == (60.0,) * 4
    assert demand.bin_start_s == 4 * BIN_S
