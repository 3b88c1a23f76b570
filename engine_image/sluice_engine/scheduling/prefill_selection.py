"""Whose prompts the next iteration computes, where the batch policy selects them (``PrefillSelector``).

What has started and is not selected gets no room; it keeps its blocks and its place in vLLM's running list. What waits
and is selected stands at the front of vLLM's waiting heap, behind requests to recompute alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.latency import OnlineLatencyModel
from sluice_core.records import IterationShape
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_engine.request_tracker import PROMPT_KINDS

if TYPE_CHECKING:
    from sluice_core.records import RequestId
    from sluice_core.scheduling.engine_policy import EngineBatch, EnginePolicy
    from sluice_engine.core_messages import IterationReport
    from sluice_engine.request_tracker import RequestTracker, TrackedRequest
    from sluice_engine.scheduling.kv_usage import KvUsage


class PrefillSelection:
    """Asks the policy's selector, and keeps vLLM's waiting heap in its order.

    Args:
        tracker: The engine's requests, and the selector in force.
        kv_usage: The engine's KV blocks.
    """

    def __init__(self, tracker: RequestTracker, kv_usage: KvUsage) -> None:
        self._tracker = tracker
        self._kv_usage = kv_usage
        self._latency = OnlineLatencyModel()
        self._selected: list[RequestId] = []
        self._num_suspended = 0
        self._has_idled = False

    @property
    def num_suspended(self) -> int:
        """Times that prompts that had started made way for a more urgent one, since the start."""
        selector = self._tracker.selector
        return self._num_suspended + (0 if selector is None else selector.num_suspended)

    def adopt(self, policy: EnginePolicy) -> None:
        """Takes a new policy; ``place`` every request of the tracker while no heap holds it."""
        self._num_suspended = self.num_suspended
        self._selected = []
        self._tracker.adopt(policy, self._latency)

    def observe(self, report: IterationReport) -> None:
        """Learns how long iterations take, where that matters."""
        if self._tracker.selector is not None:
            shape = IterationShape(
                prefill_tokens=report.prefill_tokens,
                attention_work=report.attention_work,
                num_chunks=report.num_chunks,
                num_decodes=report.num_decodes,
                decode_context_tokens=report.decode_context_tokens,
            )
            self._latency.observe(shape, report.duration_s)

    def note_scheduled(self, num_tokens: int) -> None:
        """Notes how many tokens an iteration has."""
        self._has_idled = num_tokens == 0

    def renew(self, now_s: float, batch: EngineBatch, waiting: Any, *, has_seat: bool) -> None:
        """Selects for the next iteration.

        Args:
            now_s: Monotonic time.
            batch: What waits and runs.
            waiting: vLLM's queue of waiting requests.
            has_seat: A waiting request can get a seat.
        """
        selector = self._tracker.selector
        if selector is None:
            return
        selected = selector.select(now_s, batch)
        if selected and self._is_blocked(selected, waiting, batch.block_size_tokens, has_seat=has_seat):
            selected = selector.rank_started() or selected
        if selected != self._selected:
            self._place(selected, waiting)

    def hides(self, tracked: TrackedRequest) -> bool:
        """Says whether a request gets nothing of this iteration."""
        if self._tracker.selector is None or tracked.kind not in PROMPT_KINDS:
            return False
        return tracked.selected_place is None

    def _is_blocked(self, selected: list[RequestId], waiting: Any, block_size_tokens: int, *, has_seat: bool) -> bool:
        """Says whether nothing of what is selected can start, so that what has started must go on.

        That may hold the very blocks that are missing, for what is selected or for a request to recompute before it.
        vLLM may refuse what fits here: then an iteration was empty.
        """
        by_id = self._tracker.by_id
        if any(by_id[request_id].kind is RequestKind.STARTED_PREFILL for request_id in selected):
            return False
        num_tokens = by_id[selected[0]].request.num_tokens
        recomputed = self._tracker.peek_recomputed(waiting)
        if recomputed is not None:
            num_tokens = max(num_tokens, recomputed.num_tokens)
        num_blocks = blocks_for_tokens(num_tokens, block_size_tokens)
        return not has_seat or self._has_idled or num_blocks > self._kv_usage.measure().available

    def _place(self, selected: list[RequestId], waiting: Any) -> None:
        """Moves requests within vLLM's heap; one's place changes only while the heap does not hold it."""
        places = {request_id: place for place, request_id in enumerate(selected)}
        for request_id in {*self._selected, *selected}:
            tracked = self._tracker.by_id.get(request_id)
            if tracked is None or tracked.selected_place == places.get(request_id):
                continue
            if tracked.kind is RequestKind.NEW_PROMPT:
                waiting.remove_request(tracked.request)
            tracked.selected_place = places.get(request_id)
            if tracked.kind is RequestKind.NEW_PROMPT:
                self._tracker.place(tracked)
                waiting.add_request(tracked.request)
        self._selected = list(selected)
