"""The prefills of a simulated engine: prompts and recomputes that wait or run, and what of them an iteration computes.

A prompt's blocks and its seat are reserved when its first chunk is scheduled. The first prompt that does not fit keeps
those behind it waiting; prefills that have started always go on (simulation.md, sections 2.4 and 2.5).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from sluice_core.batching import BatchLimits, BatchPolicy, EngineBatch, RequestKind
from sluice_core.sim.prefix_cache import PrefixCache
from sluice_core.sim.requests import SimRequest
from sluice_core.sim.setup import EngineSetup

_Waiting = tuple[int, float, int, SimRequest]


class PrefillQueue:
    """Prefills of one engine; mutable, changed by its engine only.

    Args:
        setup: What the engine is.
        batching: What an iteration may hold.
        cache: The engine's blocks, with prefix reuse; None: without.

    Attributes:
        batch: What the batch policy sees; the engine keeps its settings up to date.
        num_queued: Prefills that are not complete.
        queued_tokens: Their tokens that are not computed.
        queued_work2: Twice their attention work: an integer.
        num_tokens: Tokens of the iteration under way.
        num_chunks: Chunks of it.
        reserved_blocks: Blocks that the last ``schedule`` reserved.
        completing: Prefills that the iteration under way completes.
        returned: Prompts that the last ``schedule`` gave back to the router.
        unseen_blocks: Blocks that became free after the iteration was decided on, where that is done ahead.
    """

    __slots__ = (
        "_batching",
        "_block_size",
        "_cache",
        "_started",
        "_unseen",
        "_waiting",
        "batch",
        "completing",
        "num_chunks",
        "num_queued",
        "num_tokens",
        "queued_tokens",
        "queued_work2",
        "reserved_blocks",
        "returned",
        "unseen_blocks",
    )

    def __init__(self, setup: EngineSetup, batching: BatchPolicy, cache: PrefixCache | None = None) -> None:
        self.batch = EngineBatch(
            chunk_size_tokens=setup.chunk_size_tokens,
            last_chunk_size_tokens=setup.chunk_size_tokens,
            max_batch_tokens=setup.max_batch_tokens,
            block_size_tokens=setup.block_size_tokens,
        )
        self.num_queued = 0
        self.queued_tokens = 0
        self.queued_work2 = 0
        self.num_tokens = 0
        self.num_chunks = 0
        self.reserved_blocks = 0
        self.completing: list[SimRequest] = []
        self.returned: list[SimRequest] = []
        self.unseen_blocks = 0
        self._batching = batching
        self._cache = cache
        self._block_size = setup.block_size_tokens
        self._waiting: list[_Waiting] = []
        self._started: list[SimRequest] = []
        self._unseen: list[_Waiting] = []

    def add(self, request: SimRequest, kind: RequestKind, *, is_unseen: bool = False) -> None:
        """Queue a prefill of all tokens that the request has so far.

        Args:
            request: The request.
            kind: Its class.
            is_unseen: It came after the next iteration was decided on: it waits for ``see``.
        """
        request.kind = kind
        request.num_computed_tokens = request.num_cached_tokens = 0
        request.prefill_tokens = tokens = request.prompt_tokens + request.generated_tokens
        first, second = self._batching.order_key(kind, request.arrival_s, request.priority)
        request.order = (first, second, request.index)
        entry = (first, second, request.index, request)
        if is_unseen:
            self._unseen.append(entry)
        else:
            heappush(self._waiting, entry)
        self.num_queued += 1
        self.queued_tokens += tokens
        self.queued_work2 += tokens * tokens
        self._count_kind(kind, 1)

    def schedule(self, now: float, num_decodes: int, num_seats: int, free_blocks: int) -> int:
        """Fill the prefill room in order.

        Args:
            now: Seconds of the simulated clock.
            num_decodes: Running decodes.
            num_seats: Most prefills that may run beside them.
            free_blocks: Blocks that may be reserved.

        Returns:
            Twice the attention work of the chunks.
        """
        self.batch.num_decodes = num_decodes
        limits = self._batching.limits(now, self.batch)
        if limits.returns_new_prompts and self.batch.num_new_prompts:
            self._return_new_prompts()
        room = limits.prefill_room_tokens
        if room <= 0:
            return 0
        started, self._started = self._started, []
        position, num_started = 0, len(started)
        may_admit = True
        work2 = 0
        while room > 0:
            request: SimRequest | None = started[position] if position < num_started else None
            if may_admit and self._waiting:
                head = self._waiting[0]
                if request is None or (head[0], head[1], head[2]) < request.order:
                    num_running = num_started - position + len(self._started) + len(self.completing)
                    may_admit = num_running < num_seats and self._admit(head[3], limits, free_blocks)
                    if not may_admit:
                        continue
                    heappop(self._waiting)
                    request = head[3]
                else:
                    position += 1
            elif request is None:
                break
            else:
                position += 1
            tokens = min(room, limits.max_tokens_per_prefill, request.prefill_tokens - request.num_computed_tokens)
            room -= tokens
            work2 += self._compute(request, tokens)
        if position < num_started:
            self._started += started[position:]
        if len(self._started) > 1:
            self._started.sort(key=_order_of)
        self.queued_work2 -= work2
        return work2

    def see(self) -> None:
        """From now on what came and became free since the last iteration began is scheduled."""
        self.unseen_blocks = 0
        for entry in self._unseen:
            heappush(self._waiting, entry)
        self._unseen.clear()

    def clear(self) -> tuple[list[SimRequest], list[SimRequest]]:
        """Give up everything: returns what waited and what had started."""
        return [entry[3] for entry in sorted(self._waiting + self._unseen)], self._started + self.completing

    def check_idle(self) -> None:
        """Assert that nothing is left, and that no sum has drifted."""
        assert not self._waiting
        assert not self._unseen
        assert not self._started
        assert not self.completing
        assert self.num_queued == self.queued_tokens == self.queued_work2 == 0

    def _count_kind(self, kind: RequestKind, by: int) -> None:
        batch = self.batch
        if kind is RequestKind.NEW_PROMPT:
            batch.num_new_prompts += by
        elif kind is RequestKind.STARTED_PREFILL:
            batch.num_started_prefills += by
        else:
            batch.num_recomputing += by

    def _compute(self, request: SimRequest, tokens: int) -> int:
        """Schedule a chunk; returns twice its attention work."""
        before = request.num_computed_tokens
        after = request.num_computed_tokens = before + tokens
        self.num_tokens += tokens
        self.num_chunks += 1
        self.queued_tokens -= tokens
        if self._cache is not None:
            assert request.table is not None
            self._cache.extend(request.table, after)
        if after == request.prefill_tokens:
            self.num_queued -= 1
            self._count_kind(request.kind, -1)
            self.completing.append(request)
        else:
            if request.kind is RequestKind.NEW_PROMPT:
                self._count_kind(RequestKind.NEW_PROMPT, -1)
                self._count_kind(RequestKind.STARTED_PREFILL, 1)
                request.kind = RequestKind.STARTED_PREFILL
                first, second = self._batching.order_key(request.kind, request.arrival_s, request.priority)
                request.order = (first, second, request.index)
            self._started.append(request)
        return after * after - before * before

    def _admit(self, request: SimRequest, limits: BatchLimits, free_blocks: int) -> bool:
        """Reserve the blocks of a whole prompt; False when there are not enough, or it may not run now."""
        if limits.hides(request.kind):
            return False
        blocks = -(-request.prefill_tokens // self._block_size)
        room = free_blocks - self.unseen_blocks - self.reserved_blocks
        if self._cache is None:
            if blocks > room:
                return False
            self.reserved_blocks += blocks
        elif not self._reuse(request, self._cache, blocks, room):
            return False
        request.num_blocks = blocks
        return True

    def _reuse(self, request: SimRequest, cache: PrefixCache, blocks: int, room: int) -> bool:
        """Reserve the blocks of a prompt that may have some of them in the cache; False when there are not enough."""
        index, prompt_tokens, hashes = request.index, request.prompt_tokens, request.block_hashes
        found = cache.look_up(index, prompt_tokens, hashes, request.prefill_tokens - 1)
        need = blocks - len(found) + cache.count_idle(found)
        if need > room:
            return False
        self.reserved_blocks += need
        tokens = len(found) * self._block_size
        request.table = cache.open(index, prompt_tokens, hashes, found)
        request.num_computed_tokens = request.num_cached_tokens = tokens
        self.queued_tokens -= tokens
        self.queued_work2 -= tokens * tokens
        if request.kind is RequestKind.NEW_PROMPT:
            cache.num_queried_tokens += prompt_tokens
            cache.num_hit_tokens += tokens
        return True

    def _return_new_prompts(self) -> None:
        """Give prompts back that have not started."""
        self.see()
        kept = [entry for entry in self._waiting if entry[3].kind is not RequestKind.NEW_PROMPT]
        returned = [entry for entry in self._waiting if entry[3].kind is RequestKind.NEW_PROMPT]
        heapify(kept)
        self._waiting = kept
        returned.sort()
        for entry in returned:
            request = entry[3]
            self.num_queued -= 1
            self.queued_tokens -= request.prefill_tokens
            self.queued_work2 -= request.prefill_tokens * request.prefill_tokens
            self._count_kind(RequestKind.NEW_PROMPT, -1)
            self.returned.append(request)


def _order_of(request: SimRequest) -> tuple[int, float, int]:
    return request.order
