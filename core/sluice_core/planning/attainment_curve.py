"""Attainment against the rate, as far as it is known, and the goodput that follows from it.

Attainment falls from 0.95 to 0.5 within a tenth of the rate, so between two rates a few percent
apart a straight line over the logarithm of the rate is as good as more runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

# ln(rate) per attainment where only one side of the target is known: 0.45 of attainment in a tenth of the rate.
_SLOPE = 0.1 / 0.45


class AttainmentCurve:
    """Attainment of one candidate by rate; mutable: points are added."""

    __slots__ = ("points",)

    def __init__(self, points: Iterable[tuple[float, float]] = ()) -> None:
        self.points = dict(points)

    def find_bracket(self, target: float) -> tuple[float | None, float | None]:
        """Find the highest rate known to pass and the lowest above it known to fail; None where there is none."""
        passing = [rate for rate, attainment in self.points.items() if attainment >= target]
        low = max(passing) if passing else None
        failing = [rate for rate, attainment in self.points.items() if attainment < target]
        above = [rate for rate in failing if low is None or rate > low]
        return low, min(above) if above else None

    def estimate_goodput_rps(self, target: float) -> float:
        """Estimate the rate at which attainment crosses the target; 0 without points."""
        low, high = self.find_bracket(target)
        if low is None and high is None:
            return 0.0
        if low is None or high is None:
            rate = low if high is None else high
            assert rate is not None
            return rate * math.exp(_SLOPE * (self.points[rate] - target))
        above, below = self.points[low] - target, target - self.points[high]
        return low * math.exp(math.log(high / low) * above / (above + below))
