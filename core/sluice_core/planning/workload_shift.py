"""Whether a workload has shifted from the one that a plan was made for, so that it is worth to plan again.

Source: DistServe, section 4.3: a profiler watches arrival rate and mean lengths, and a significant shift of them makes
the placement algorithm run again, on recent requests. What is significant the paper does not say.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A mean length, or the rate, that differs by more than this share, and by more than chance, is a shift.
SHIFT_RATIO = 1.25
_CHANCE = 2.0  # standard errors


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanEstimate:
    """A mean and its standard error.

    Args:
        mean: The mean.
        error: Its relative standard error.
    """

    mean: float
    error: float

    def differs(self, other: MeanEstimate) -> bool:
        """Say whether two differ by more than ``SHIFT_RATIO`` and chance together."""
        if self.mean <= 0.0 or other.mean <= 0.0:
            return self.mean != other.mean
        chance = _CHANCE * math.hypot(self.error, other.error)
        return abs(math.log(self.mean / other.mean)) > math.log(SHIFT_RATIO) + chance


class WorkloadMeans(NamedTuple):
    """What a plan depends on.

    Args:
        rate_rps: Arrivals per second.
        prompt_tokens: Length of prompts.
        output_tokens: Length of answers.
    """

    rate_rps: MeanEstimate
    prompt_tokens: MeanEstimate
    output_tokens: MeanEstimate


def estimate_means(prompt_tokens: Sequence[int], output_tokens: Sequence[int], rate_rps: float) -> WorkloadMeans:
    """Estimate the means of some requests.

    Args:
        prompt_tokens: Prompt length of each, at least one.
        output_tokens: Length of its answer.
        rate_rps: Arrivals per second, counted on these requests.
    """
    return WorkloadMeans(
        MeanEstimate(mean=rate_rps, error=1.0 / math.sqrt(len(prompt_tokens))),
        _estimate_mean(prompt_tokens),
        _estimate_mean(output_tokens),
    )


def find_shifts(planned: WorkloadMeans, recent: WorkloadMeans) -> tuple[str, ...]:
    """Find which means have shifted, by name; empty: the plan still fits."""
    return tuple(
        name
        for name, before, after in zip(WorkloadMeans._fields, planned, recent, strict=True)
        if before.differs(after)
    )


def _estimate_mean(values: Sequence[int]) -> MeanEstimate:
    mean = statistics.fmean(values)
    return MeanEstimate(mean=mean, error=statistics.pstdev(values) / mean / math.sqrt(len(values)))
