"""A day of requests: a diurnal profile, with the bursts and lengths of Azure's conversations. One seed makes it anew.

The rate at each moment is the profile's, times what Azure's hour of requests had in the same ten seconds over its mean,
from a place on that is drawn, over and over. Arrivals within ten seconds are Poisson's. Lengths are rows
of the same trace. ``DAY`` is the day that the measurements name; a test holds the digest of its first hour.
A day that repeats one hour flatters whoever goes by the last hour. In ``DRAWN_DAY`` parts of the hour come in a drawn
order.
"""

from __future__ import annotations

import bisect
import hashlib
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from sluice_core.sim.sim_setup import Arrival

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sluice_core.records import Slo
    from sluice_core.sim.traces import TraceRow

DAY_S = 86_400.0
BIN_S = 10.0
# Of the peak, at each hour: a night, a morning, noon, and an evening.
HOURLY_SHARES = (
    0.34, 0.27, 0.22, 0.20, 0.20, 0.23, 0.30, 0.42, 0.60, 0.78, 0.90, 0.96,
    0.93, 0.95, 1.00, 0.99, 0.94, 0.86, 0.80, 0.78, 0.74, 0.66, 0.54, 0.43,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DayTrace:
    """A day.

    Args:
        seed: Of repetitions, arrivals and lengths.
        peak_rps: Rate of the profile at its peak, bursts aside.
        part_s: Length of the parts of Azure's hour that come in a drawn order; None: the hour comes as it is.
    """

    seed: int
    peak_rps: float
    part_s: float | None = None

    def make_arrivals(self, rows: Sequence[TraceRow], slo: Slo, hours: float = 24.0) -> list[Arrival]:
        """Makes the requests.

        Args:
            rows: Azure's conversations, with times.
            slo: Objectives of all.
            hours: Of its beginning.
        """
        rng = random.Random(f"day {self.seed}")
        bursts = _count_bursts([row.arrival_s for row in rows if row.arrival_s is not None])
        arrivals = []
        for number, share in enumerate(self._order(bursts, rng, round(hours * 3600.0 / BIN_S))):
            start_s = number * BIN_S
            rate_rps = self.peak_rps * find_share(start_s + BIN_S / 2) * share
            at_s = start_s + rng.expovariate(rate_rps) if rate_rps else DAY_S
            while at_s < start_s + BIN_S:
                row = rows[rng.randrange(len(rows))]
                arrivals.append(
                    Arrival(at_s=at_s, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens, slo=slo)
                )
                at_s += rng.expovariate(rate_rps)
        return arrivals

    def _order(self, bursts: Sequence[float], rng: random.Random, num_bins: int) -> Iterator[float]:
        """Orders bursts for so many bins. Where the hour ends it begins again: no jump that is not its own."""
        num_together = num_bins if self.part_s is None else round(self.part_s / BIN_S)
        for number in range(num_bins):
            if number % num_together == 0:
                position = rng.randrange(len(bursts))
            yield bursts[(position + number) % len(bursts)]


DAY = DayTrace(seed=20231116, peak_rps=22.0)
DRAWN_DAY = DayTrace(seed=20231116, peak_rps=22.0, part_s=600.0)


def find_share(at_s: float) -> float:
    """Finds the profile's share of its peak at a time of the day, on straight lines between the hours."""
    hour, part = divmod(at_s / 3600.0, 1.0)
    low, high = HOURLY_SHARES[int(hour) % 24], HOURLY_SHARES[(int(hour) + 1) % 24]
    return low + (high - low) * part


def make_step(rows: Sequence[TraceRow], slo: Slo, *, low_rps: float, high_rps: float, seed: int = 1) -> list[Arrival]:
    """Makes three hours at a low rate, of which the second is at a high one; Poisson arrivals."""
    rng = random.Random(f"step {seed}")
    arrivals = []
    for rate_rps, (start_s, end_s) in zip(
        (low_rps, high_rps, low_rps), pairwise((0.0, 3600.0, 7200.0, 10800.0)), strict=True
    ):
        at_s = start_s + rng.expovariate(rate_rps)
        while at_s < end_s:
            row = rows[rng.randrange(len(rows))]
            arrivals.append(
                Arrival(at_s=at_s, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens, slo=slo)
            )
            at_s += rng.expovariate(rate_rps)
    return arrivals


def count_arrivals(arrivals: Sequence[Arrival], bin_s: float) -> list[int]:
    """Counts the arrivals of each bin, from the start on."""
    counts = [0] * (int(arrivals[-1].at_s / bin_s) + 1)
    for arrival in arrivals:
        counts[int(arrival.at_s / bin_s)] += 1
    return counts


def digest(arrivals: Sequence[Arrival]) -> str:
    """Computes a digest of a day, to the microsecond."""
    found = hashlib.sha256()
    for arrival in arrivals:
        found.update(f"{arrival.at_s:.6f},{arrival.prompt_tokens},{arrival.output_tokens};".encode())
    return found.hexdigest()[:16]


def _count_bursts(times_s: Sequence[float]) -> list[float]:
    """Counts Azure's requests in each ten seconds, over their mean."""
    num_bins = int((times_s[-1] - times_s[0]) / BIN_S)
    edges = [bisect.bisect_left(times_s, times_s[0] + number * BIN_S) for number in range(num_bins + 1)]
    counts = [high - low for low, high in pairwise(edges)]
    mean = sum(counts) / num_bins
    return [count / mean for count in counts]
