"""The prefills of a simulated engine whose policy selects them at each iteration (``PrefillSelector``)."""

from __future__ import annotations

from heapq import heapify, heappush
from typing import Final

from sluice_core.records import RequestId
from sluice_core.scheduling.batching import EnginePolicy, PrefillSelector, RequestKind
from sluice_core.sim.cell import EngineSetup
from sluice_core.sim.engine.prefill_queue import PrefillQueue
from sluice_core.sim.engine.prefix_cache import PrefixCache
from sluice_core.sim.requests import SimRequest

_SELECTED: Final = int(RequestKind.STARTED_PREFILL)  # place of what is selected: behind recomputes and recoveries


class SelectedPrefills(PrefillQueue):
    """Prompts wait apart, and enter the queue's order while they are selected; mutable, changed by its engine only.

    What its base class sees in an iteration are requests to recompute, recoveries, and what is selected.

    Args:
        setup: What the engine is.
        policy: What an iteration may hold.
        selector: Whose prompts an iteration computes.
        cache: See ``PrefillQueue``.
        takes_by_chunk: See there.
    """

    __slots__ = ("_prompts", "_selector", "_started_prompts")

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
        selected = self._select(now, free_blocks, num_seats)
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
        return [*waiting, *self._prompts.values()], computing

    def check_idle(self) -> None:
        """See ``PrefillQueue.check_idle``."""
        super().check_idle()
        assert not self._prompts
        assert not self._started_prompts
        assert not self._selector.rank_started()

    def _select(self, now: float, free_blocks: int, num_seats: int) -> list[SimRequest]:
        """Find what runs: what is selected, or, when none of that finds blocks and a seat, what has started."""
        selected = self._selector.select(now, self.batch)
        if not selected:
            return []
        head = self._prompts.get(selected[0])
        if head is not None and not any(request_id in self._started_prompts for request_id in selected):
            blocks = -(-head.prefill_tokens // self._block_size)
            if blocks > free_blocks - self.deferred_blocks or len(self._started) >= num_seats:
                return [self._started_prompts[request_id] for request_id in self._selector.rank_started()]
        return [self._find(request_id) for request_id in selected]

    def _find(self, request_id: RequestId) -> SimRequest:
        request = self._prompts.get(request_id)
        return self._started_prompts[request_id] if request is None else request

    def _is_parked(self, request: SimRequest, selected: list[SimRequest]) -> bool:
        return request.request_id in self._started_prompts and request not in selected

    def _take_prompts(self) -> None:
        """Take new prompts out of the queue's order."""
        for entry in self._waiting:
            request = entry[3]
            if request.kind is RequestKind.NEW_PROMPT:
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

    def _compute(self, request: SimRequest, tokens: int) -> int:
        is_selected = request.request_id in self._prompts or request.request_id in self._started_prompts
        work2 = super()._compute(request, tokens)
        if not is_selected:
            return work2
        if request.num_computed_tokens == request.prefill_tokens:
            self._forget(request)
        else:
            self._prompts.pop(request.request_id, None)
            self._started_prompts[request.request_id] = request
            self._selector.advance(request.request_id, request.num_computed_tokens)
        return work2

    def _forget(self, request: SimRequest) -> None:
        self._prompts.pop(request.request_id, None)
        self._started_prompts.pop(request.request_id, None)
        self._selector.remove(request.request_id)

    def _return_new_prompts(self) -> None:
        """See ``PrefillQueue._return_new_prompts``: those that are not selected go back too."""
        in_order = {entry[3].request_id for entry in self._waiting}
        for request in self._prompts.values():
            if request.request_id not in in_order:
                heappush(self._waiting, (_SELECTED, request.arrival_s, request.index, request))
        super()._return_new_prompts()
        for request in self.returned:
            self._forget(request)
