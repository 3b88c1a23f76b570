"""What the routers' samples of requests say: the workload that sliders are searched for, and whether it has shifted."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sluice.v1 import control_pb2

# The newest requests count: at most so many of each router, of at most so long.
WINDOW_S = 300.0
MAX_REQUESTS = 1024
# Fewer say too little about lengths.
MIN_REQUESTS = 30
# A mean length, or the rate, that differs by more than this share, and by more than chance, is a shift.
SHIFT_RATIO = 1.25
_CHANCE = 2.0  # standard errors
# A search on a small sample is made again once there are so many times as many requests.
SAMPLE_GROWTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanEstimate:
    """A mean, and how well it is known.

    Args:
        mean: The mean.
        error: Its relative standard error.
    """

    mean: float
    error: float

    def differs(self, other: MeanEstimate) -> bool:
        """Whether two differ by more than ``SHIFT_RATIO`` and chance together."""
        if self.mean <= 0.0 or other.mean <= 0.0:
            return self.mean != other.mean
        chance = _CHANCE * math.hypot(self.error, other.error)
        return abs(math.log(self.mean / other.mean)) > math.log(SHIFT_RATIO) + chance


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSample:
    """Requests of the recent past.

    Args:
        rows: Prompt length and output length in tokens, and SLO class, of each.
        rate_rps: Arrivals per second, over all routers.
    """

    rows: tuple[tuple[int, int, str], ...]
    rate_rps: float

    @property
    def means(self) -> tuple[MeanEstimate, MeanEstimate, MeanEstimate]:
        """Rate, prompt length, output length."""
        return (
            MeanEstimate(mean=self.rate_rps, error=1.0 / math.sqrt(len(self.rows))),
            _estimate_mean([row[0] for row in self.rows]),
            _estimate_mean([row[1] for row in self.rows]),
        )


def read_workload(statuses: Iterable[control_pb2.GetStatusResponse]) -> WorkloadSample | None:
    """Puts the newest samples of all routers together; None: too few requests to say anything.

    Args:
        statuses: Newest status of each router that answers.
    """
    rows: list[tuple[int, int, str]] = []
    rate_rps = 0.0
    for status in statuses:
        newest, span_s = _take_newest(status.samples)
        rows += [(sample.prompt_tokens, sample.output_tokens, sample.slo_class) for sample in newest]
        if span_s > 0.0:
            rate_rps += (len(newest) - 1) / span_s
    if len(rows) < MIN_REQUESTS or rate_rps == 0.0:
        return None
    return WorkloadSample(rows=tuple(rows), rate_rps=rate_rps)


def has_shifted(old: WorkloadSample, new: WorkloadSample) -> bool:
    """Whether the rate or the mean lengths differ beyond ``SHIFT_RATIO`` and chance."""
    return any(before.differs(after) for before, after in zip(old.means, new.means, strict=True))


def _take_newest(
    samples: Sequence[control_pb2.RequestSample],
) -> tuple[list[control_pb2.RequestSample], float]:
    """The newest requests with a token, and the time between the first and the last of them, in seconds."""
    newest: list[control_pb2.RequestSample] = []
    span_s = 0.0
    gap_s = 0.0  # between the oldest one taken and the one before it
    for sample in reversed(samples):
        span_s += gap_s
        if len(newest) == MAX_REQUESTS or span_s > WINDOW_S:
            return newest, span_s - gap_s
        gap_s = sample.gap_s
        if sample.output_tokens and sample.prompt_tokens:
            newest.append(sample)
    return newest, span_s


def _estimate_mean(values: Sequence[int]) -> MeanEstimate:
    mean = statistics.fmean(values)
    return MeanEstimate(mean=mean, error=statistics.pstdev(values) / mean / math.sqrt(len(values)))
