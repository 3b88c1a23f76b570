"""What rate to expect when an engine that is started now serves, and what rate to plan engines for.

A burst above or below the hour's mean fades: the longer an engine takes to start, the less of it is expected to last.
With a long start the hour's mean, its growth, and a headroom over both decide; with a short one the last minute does.
Requests that may wait for their first token see no shortage of seconds: with a long objective the mean is a longer one.
A rate that is another one for five minutes has changed: what came before says nothing any more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice_core.autoscaling.demand_headroom import FIRST_HEADROOM, compute_headroom, remember_error

BIN_S = 15.0  # arrivals are counted in bins of so long
MINUTE_S = 60.0  # what arrives now is the mean of so long
HOUR_S = 3600.0  # what usually arrives is the mean of so long: a shorter one wavers, and each wave costs engines
# What comes a sixth too fast for six objectives waits for one objective: shorter shortages are waited out.
_WAITED_OUT = 6.0
FADE_S = 100.0  # of the recent rate's distance from the hour's mean, 1 / e is left after so long
_TREND_S = 1500.0  # growth is that of so long
_MOST_GROWTH = 1.5  # growth says no more than that of the hour's mean
_SHORT_SHARE = 0.1  # share of the moments at which what is planned may be too little
_WINDOW_S = 300.0  # shortages that last longer, for want of engines that start, have to be as much rarer
_CHANCE = 4.0  # standard deviations of requests that come at random
_STEEP = 1.5  # a single bin says that the rate has jumped if it has as many times what is planned for
# The rate has changed if each part of the last five minutes is so far beyond any such time of the hour before: a burst
# does not last so long at a height that no other burst of the hour reaches.
_PART_BINS = 5
_CHANGED_PARTS = 4
_CHANGE_FACTOR = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecast:
    """What arrives, and how well its forecasts came true. Immutable.

    Args:
        lead_s: How far ahead forecasts reach: as long as an engine takes to start.
        ttft_slo_s: TTFT objective.
        short_share: Share of the moments at which what is planned may be too little, of leads up to five minutes.
        counts: Arrivals of each whole bin of ``BIN_S``, the newest last.
        bin_start_s: When the bin under way began; None: nothing was counted yet.
        bin_count: Arrivals of it.
        due: Forecasts made, by the number of bins until they are due.
        errors: What came over what had been forecast, the newest last.
    """

    lead_s: float
    ttft_slo_s: float = 0.0
    short_share: float = _SHORT_SHARE
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
        for _ in range(min(num_bins, int(HOUR_S / BIN_S))):
            found = _close_bin(found, share)
        return found

    @property
    def minute_rps(self) -> float:
        """Arrivals per second now: the mean of ``MINUTE_S``."""
        return self._compute_rps(MINUTE_S)

    @property
    def recent_rps(self) -> float:
        """Arrivals per second of late: the mean of a minute, or of as long as requests wait a shortage out."""
        return self._compute_rps(min(max(MINUTE_S, _WAITED_OUT * self.ttft_slo_s), _WINDOW_S))

    @property
    def forecast_rps(self) -> float:
        """Arrivals per second to expect in ``lead_s``: the hour's and its growth, and what lasts of a burst."""
        usual = _mean(self.counts) / BIN_S
        recent = self.counts[-int(_TREND_S / BIN_S) :]
        if len(recent) >= int(_TREND_S / BIN_S) // 2:
            # The mean is that of half its time ago. What falls may stop falling: that is for the next forecast to see.
            slope = max(_compute_slope(recent), 0.0) / BIN_S / BIN_S
            reach_s = self.lead_s + len(self.counts) * BIN_S / 2.0
            usual = min(usual + slope * reach_s, _MOST_GROWTH * usual)
        return usual + math.exp(-self.lead_s / FADE_S) * (self.recent_rps - usual)

    @property
    def quantile(self) -> float:
        """Share of the moments at which what is planned is to suffice."""
        return 1.0 - self.short_share * min(1.0, _WINDOW_S / max(self.lead_s, 1.0))

    @property
    def headroom(self) -> float:
        """What forecasts are multiplied with."""
        return compute_headroom(self.errors, self.quantile)

    @property
    def planned_rps(self) -> float:
        """Arrivals per second to have engines for: the forecast with headroom, but no less than what arrives.

        That is the mean of the last five minutes; or more than that of the last minute or bin, where it has jumped:
        where it had more than was planned for, beyond what comes by chance.
        """
        planned = max(self.forecast_rps * self.headroom, self._compute_rps(_WINDOW_S))
        jumped = max(self.minute_rps, self._compute_rps(BIN_S))
        if _is_beyond_chance(jumped * BIN_S, planned * BIN_S) and jumped > _STEEP * planned:
            return jumped * FIRST_HEADROOM
        if _is_beyond_chance(self.minute_rps * MINUTE_S, planned * MINUTE_S):
            return self.minute_rps * FIRST_HEADROOM
        return planned

    def _compute_rps(self, span_s: float) -> float:
        """Compute the mean arrivals per second of the newest bins."""
        return _mean(self.counts[-int(span_s / BIN_S) :]) / BIN_S


def _close_bin(demand: DemandForecast, count: float) -> DemandForecast:
    """Close a bin: compare what came with what was forecast, and forecast anew."""
    found = replace(demand, counts=(*demand.counts, count)[-int(HOUR_S / BIN_S) :])
    horizon = max(1, math.ceil(demand.lead_s / BIN_S))
    due, errors = demand.due, demand.errors
    if len(due) >= horizon and due[0] > 0.0:
        errors = remember_error(errors, found.recent_rps / due[0])
    found = _forget_before_change(replace(found, due=due, errors=errors))
    return replace(found, due=(*found.due, found.forecast_rps)[-horizon:])


def _forget_before_change(demand: DemandForecast) -> DemandForecast:
    """Forget the rate before a change, what was forecast from it, and what such forecasts lacked since."""
    num_bins = _CHANGED_PARTS * _PART_BINS
    before, since = demand.counts[:-num_bins], demand.counts[-num_bins:]
    if len(before) < num_bins:
        return demand
    sums_before, parts = _sum_parts(before, 1), _sum_parts(since, _PART_BINS)
    most, least = max(sums_before), min(sums_before)
    has_grown = min(parts) > most * _CHANGE_FACTOR + _CHANCE * math.sqrt(most)
    has_fallen = max(parts) < least / _CHANGE_FACTOR - _CHANCE * math.sqrt(least)
    if not has_grown and not has_fallen:
        return demand
    # It may have changed within the oldest part.
    return replace(demand, counts=since[_PART_BINS:], due=(), errors=demand.errors[:-num_bins])


def _is_beyond_chance(count: float, expected: float) -> bool:
    """Say whether so many requests are more than come by chance where so many are expected."""
    return count > expected + _CHANCE * math.sqrt(expected)


def _sum_parts(counts: Sequence[float], step: int) -> list[float]:
    """Sum the arrivals of ``_PART_BINS`` bins, from each ``step``-th one on."""
    return [math.fsum(counts[first : first + _PART_BINS]) for first in range(0, len(counts) - _PART_BINS + 1, step)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


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
