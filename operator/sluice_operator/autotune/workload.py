"""The workload that sliders are searched for, from the routers' request samples, and whether it has shifted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_core.planning.workload_shift import WorkloadMeans, estimate_means, find_shifts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sluice.v1 import control_pb2

# The newest requests count: at most so many of each router, of at most so long.
WINDOW_S = 300.0
MAX_REQUESTS = 1024
# Fewer say too little about lengths.
MIN_REQUESTS = 30
# A search on a small sample is made again once there are so many times as many requests.
SAMPLE_GROWTH = 4


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
    def means(self) -> WorkloadMeans:
        """Rate, prompt length, output length."""
        return estimate_means([row[0] for row in self.rows], [row[1] for row in self.rows], self.rate_rps)


def read_workload(statuses: Iterable[control_pb2.GetStatusResponse]) -> WorkloadSample | None:
    """Merges the newest samples of all routers; None: too few requests.

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
    """Whether the rate or the mean lengths differ by more than chance (``find_shifts``)."""
    return bool(find_shifts(old.means, new.means))


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
