"""The engine's load: sums that a router places requests by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sluice_core.scheduling.engine_policy import NONE_LATE, RequestKind
from sluice_engine.core_messages import SchedulerLoad

if TYPE_CHECKING:
    from sluice_core.kv_blocks import KvBlocks
    from sluice_core.scheduling.engine_policy import PhaseReport
    from sluice_engine.core_messages import ConfigureCommand, IterationReport
    from sluice_engine.kv_transfer.incoming_pulls import IncomingPulls
    from sluice_engine.kv_transfer.outgoing_hand_offs import OutgoingHandOffs
    from sluice_engine.request_tracker import RequestTracker


def measure_load(
    plan: ConfigureCommand,
    tracker: RequestTracker,
    kv: KvBlocks,
    *,
    pulls: IncomingPulls,
    hand_offs: OutgoingHandOffs,
    num_preemptions: int,
    num_suspended: int,
    now_s: float,
    phase: PhaseReport | None = None,
    num_phase_switches: int = 0,
    under_way: IterationReport | None = None,
) -> SchedulerLoad:
    """Reads the load after an iteration, or between two.

    Args:
        plan: Plan in force.
        tracker: The engine's requests.
        kv: KV blocks now.
        pulls: Requests on their way in.
        hand_offs: Requests on their way out.
        num_preemptions: Since the start.
        num_suspended: Prefills that made way, since the start.
        now_s: Monotonic time.
        phase: Where the engine is, with a policy that separates phases.
        num_phase_switches: Since the start.
        under_way: The iteration under way.
    """
    return SchedulerLoad(
        **_describe_queue(tracker, now_s),
        running_decodes=tracker.count(RequestKind.DECODE),
        # A decode that ends in the iteration in which it began was never in the sum.
        decode_context_tokens=max(0, tracker.decode_context_tokens),
        pulling_requests=tracker.count(RequestKind.JOINING),
        **_describe_blocks(kv),
        chunk_size_tokens=plan.chunk_size_tokens,
        is_draining=plan.is_draining,
        generation=plan.generation,
        pull_bytes_per_s=pulls.bytes_per_s,
        num_preemptions=num_preemptions,
        num_suspended_prefills=num_suspended,
        num_phase_switches=num_phase_switches,
        prefill_phase_s=0.0 if phase is None else phase.prefill_phase_s,
        saved_tpot_s=None if phase is None or phase.saved_tpot_s == math.inf else phase.saved_tpot_s,
        num_moved_in=pulls.num_moved_in,
        num_moved_out=hand_offs.num_moved_out,
        num_recomputed_pulls=pulls.num_recomputed,
        under_way=under_way,
    )


def _describe_blocks(kv: KvBlocks) -> dict[str, Any]:
    return {
        "kv_blocks_total": kv.total,
        "kv_blocks_used": kv.used,
        "kv_blocks_granted": kv.granted,
        "kv_blocks_pinned": kv.pinned,
    }


def _describe_queue(tracker: RequestTracker, now_s: float) -> dict[str, Any]:
    """Sums the prompts that wait or run, and those of them that go behind all others."""
    late = NONE_LATE if tracker.selector is None else tracker.selector.count_late(now_s)
    due = [] if tracker.selector is None else tracker.selector.list_due()
    return {
        "queued_prefill_tokens": tracker.queued_prefill_tokens,
        "queued_requests": tracker.num_queued,
        "queued_attention_work": tracker.queued_attention_work,
        "late_prefill_tokens": late.tokens,
        "late_requests": late.requests,
        "late_attention_work": late.attention_work,
        "due": [prefills._replace(due_s=prefills.due_s - now_s) for prefills in due],
    }
