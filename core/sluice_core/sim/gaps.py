"""Gaps between tokens (ITL), counted in bins: a run has millions, and an iteration adds all of its own at once."""

from __future__ import annotations

import math

_BINS_PER_E = 400.0  # bins grow by a factor of e^(1/400): a percentile is within 0.13 % of the true one


class GapHistogram:
    """Weighted histogram over a logarithmic scale; mutable."""

    __slots__ = ("_counts", "num_gaps", "total_s")

    def __init__(self) -> None:
        self.num_gaps = 0
        self.total_s = 0.0
        self._counts: dict[int, int] = {}

    def add(self, gap_s: float, num_gaps: int) -> None:
        """Count ``num_gaps`` gaps of ``gap_s`` seconds; gaps under a nanosecond count as one."""
        if num_gaps <= 0:
            return
        self.num_gaps += num_gaps
        self.total_s += gap_s * num_gaps
        index = int(math.log(max(gap_s, 1e-9)) * _BINS_PER_E + 1e5)
        self._counts[index] = self._counts.get(index, 0) + num_gaps

    def compute_percentile_s(self, share: float) -> float | None:
        """Compute a percentile, in seconds, as the middle of its bin; None without gaps.

        Args:
            share: 0 to 1; nearest rank.
        """
        rank = max(1, math.ceil(share * self.num_gaps))
        for index in sorted(self._counts):
            rank -= self._counts[index]
            if rank <= 0:
                return math.exp((index + 0.5 - 1e5) / _BINS_PER_E)
        return None
