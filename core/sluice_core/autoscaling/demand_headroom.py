"""The headroom over a forecast rate: what forecasts lacked before, so that bursts which no trend foresees find engines.

The operator wants engines for the forecast times this; see its ``autoscaling/decision.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_HEADROOM = 1.5  # what no forecast foresees is not covered by engines that wait for it
_KEPT_ERRORS = 720
_ENOUGH_ERRORS = 40
FIRST_HEADROOM = 1.2  # until so many errors are known, and over what has jumped


def remember_error(errors: tuple[float, ...], error: float) -> tuple[float, ...]:
    """Append what came over what had been forecast; the oldest such ratios go."""
    return (*errors, error)[-_KEPT_ERRORS:]


def compute_headroom(errors: Sequence[float], quantile: float) -> float:
    """Compute what forecasts are multiplied with: what sufficed at ``quantile`` of the moments behind.

    Args:
        errors: What came over what had been forecast.
        quantile: Share of the moments at which the product is to suffice.
    """
    if len(errors) < _ENOUGH_ERRORS:
        return FIRST_HEADROOM
    ordered = sorted(errors)
    enough = ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]
    return min(max(1.0, enough), _MOST_HEADROOM)
