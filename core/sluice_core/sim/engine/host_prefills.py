"""The prefills of a simulated engine that loads what its host's memory has of a prompt, as vLLM does.

Source: vLLM 0.32, ``v1/core/sched/scheduler.py`` (``schedule``, ``_update_waiting_for_remote_kv``) and
``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` (``get_num_new_matched_tokens``):

- The host is asked for what follows the blocks that the engine finds in its own cache, when a prompt is at the head of
  the queue and a seat is free. One block is enough, and so is a whole prompt: then its last token is computed anew.
- The blocks for what is loaded are taken before the load begins. It begins only where the whole prompt fits beside
  what the prefills under way still need.
- The request waits for its load with its blocks, without a part in iterations. Those behind it go ahead.
- Its blocks are found by others when the load has ended. Until then whoever finds the same ones in the host waits.
- The iteration after the load's end has it, before new prompts. Where engines schedule ahead, that is the second one.

Unlike in vLLM, a request keeps its seat while it loads, and once it has loaded it may be preempted before its first
chunk.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import Final

from sluice_core.scheduling.engine_policy import BatchLimits, EnginePolicy, RequestKind
from sluice_core.sim.engine.host_cache import ASK_LATER, HostCache
from sluice_core.sim.engine.prefill_queue import PrefillQueue
from sluice_core.sim.engine.prefix_cache import PrefixCache
from sluice_core.sim.requests import SimRequest
from sluice_core.sim.sim_setup import EngineSetup

# What becomes of the head of the queue.
_STARTS: Final = 0
_IS_BLOCKED: Final = 1
_IS_SET_ASIDE: Final = 2


class HostPrefills(PrefillQueue):
    """Prefills of an engine with a ``HostCache``; mutable, changed by its engine only.

    Args:
        setup: What the engine is.
        policy: What an iteration may hold, and what should leave.
        cache: The engine's blocks.
        host: Those of its host.
        takes_by_chunk: See ``PrefillQueue``.
    """

    __slots__ = ("_delayed", "_gpu", "_host", "_loading", "_now", "_num_free_seats", "_was_delayed")

    def __init__(
        self,
        setup: EngineSetup,
        policy: EnginePolicy,
        cache: PrefixCache,
        host: HostCache,
        *,
        takes_by_chunk: bool = False,
    ) -> None:
        super().__init__(setup, policy, cache, takes_by_chunk=takes_by_chunk)
        self._gpu = cache
        self._host = host
        self._loading: deque[tuple[float, SimRequest, list[int]]] = deque()  # by the end of their loads
        self._delayed: list[tuple[int, float, int, SimRequest]] = []  # of this iteration
        self._was_delayed = False
        self._num_free_seats = 0
        self._now = 0.0

    def schedule(self, now: float, num_decodes: int, num_seats: int, free_blocks: int) -> int:
        """See ``PrefillQueue.schedule``."""
        self._now = now
        if not self._takes_by_chunk:
            self._take_loaded()
        self._num_free_seats = num_seats - len(self._started) - len(self._loading)
        work2 = super().schedule(now, num_decodes, num_seats - len(self._loading), free_blocks)
        self._was_delayed = bool(self._delayed)
        for entry in self._delayed:
            heappush(self._waiting, entry)
        self._delayed.clear()
        return work2

    def end_batch(self, now: float) -> None:
        """See ``PrefillQueue.end_batch``."""
        self._host.end_iteration(now)

    def release_deferred(self) -> None:
        """See ``PrefillQueue.release_deferred``: what has been loaded is scheduled from now on."""
        super().release_deferred()
        self._take_loaded()

    def find_wake_s(self, now: float) -> float:
        """Return when an idle engine has something to do that a copy keeps waiting; ``math.inf``: never."""
        self._host.end_iteration(now)
        wakes_at_s = self._loading[0][0] if self._loading else math.inf
        if self._was_delayed:
            wakes_at_s = min(wakes_at_s, self._host.find_next_store_end_s(math.inf))
        return wakes_at_s

    def count_blocks_to_come(self) -> int:
        """See ``PrefillQueue.count_blocks_to_come``."""
        num_blocks = super().count_blocks_to_come()
        for _, request, _ in self._loading:
            num_blocks += -(-request.prefill_tokens // self._block_size) - request.num_blocks
        return num_blocks

    def clear(self) -> tuple[list[SimRequest], list[SimRequest]]:
        """See ``PrefillQueue.clear``."""
        waiting, computing = super().clear()
        return waiting + [request for _, request, _ in self._loading], computing

    def check_idle(self) -> None:
        """See ``PrefillQueue.check_idle``."""
        super().check_idle()
        assert not self._loading
        assert not self._delayed

    def offer(self, request: SimRequest, num_tokens: int) -> None:
        """Offer the host what of a prompt's first tokens it was not offered yet."""
        first = self._host.count_offered(request.index)
        end = min(num_tokens, request.prompt_tokens) // self._block_size
        if end > first:
            keys = self._gpu.list_keys(request.index, request.prompt_tokens, request.block_hashes, first, end)
            self._host.offer(request.index, keys)

    def _take_loaded(self) -> None:
        """Let requests go on whose loads have ended."""
        self._host.settle(self._now)
        loading = self._loading
        if not loading or loading[0][0] > self._now:
            return
        while loading and loading[0][0] <= self._now:
            _, request, keys = loading.popleft()
            self._host.end_load(keys)
            assert request.table is not None
            self._gpu.cache_filled_blocks(request.table, request.table.num_blocks * self._block_size)
            request.batch_number = -1
            if request.kind is RequestKind.NEW_PROMPT:
                self._note_started(request)
            self._started.append(request)
        self._started.sort(key=_order_of)

    def _note_started(self, request: SimRequest) -> None:
        """Count a new prompt that has loaded as started: it has KV, so it runs where no new one may."""
        self._count_kind(RequestKind.NEW_PROMPT, -1)
        self._count_kind(RequestKind.STARTED_PREFILL, 1)
        if request.is_cut:
            self.begun.append(request)
        request.kind = RequestKind.STARTED_PREFILL
        first, second = self._policy.order_key(request.kind, request.arrival_s, request.priority)
        request.order = (first, second, request.index)

    def _admit(self, request: SimRequest, limits: BatchLimits, free_blocks: int) -> bool:
        """See ``PrefillQueue._admit``; heads of the queue that have to wait for a copy are passed over."""
        while self._num_free_seats > 0 and not limits.hides(request.kind):
            outcome = self._look_up(request, free_blocks)
            if outcome == _STARTS:
                is_admitted = super()._admit(request, limits, free_blocks)
                self._num_free_seats -= int(is_admitted)
                return is_admitted
            if outcome == _IS_BLOCKED or not self._waiting:
                return False
            request = self._waiting[0][3]
        return False

    def _look_up(self, request: SimRequest, free_blocks: int) -> int:
        """Look a prompt at the head of the queue up in the host, and begin the load of what is there."""
        cache, index, prompt_tokens, hashes = self._gpu, request.index, request.prompt_tokens, request.block_hashes
        found = cache.find_cached_blocks(index, prompt_tokens, hashes, request.prefill_tokens - 1)
        end = min(prompt_tokens, request.prefill_tokens) // self._block_size
        keys = cache.list_keys(index, prompt_tokens, hashes, len(found), min(len(found) + 1, end))
        if self._host.find(keys) == 0:
            return _STARTS  # most do: all keys of a prompt are many
        keys = cache.list_keys(index, prompt_tokens, hashes, len(found), end)
        num_in_host = self._host.find(keys)
        if num_in_host == ASK_LATER:
            self._delayed.append(heappop(self._waiting))
            return _IS_SET_ASIDE
        num_needed = -(-request.prefill_tokens // self._block_size) - len(found) + cache.count_free(found)
        room = free_blocks - self.deferred_blocks - self.reserved_blocks
        if num_needed + self.count_blocks_to_come() > room:
            return _IS_BLOCKED
        heappop(self._waiting)
        self._begin_load(request, found, keys[:num_in_host])
        return _IS_SET_ASIDE

    def _begin_load(self, request: SimRequest, found: list[int], keys: list[int]) -> None:
        """Take the blocks of a request that are found or loaded, and begin the load."""
        num_free_cached, num_blocks = self._gpu.count_free(found), len(found) + len(keys)
        self._reuse(request, self._gpu, found)
        assert request.table is not None
        self._gpu.reserve(request.table, num_blocks)
        request.num_blocks = num_blocks
        if not self._takes_by_chunk:
            request.num_blocks = -(-request.prefill_tokens // self._block_size)
        self.reserved_blocks += request.num_blocks - len(found) + num_free_cached
        before, after = request.num_computed_tokens, min(num_blocks * self._block_size, request.prefill_tokens - 1)
        request.num_computed_tokens = request.num_cached_tokens = after
        self.queued_tokens -= after - before
        self.queued_work2 -= after * after - before * before
        if request.kind is RequestKind.NEW_PROMPT:
            self._host.num_hit_tokens += after - before
        self._num_free_seats -= 1
        ends_at_s = self._host.begin_load(request.index, keys, num_blocks, self._now)
        self._loading.append((ends_at_s, request, keys))

    def _compute(self, request: SimRequest, tokens: int) -> int:
        """See ``PrefillQueue._compute``."""
        work2 = super()._compute(request, tokens)
        self.offer(request, request.num_computed_tokens)
        return work2


def _order_of(request: SimRequest) -> tuple[int, float, int]:
    return request.order
