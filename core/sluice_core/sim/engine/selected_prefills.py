"""The prefills of a simulated engine whose policy selects them at each iteration (``PrefillSelector``)."""

from __future__ import annotations

from heapq import heapify, heappush
from typing import Final

from sluice_core.records import RequestId
from sluice_core.scheduling.engine_policy import EnginePolicy, PrefillSelector, RequestKind
from sluice_core.sim.engine.prefill_queue import PrefillQueue
from sluice_core.sim.engine.prefix_cache import PrefixCache
from sluice_core.sim.engine.suspended_batch import IterationRest, SuspendedBatch
from sluice_core.sim.requests import SimRequest
from sluice_core.sim.sim_setup import EngineSetup

_SELECTED: Final = int(RequestKind.STARTED_PREFILL)  # place of what is selected: behind recomputes and recoveries


class SelectedPrefills(PrefillQueue):
    """Prompts wait apart, and enter the queue's order while they are selected; mutable, changed by its engine only.

    What its base class sees in an iteration are requests to recompute, recoveries, and what is selected.

    Where an iteration may stop before its end (``EngineSetup.operators_per_iteration``), the selector hears of its
    chunks when it has ended, so that it can compare what runs with what comes.

    Args:
        setup: What the engine is.
        policy: What an iteration may hold.
        selector: Whose prompts an iteration computes.
        cache: See ``PrefillQueue``.
        takes_by_chunk: See there.
    """

    __slots__ = ("_chunks", "_may_stop", "_prompts", "_selector", "_started_prompts", "_suspended", "_work2")

    def __init__(
        self,
        setup: EngineSetup,
        policy: EnginePolicy,
        selector: PrefillSelector,
        cache: PrefixCache | None = None,
        *,
        takes_by_chunk: bool = False,
    ) -> None:
        super().__init__(setup, policy, cache, takes_by_chunk=takes_by_chunk)
        self._selector = selector
        self._may_stop = setup.operators_per_iteration > 0
        self._chunks: list[tuple[SimRequest, int]] = []  # of the iteration under way, with their tokens before it
        self._work2 = 0  # twice the attention work of these
        self._suspended: list[SuspendedBatch] = []
        self._prompts: dict[RequestId, SimRequest] = {}  # not started
        self._started_prompts: dict[RequestId, SimRequest] = {}

    def add(self, request: SimRequest, kind: RequestKind, *, is_deferred: bool = False) -> None:
        """See ``PrefillQueue.add``."""
        super().add(request, kind, is_deferred=is_deferred)
        if not is_deferred:
            self._take_prompts()

    def release_deferred(self) -> None:
        """See ``PrefillQueue.release_deferred``."""
        super().release_deferred()
        self._take_prompts()

    def schedule(self, now: float, num_decodes: int, num_seats: int, free_blocks: int) -> int:
        """See ``PrefillQueue.schedule``."""
        self.batch.num_decodes = num_decodes
        num_seats -= self._count_suspended()
        selected = self._select(now, free_blocks, num_seats)
        self.resumed = None
        if self._suspended:
            stopped = self._find_suspended(selected)
            if stopped is not None and (not self._waiting or self._is_first_blocked(free_blocks, num_seats)):
                return self._resume(stopped)
            selected = [request for request in selected if self._find_suspended([request]) is None]
        self._work2 = 0
        others = [request for request in self._started if self._is_parked(request, selected)]
        self._started = [request for request in self._started if not self._is_parked(request, selected)]
        for position, request in enumerate(selected):
            request.order = (_SELECTED, float(position), request.index)
            if request.request_id in self._prompts:
                heappush(self._waiting, (_SELECTED, float(position), request.index, request))
        self._started.sort(key=lambda request: request.order)
        work2 = super().schedule(now, num_decodes, num_seats - len(others), free_blocks)
        self._started += others
        self._waiting = [entry for entry in self._waiting if entry[3].request_id not in self._prompts]
        heapify(self._waiting)
        return work2

    def list_runnable(self, now: float, free_blocks: int) -> list[SimRequest]:
        """See ``PrefillQueue.list_runnable``."""
        selected = self._select(now, free_blocks, 1 << 30)
        kept = [request for request in self._started if not self._is_parked(request, selected)]
        places = {request.request_id: position for position, request in enumerate(selected)}
        return sorted(kept, key=lambda request: places.get(request.request_id, -1))

    def drop(self, request: SimRequest) -> None:
        """See ``PrefillQueue.drop``."""
        super().drop(request)
        self._forget(request)

    def clear(self) -> tuple[list[SimRequest], list[SimRequest]]:
        """See ``PrefillQueue.clear``."""
        waiting, computing = super().clear()
        computing += [request for stopped in self._suspended for request in stopped.completing]
        return [*waiting, *self._prompts.values()], computing

    def check_idle(self) -> None:
        """See ``PrefillQueue.check_idle``."""
        super().check_idle()
        assert not self._prompts
        assert not self._started_prompts
        assert not self._suspended
        assert not self._selector.rank_started()

    def _select(self, now: float, free_blocks: int, num_seats: int) -> list[SimRequest]:
        """Find what runs: what is selected, or, when none of that finds blocks and a seat, what has started.

        What has started may hold the very blocks for which a request to recompute waits, before all that is selected.
        """
        selected = self._selector.select(now, self.batch)
        if not selected:
            return []
        head = self._prompts.get(selected[0])
        if (
            head is not None
            and not self._has_started(selected)
            and (self._is_first_blocked(free_blocks, num_seats) or self._is_blocked(head, free_blocks, num_seats))
        ):
            return [self._started_prompts[request_id] for request_id in self._selector.rank_started()]
        return [self._find(request_id) for request_id in selected]

    def _has_started(self, selected: list[RequestId]) -> bool:
        """Say whether any of what is selected has started and can go on behind others; a stopped iteration cannot."""
        for request_id in selected:
            request = self._started_prompts.get(request_id)
            if request is not None and (not self._suspended or self._find_suspended([request]) is None):
                return True
        return False

    def _is_first_blocked(self, free_blocks: int, num_seats: int) -> bool:
        """Say whether a request waits before all that is selected, and is blocked."""
        return bool(self._waiting) and self._is_blocked(self._waiting[0][3], free_blocks, num_seats)

    def _is_blocked(self, request: SimRequest, free_blocks: int, num_seats: int) -> bool:
        """Say whether a request that waits finds too few blocks or no seat; then nobody behind it starts either."""
        blocks = -(-request.prefill_tokens // self._block_size)
        return blocks > free_blocks - self.deferred_blocks or len(self._started) >= num_seats

    def _find(self, request_id: RequestId) -> SimRequest:
        request = self._prompts.get(request_id)
        return self._started_prompts[request_id] if request is None else request

    def _is_parked(self, request: SimRequest, selected: list[SimRequest]) -> bool:
        return request.request_id in self._started_prompts and request not in selected

    def _take_prompts(self) -> None:
        """Take new prompts out of the queue's order."""
        for entry in self._waiting:
            request = entry[3]
            # Those that this iteration has selected stand there too.
            if request.kind is RequestKind.NEW_PROMPT and request.request_id not in self._prompts:
                self._prompts[request.request_id] = request
                self._selector.add(
                    request.request_id,
                    arrival_s=request.arrival_s,
                    ttft_slo_s=request.ttft_slo_s,
                    priority=request.priority,
                    tokens=request.prefill_tokens,
                )
        self._waiting = [entry for entry in self._waiting if entry[3].kind is not RequestKind.NEW_PROMPT]
        heapify(self._waiting)

    def end_batch(self, now: float) -> None:  # noqa: ARG002 - for an override
        """See ``PrefillQueue.end_batch``."""
        chunks, self._chunks = self._chunks, []
        for request, _ in chunks:
            self._note_computed(request)

    def is_overtaken(self, now: float, share: float) -> bool:
        """See ``PrefillQueue.is_overtaken``; an arrival is an event of Algorithm 2 (FlowPrefill, section 5.2)."""
        num_tokens = 0
        for request, before in self._chunks:
            tokens = request.num_computed_tokens - before
            num_tokens += tokens
            # As many tokens as are left take as long as what is left of the chunk.
            self._selector.advance(request.request_id, before + max(1, int(share * tokens)))
        if num_tokens == 0 or num_tokens != self.num_tokens:
            return False  # what is recomputed goes ahead of all
        selected = self._selector.select(now, self.batch)
        return bool(selected) and all(request.request_id != selected[0] for request, _ in self._chunks)

    def suspend(self, rest: IterationRest) -> None:
        """See ``PrefillQueue.suspend``."""
        stopped = SuspendedBatch(
            rest=rest,
            chunks=self._chunks,
            completing=self.completing,
            num_tokens=self.num_tokens,
            work2=self._work2,
            queued_tokens=int(rest.share * self.num_tokens),
            queued_work2=int(rest.share * self._work2),
        )
        self._suspended.append(stopped)
        self.num_queued += len(stopped.completing)
        self.queued_tokens += stopped.queued_tokens
        self.queued_work2 += stopped.queued_work2
        self._chunks, self.completing = [], []
        self.num_tokens = self.num_chunks = 0

    def count_suspended_tokens(self) -> int:
        """See ``PrefillQueue.count_suspended_tokens``."""
        return sum(stopped.num_tokens for stopped in self._suspended)

    def _resume(self, stopped: SuspendedBatch) -> int:
        """Go on with an iteration that has stopped; returns twice its attention work."""
        self._suspended.remove(stopped)
        self.num_queued -= len(stopped.completing)
        self.queued_tokens -= stopped.queued_tokens
        self.queued_work2 -= stopped.queued_work2
        self._chunks, self.completing, self._work2 = stopped.chunks, stopped.completing, stopped.work2
        self.num_tokens, self.num_chunks = stopped.num_tokens, len(stopped.chunks)
        self.resumed = stopped.rest
        return stopped.work2

    def _find_suspended(self, selected: list[SimRequest]) -> SuspendedBatch | None:
        """Find the stopped iteration of what is selected first."""
        for stopped in self._suspended:
            if selected and any(request is selected[0] for request, _ in stopped.chunks):
                return stopped
        return None

    def _count_suspended(self) -> int:
        """Count the prefills that hold a seat, although they are not among the started ones."""
        return sum(len(stopped.completing) for stopped in self._suspended) if self._suspended else 0

    def _compute(self, request: SimRequest, tokens: int) -> int:
        is_selected = request.request_id in self._prompts or request.request_id in self._started_prompts
        before = request.num_computed_tokens
        work2 = super()._compute(request, tokens)
        if not is_selected:
            return work2
        if self._may_stop:
            self._prompts.pop(request.request_id, None)
            self._started_prompts[request.request_id] = request
            self._chunks.append((request, before))
            self._work2 += work2
        else:
            self._note_computed(request)
        return work2

    def _note_computed(self, request: SimRequest) -> None:
        """Tell the selector of a chunk."""
        if request.num_computed_tokens == request.prefill_tokens:
            self._forget(request)
        else:
            self._prompts.pop(request.request_id, None)
            self._started_prompts[request.request_id] = request
            self._selector.advance(request.request_id, request.num_computed_tokens)

    def _forget(self, request: SimRequest) -> None:
        self._prompts.pop(request.request_id, None)
        self._started_prompts.pop(request.request_id, None)
        self._selector.remove(request.request_id)

    def _give_back_waiting(self) -> None:
        """See ``PrefillQueue._give_back_waiting``: those that are not selected go back too."""
        in_order = {entry[3].request_id for entry in self._waiting}
        for request in self._prompts.values():
            if request.request_id not in in_order:
                heappush(self._waiting, (_SELECTED, request.arrival_s, request.index, request))
        super()._give_back_waiting()
        for request in self.returned:
            self._forget(request)
