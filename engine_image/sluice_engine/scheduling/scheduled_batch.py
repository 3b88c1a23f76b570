"""What a scheduled iteration computes, and what its requests become by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_core.records import IterationShape
from sluice_core.scheduling.engine_policy import RequestKind

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from sluice_engine.request_tracker import RequestTracker, TrackedRequest


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
        new_decodes: Those of them that are decodes after it.
    """

    started_s: float
    prefill_tokens: int = 0
    attention_work: float = 0.0
    num_chunks: int = 0
    num_decodes: int = 0
    decode_context_tokens: int = 0
    computing: list[TrackedRequest] = field(default_factory=list)
    new_decodes: list[TrackedRequest] = field(default_factory=list)

    def make_shape(self) -> IterationShape:
        """Makes what a latency model sees of it."""
        return IterationShape(
            prefill_tokens=self.prefill_tokens,
            attention_work=self.attention_work,
            num_chunks=self.num_chunks,
            num_decodes=self.num_decodes,
            decode_context_tokens=self.decode_context_tokens,
        )


def describe_batch(output: SchedulerOutput, tracker: RequestTracker, started_s: float) -> ScheduledBatch:
    """Sums up an iteration right after it was scheduled, when vLLM has counted its tokens as computed.

    Args:
        output: What was scheduled.
        tracker: The requests.
        started_s: When scheduling began.
    """
    batch = ScheduledBatch(started_s=started_s)
    by_id = tracker.by_id
    # A look-up of a member takes long.
    decode, joining = RequestKind.DECODE, RequestKind.JOINING
    num_decodes = context_tokens = 0
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        tracked = by_id[request_id]
        kind = tracked.kind
        num_computed_tokens = tracked.request.num_computed_tokens
        # One that joins may compute a tail of several tokens.
        if kind is decode or (kind is joining and num_tokens == 1):
            num_decodes += 1
            context_tokens += num_computed_tokens
            if kind is joining:
                batch.computing.append(tracked)
            continue
        batch.computing.append(tracked)
        batch.prefill_tokens += num_tokens
        batch.attention_work += num_tokens * (num_computed_tokens - num_tokens / 2)
        batch.num_chunks += 1
    batch.num_decodes = num_decodes
    batch.decode_context_tokens = context_tokens
    return batch


def settle_batch(batch: ScheduledBatch, tracker: RequestTracker) -> None:
    """Brings classes and sums up to date with a scheduled iteration, as vLLM does with its own records.

    Args:
        batch: The iteration; ``new_decodes`` is filled in.
        tracker: The requests.
    """
    if batch.num_decodes or not tracker.count(RequestKind.DECODE):
        tracker.decode_context_tokens = batch.decode_context_tokens  # else they stand still, and their contexts too
    for tracked in batch.computing:
        # vLLM has taken it out of the waiting heap, so that its fields may change.
        tracker.place_running(tracked)
        if not tracked.request.is_prefill_chunk:
            # Its last chunk: the next iteration decodes.
            batch.new_decodes.append(tracked)
            tracker.change_kind(tracked, RequestKind.DECODE)
        elif tracked.kind is RequestKind.NEW_PROMPT:
            tracker.change_kind(tracked, RequestKind.STARTED_PREFILL)
        else:
            tracker.note_progress(tracked)
