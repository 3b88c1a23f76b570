"""What rate to expect when an engine that is started now serves: the trend; ``demand_headroom`` says how much more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice_core.planning.demand_headroom import compute_headroom, remember_error

BIN_S = 15.0  # arrivals are counted in bins of so long
LEVEL_S = 150.0  # what arrives now is the mean of so long: a shorter one wavers, and each wave would cost engines
JUMP_S = 60.0  # unless the last of it is higher, beyond what comes by chance
_JUMP_RATIO = 1.2
_CHANCE = 4.0  # standard deviations of requests that come at random
_LEAST_TREND_S = 1200.0  # a trend is that of so long, or of so many times as long as it reaches ahead
_TREND_LEADS = 3.0
_MOST_TREND_S = 1800.0
_MOST_GROWTH = 1.5  # a trend says no more than that of what comes


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecast:
    """What arrives, and how well its forecasts came true. Immutable.

    Args:
        lead_s: How far ahead forecasts reach: as long as an engine takes to start.
        quantile: Share of the moments at which the forecast, with its headroom, is to suffice.
        counts: Arrivals of each whole bin of ``BIN_S``, the newest last.
        bin_start_s: When the bin under way began; None: nothing was counted yet.
        bin_count: Arrivals of it.
        due: Forecasts made, by the number of bins until they are due.
        errors: What came over what had been forecast, the newest last.
    """

    lead_s: float
    quantile: float = 0.97
    counts: tuple[float, ...] = ()
    bin_start_s: float | None = None
    bin_count: float = 0.0
    due: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()

    def count(self, now: float, num_arrived: float) -> DemandForecast:
        """Count requests that arrived since the last call; bins that are over are closed."""
        if self.bin_start_s is None:
            return replace(self, bin_start_s=now, bin_count=num_arrived)
        num_bins = int((now - self.bin_start_s) / BIN_S)
        if num_bins < 1:
            return replace(self, bin_count=self.bin_count + num_arrived)
        # What a late call brings is spread over the bins since.
        share = (self.bin_count + num_arrived) / num_bins
        found = replace(self, bin_start_s=self.bin_start_s + num_bins * BIN_S, bin_count=0.0)
        for _ in range(min(num_bins, int(_MOST_TREND_S / BIN_S))):
            found = _close_bin(found, share)
        return found

    @property
    def level_rps(self) -> float:
        """Arrivals per second now: the mean of ``LEVEL_S``, or of ``JUMP_S`` where the rate has jumped."""
        level = _mean(self.counts[-int(LEVEL_S / BIN_S) :])
        last = self.counts[-int(JUMP_S / BIN_S) :]
        expected = level * len(last)
        chance = _CHANCE / math.sqrt(expected) if expected > 0.0 else 0.0
        has_jumped = _mean(last) > level * max(_JUMP_RATIO, 1.0 + chance)
        return (_mean(last) if has_jumped else level) / BIN_S

    @property
    def forecast_rps(self) -> float:
        """Arrivals per second to expect within ``lead_s``: now's, or more where they grow."""
        num_bins = int(min(max(_LEAST_TREND_S, _TREND_LEADS * self.lead_s), _MOST_TREND_S) / BIN_S)
        recent = self.counts[-num_bins:]
        level = self.level_rps
        if len(recent) < num_bins // 2:
            return level
        slope = _compute_slope(recent) / BIN_S / BIN_S
        # The level is that of half its time ago. What falls may stop falling: that is for the next forecast to see.
        return min(level + max(slope, 0.0) * (self.lead_s + LEVEL_S / 2.0), _MOST_GROWTH * level)

    @property
    def headroom(self) -> float:
        """What forecasts are multiplied with."""
        return compute_headroom(self.errors, self.quantile)


def _close_bin(demand: DemandForecast, count: float) -> DemandForecast:
    """Close a bin: compare what came with what was forecast, and forecast anew."""
    found = replace(demand, counts=(*demand.counts, count)[-int(_MOST_TREND_S / BIN_S) :])
    horizon = max(1, math.ceil(demand.lead_s / BIN_S))
    due, errors = demand.due, demand.errors
    if len(due) >= horizon and due[0] > 0.0:
        errors = remember_error(errors, found.level_rps / due[0])
    return replace(found, due=(*due, found.forecast_rps)[-horizon:], errors=errors)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _compute_slope(values: Sequence[float]) -> float:
    """Compute the slope of the line of least squares, per step."""
    middle = (len(values) - 1) / 2.0
    mean = statistics.fmean(values)
    above = below = 0.0
    for index, value in enumerate(values):
        off = index - middle
        above += off * (value - mean)
        below += off * off
    return above / below
