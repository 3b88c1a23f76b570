"""How long iterations take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sluice_engine.core_messages import IterationReport
from sluice_engine.scheduling.expected_arrivals import LEAD_S, LEAD_SHARE, RecentIterations

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from sluice_core.latency import LatencyModel
    from sluice_engine.scheduling.scheduled_batch import ScheduledBatch


class IterationTimer:
    """Measures iterations, of which several may be under way at once."""

    def __init__(self) -> None:
        self._batches: dict[int, ScheduledBatch] = {}
        self._last_end_s = 0.0
        self._number = 0
        self._recent = RecentIterations()

    def start(self, output: SchedulerOutput, batch: ScheduledBatch) -> None:
        """Notes an iteration that was scheduled."""
        self._batches[id(output)] = batch

    def has_prefills(self) -> bool:
        """Says whether an iteration under way computes prompt tokens."""
        return any(batch.prefill_tokens for batch in self._batches.values())

    def describe_under_way(self) -> IterationReport | None:
        """Describes the iteration under way, without a number and a duration; None: there is none."""
        batch = next(iter(self._batches.values()), None)
        return None if batch is None else _make_report(batch, 0, 0.0)

    def estimate_rest_s(self, latency: LatencyModel) -> tuple[int, float]:
        """Estimates what is left of the iterations under way.

        Args:
            latency: How long iterations take.

        Returns:
            Their number, and the seconds until the last one ends.
        """
        if not self._batches:
            return 0, 0.0
        batches = list(self._batches.values())
        began_s = max(batches[0].started_s, self._last_end_s)
        total_s = sum(latency.estimate_shape_s(batch.make_shape()) for batch in batches)
        return len(batches), max(0.0, total_s - (time.perf_counter() - began_s))

    def find_wait_s(self) -> float:
        """Finds for how long the next iteration need not be made up yet, in seconds: the one under way goes on."""
        batch = next(iter(self._batches.values()), None)
        if batch is None or len(self._batches) > 1:
            return 0.0
        shortest_s = self._recent.find_shortest_s(batch)
        began_s = max(batch.started_s, self._last_end_s)
        return began_s + shortest_s - max(LEAD_S, LEAD_SHARE * shortest_s) - time.perf_counter()

    def stop(self, output: SchedulerOutput) -> tuple[ScheduledBatch, IterationReport] | None:
        """Ends an iteration.

        Returns:
            None for one that computed nothing.
        """
        batch = self._batches.pop(id(output), None)
        if batch is None:
            return None
        now_s = time.perf_counter()
        # With several under way, one begins to run when the one before it ends.
        began_s = max(batch.started_s, self._last_end_s)
        self._last_end_s = now_s
        self._number += 1
        report = _make_report(batch, self._number, now_s - began_s)
        self._recent.note(report)
        return batch, report


def _make_report(batch: ScheduledBatch, number: int, duration_s: float) -> IterationReport:
    return IterationReport(
        number=number,
        prefill_tokens=batch.prefill_tokens,
        attention_work=batch.attention_work,
        num_chunks=batch.num_chunks,
        num_decodes=batch.num_decodes,
        decode_context_tokens=batch.decode_context_tokens,
        duration_s=duration_s,
    )
