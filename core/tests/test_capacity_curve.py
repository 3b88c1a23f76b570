"""How many engines a rate needs."""

from __future__ import annotations

import pytest

from sluice_core.autoscaling.capacity_curve import CapacityCurve

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
        (0.0, 0, 1, 0),
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
