"""What an iteration computed and how long it took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluice_core.scheduling.batching import RequestKind
from sluice_engine.core_messages import IterationReport

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from sluice_engine.scheduling.request_tracker import RequestTracker, TrackedRequest

# Weight of the newest pull in the measured rate.
_RATE_WEIGHT = 0.2


@dataclass(slots=True)
class ScheduledBatch:
    """A scheduled iteration whose output has not come back yet; mutable while it is made.

    Args:
        started_s: When its scheduling began, by ``perf_counter``.
        prefill_tokens: See ``core_messages.IterationReport``, also for the next four.
        attention_work: See there.
        num_chunks: See there.
        num_decodes: See there.
        decode_context_tokens: See there.
        computing: Requests that were no decodes before it.
        arriving: Those of them that are decodes after it.
    """

    started_s: float
    prefill_tokens: int = 0
    attention_work: float = 0.0
    num_chunks: int = 0
    num_decodes: int = 0
    decode_context_tokens: int = 0
    computing: list[TrackedRequest] = field(default_factory=list)
    arriving: list[TrackedRequest] = field(default_factory=list)


def describe_batch(output: SchedulerOutput, tracker: RequestTracker, started_s: float) -> ScheduledBatch:
    """Sums up an iteration right after it was scheduled, when vLLM has counted its tokens as computed.

    Args:
        output: What was scheduled.
        tracker: The requests.
        started_s: When scheduling began.
    """
    batch = ScheduledBatch(started_s=started_s)
    by_id = tracker.by_id
    num_decodes = context_tokens = 0
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        tracked = by_id[request_id]
        kind = tracked.kind
        num_computed_tokens = tracked.request.num_computed_tokens
        if kind is RequestKind.DECODE or kind is RequestKind.JOINING:
            num_decodes += 1
            context_tokens += num_computed_tokens
            if kind is RequestKind.JOINING:
                batch.computing.append(tracked)
            continue
        batch.computing.append(tracked)
        batch.prefill_tokens += num_tokens
        batch.attention_work += num_tokens * (num_computed_tokens - num_tokens / 2)
        batch.num_chunks += 1
    batch.num_decodes = num_decodes
    batch.decode_context_tokens = context_tokens
    return batch


class IterationTimer:
    """Measures iterations, of which several may be under way at once."""

    def __init__(self) -> None:
        self._batches: dict[int, ScheduledBatch] = {}
        self._last_end_s = 0.0
        self._number = 0

    def start(self, output: SchedulerOutput, batch: ScheduledBatch) -> None:
        """Notes an iteration that was scheduled."""
        self._batches[id(output)] = batch

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
        return batch, IterationReport(
            number=self._number,
            prefill_tokens=batch.prefill_tokens,
            attention_work=batch.attention_work,
            num_chunks=batch.num_chunks,
            num_decodes=batch.num_decodes,
            decode_context_tokens=batch.decode_context_tokens,
            duration_s=now_s - began_s,
        )


class PullRate:
    """Measured rate of KV pulls, newer ones weighing more."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def observe(self, statistics: Any) -> None:
        """Takes in what a connector measured.

        Args:
            statistics: ``KVConnectorStats`` of the worker, or None; lists ``bytes_transferred`` and
                ``transfer_duration`` (seconds) of the transfers that ended.
        """
        data = getattr(statistics, "data", None) or {}
        num_bytes, duration_s = sum(data.get("bytes_transferred", ())), sum(data.get("transfer_duration", ()))
        if not num_bytes or duration_s <= 0:
            return
        rate = num_bytes / duration_s
        self.bytes_per_s = rate if not self.bytes_per_s else self.bytes_per_s + _RATE_WEIGHT * (rate - self.bytes_per_s)
