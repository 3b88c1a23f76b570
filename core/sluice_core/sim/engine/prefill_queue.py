"""The prefills of a simulated engine: prompts and recomputes that wait or run, and what of them an iteration computes.

A prompt is admitted when all its blocks and a seat are free. Either it reserves all blocks then, as in
papers' simulators, or, as in vLLM, it takes those of each chunk, and may find too few later (``preemption``). The first
prompt that does not fit keeps those behind it waiting.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from sluice_core.scheduling.batching.chunked_prefill import RECOMPUTE_TOKENS
from sluice_core.scheduling.engine_policy import BatchLimits, EngineBatch, EnginePolicy, RequestKind
from sluice_core.sim.engine.freed_blocks import FreedBlocks
from sluice_core.sim.engine.prefix_cache import PrefixCache
from sluice_core.sim.engine.suspended_batch import IterationRest
from sluice_core.sim.requests import SimRequest
from sluice_core.sim.sim_setup import EngineSetup

_Waiting = tuple[int, float, int, SimRequest]
_NO_LIMIT: Final = 1 << 30


class PrefillQueue:
    """Prefills of one engine; mutable, changed by its engine only.

    Args:
        setup: What the engine is.
        policy: What an iteration may hold, and what should leave.
        cache: The engine's blocks, with prefix reuse; None: without.
        takes_by_chunk: A prompt takes blocks chunk by chunk; False: it reserves them all at its first one.

    Attributes:
        batch: What the batch policy sees; the engine keeps its settings up to date.
        num_queued: Prefills that are not complete.
        queued_tokens: Their tokens that are not computed.
        queued_work2: Twice their attention work: an integer.
        num_tokens: Tokens of the iteration under way.
        num_chunks: Chunks of it.
        reserved_blocks: Blocks that the last ``schedule`` reserved, or took.
        may_admit: Prompts may start in this iteration.
        max_started: Prefills that have started and may go on in this iteration, the first ones.
        withheld_tokens: Room that one of the others was given in vain.
        completing: Prefills that the iteration under way completes.
        begun: Beginnings of prompts that were cut and that have got their first chunk, until somebody takes them.
        returned: Prompts that the last ``schedule`` gave back to the router.
        deferred_blocks: Blocks that became free after the iteration was decided on, where that is done ahead.
        deferred_cached_blocks: Those of them that are full.
        resumed: What is left of a stopped iteration that the last ``schedule`` goes on with; None: it began a new one.
        freed: What preempted requests that wait here find again, without prefix reuse; None: nobody does.
    """

    __slots__ = (
        "_batch_number",
        "_block_size",
        "_cache",
        "_deferred",
        "_deferred_parts",
        "_policy",
        "_started",
        "_takes_by_chunk",
        "_waiting",
        "batch",
        "begun",
        "completing",
        "deferred_blocks",
        "deferred_cached_blocks",
        "freed",
        "max_started",
        "may_admit",
        "num_chunks",
        "num_queued",
        "num_tokens",
        "queued_tokens",
        "queued_work2",
        "reserved_blocks",
        "resumed",
        "returned",
        "withheld_tokens",
    )

    def __init__(
        self,
        setup: EngineSetup,
        policy: EnginePolicy,
        cache: PrefixCache | None = None,
        *,
        takes_by_chunk: bool = False,
    ) -> None:
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
        self.begun: list[SimRequest] = []
        self.returned: list[SimRequest] = []
        self.deferred_blocks = 0
        self.deferred_cached_blocks = 0
        self.resumed: IterationRest | None = None
        self.freed: FreedBlocks | None = None
        self._policy = policy
        self._cache = cache
        self._block_size = setup.block_size_tokens
        self._waiting: list[_Waiting] = []
        self._started: list[SimRequest] = []
        self._deferred: list[_Waiting] = []
        self._deferred_parts: list[tuple[int, int, int]] = []
        self._takes_by_chunk = takes_by_chunk
        self._batch_number = 0
        self.may_admit = True
        self.max_started = _NO_LIMIT
        self.withheld_tokens = 0

    def add(self, request: SimRequest, kind: RequestKind, *, is_deferred: bool = False) -> None:
        """Queue a prefill of all tokens that the request has so far.

        Args:
            request: The request.
            kind: Its class.
            is_deferred: It came after the next iteration was decided on: it waits for ``release_deferred``.
        """
        request.kind = kind
        request.num_computed_tokens = request.num_cached_tokens = 0
        tokens = request.prompt_tokens + request.generated_tokens
        if request.is_cut:
            tokens = request.split_token
        request.prefill_tokens = tokens
        first, second = self._policy.order_key(kind, request.arrival_s, request.priority)
        request.order = (first, second, request.index)
        entry = (first, second, request.index, request)
        if is_deferred:
            self._deferred.append(entry)
        else:
            heappush(self._waiting, entry)
        self.num_queued += 1
        self.queued_tokens += tokens
        self.queued_work2 += tokens * tokens
        self._count_kind(kind, 1)

    def add_part(self, request: SimRequest, before: int) -> None:
        """Go on with a prompt that was cut, with the KV of its first ``before`` tokens."""
        self.lift_preemption_limits()  # those of an iteration in which no prefill was there to be limited
        request.kind = RequestKind.STARTED_PREFILL
        request.batch_number = -1  # that of the first engine says nothing of batches here
        request.num_computed_tokens = request.num_cached_tokens = before
        request.prefill_tokens = tokens = request.prompt_tokens
        first, second = self._policy.order_key(request.kind, request.arrival_s, request.priority)
        request.order = (first, second, request.index)
        self._started.append(request)
        self._started.sort(key=_order_of)
        self.num_queued += 1
        self.queued_tokens += tokens - before
        self.queued_work2 += tokens * tokens - before * before
        self._count_kind(request.kind, 1)

    def schedule(self, now: float, num_decodes: int, num_seats: int, free_blocks: int) -> int:
        """Fill the prefill budget in order.

        Args:
            now: Seconds of the simulated clock.
            num_decodes: Decodes that the prefill budget is beside.
            num_seats: Most prefills that may run beside them.
            free_blocks: Blocks that may be reserved.

        Returns:
            Twice the attention work of the chunks.
        """
        limits = self._begin_batch(now, num_decodes)
        room = limits.prefill_budget_tokens - self.withheld_tokens
        started, self._started = self._started, []
        position, num_started = 0, min(len(started), self.max_started)
        may_admit = self.may_admit
        cuts_prompts = limits.saturation_tokens == 0
        work2 = 0
        while room > 0 and (
            cuts_prompts or self._has_place_for_next(started[position:num_started], room, limits, may_admit=may_admit)
        ):
            request: SimRequest | None = started[position] if position < num_started else None
            if may_admit and self._waiting:
                head = self._waiting[0]
                if request is None or (head[0], head[1], head[2]) < request.order:
                    num_running = len(started) - position + len(self._started) + len(self.completing)
                    may_admit = num_running < num_seats and self._admit(head[3], limits, free_blocks)
                    if not may_admit:
                        continue
                    request = heappop(self._waiting)[3]
                else:
                    position += 1
            elif request is None:
                break
            else:
                position += 1
            tokens = self._choose_chunk(request, room, limits, free_blocks)
            if not tokens:
                self._started.append(request)
                continue
            room -= limits.count_room(tokens, request.num_computed_tokens) if limits.room_per_work else tokens
            work2 += self._compute(request, tokens)
        if position < len(started):
            self._started += started[position:]
        if len(self._started) > 1:
            self._started.sort(key=_order_of)
        self.queued_work2 -= work2
        return work2

    def _begin_batch(self, now: float, num_decodes: int) -> BatchLimits:
        """Begin an iteration: find its limits, and give new prompts back where it has no place for them."""
        self._batch_number += 1
        limits = self.find_limits(now, num_decodes)
        if limits.returns_new_prompts and self.batch.num_new_prompts:
            self._return_new_prompts()
        return limits

    def _has_place_for_next(
        self, started: list[SimRequest], room: int, limits: BatchLimits, *, may_admit: bool
    ) -> bool:
        """Say whether the next prefill, the first that waits or has started, still fits into the iteration.

        Args:
            started: Those that have started, the first ones done.
            room: What is left of the prefill budget.
            limits: Limits of the iteration.
            may_admit: One that waits may start.
        """
        request = started[0] if started else None
        if may_admit and self._waiting:
            head = self._waiting[0]
            if request is None or (head[0], head[1], head[2]) < request.order:
                request = head[3]
        if request is None:
            return True
        num_left = request.prefill_tokens - request.num_computed_tokens
        return limits.has_place_for(num_left, room + self.withheld_tokens)

    def _choose_chunk(self, request: SimRequest, room: int, limits: BatchLimits, free_blocks: int) -> int:
        """Choose the tokens of a chunk; 0 when there is no block for any."""
        tokens = min(room, limits.max_tokens_per_prefill, request.prefill_tokens - request.num_computed_tokens)
        if limits.room_per_work:
            tokens = min(tokens, limits.fit_chunk(room, request.num_computed_tokens, self._block_size))
        if self._takes_by_chunk:
            num_free = free_blocks - self.deferred_blocks - self.reserved_blocks
            if self.count_chunk_blocks(request, tokens) > num_free:
                # Rare: who was admitted a moment ago has taken what this one would have needed.
                tokens = max(0, (request.num_blocks + num_free) * self._block_size - request.num_computed_tokens)
        return tokens

    def find_limits(self, now: float, num_decodes: int) -> BatchLimits:
        """Ask the batch policy what an iteration may hold."""
        self.batch.num_decodes = num_decodes
        return self._policy.limits(now, self.batch)

    def end_batch(self, now: float) -> None:
        """Take note that the iteration under way has ended."""

    def is_overtaken(self, now: float, share: float) -> bool:  # noqa: ARG002 - for overrides
        """Say whether something more urgent than the iteration under way has come, for which it may stop.

        Args:
            now: Seconds of the simulated clock.
            share: Share of the iteration that is done.
        """
        return False

    def suspend(self, rest: IterationRest) -> None:
        """Keep the iteration under way, which has stopped, until it goes on."""
        raise NotImplementedError

    def count_suspended_tokens(self) -> int:
        """Count the tokens of iterations that have stopped and not ended."""
        return 0

    def list_started(self) -> list[SimRequest]:
        """List the prefills that have started, in the order in which they are served."""
        return list(self._started)

    def list_runnable(self, now: float, free_blocks: int) -> list[SimRequest]:  # noqa: ARG002 - for overrides
        """List those of them that the next iteration may compute, in the order in which they are served.

        Args:
            now: Seconds of the simulated clock.
            free_blocks: Blocks that may be taken.
        """
        return list(self._started)

    def may_run_short(self, free_blocks: int) -> bool:
        """Say whether prefills that have started may find too few blocks for their next chunks."""
        most = max(self.batch.chunk_size_tokens, self.batch.last_chunk_size_tokens, RECOMPUTE_TOKENS)
        return bool(self._started) and free_blocks < most // self._block_size + len(self._started) + 1

    def count_chunk_blocks(self, request: SimRequest, tokens: int) -> int:
        """Count the blocks that a chunk of a prefill takes."""
        before = request.num_computed_tokens
        return -(-(before + tokens) // self._block_size) - -(-before // self._block_size)

    def was_in_last_batch(self, request: SimRequest) -> bool:
        """Say whether the last ``schedule`` gave a prefill a chunk."""
        return request.batch_number == self._batch_number

    def undo_batch(self) -> None:
        """Forget the last ``schedule``, which gave nobody a chunk."""
        self._batch_number -= 1

    def drop(self, request: SimRequest) -> None:
        """Take a prefill out that has started."""
        self._started.remove(request)
        before, tokens = request.num_computed_tokens, request.prefill_tokens
        self.num_queued -= 1
        self.queued_tokens -= tokens - before
        self.queued_work2 -= tokens * tokens - before * before
        self._count_kind(request.kind, -1)

    def lift_preemption_limits(self) -> None:
        """Forget what ``preemption`` has forbidden for an iteration."""
        self.may_admit = True
        self.max_started = _NO_LIMIT
        self.withheld_tokens = 0

    def release_deferred(self) -> None:
        """From now on what came and became free since the last iteration began is scheduled."""
        if self.freed is not None:
            for index, num_blocks, num_cached in self._deferred_parts:
                self.freed.free_preempted(index, num_blocks, num_cached)
                self.deferred_blocks -= num_blocks
            self.freed.free(self.deferred_blocks, self.deferred_cached_blocks)
            assert not self.freed.num_overdrawn, "more blocks were taken than are free"
        self.deferred_blocks = self.deferred_cached_blocks = 0
        self._deferred_parts.clear()
        for entry in self._deferred:
            heappush(self._waiting, entry)
        self._deferred.clear()

    def defer_part(self, index: int, num_blocks: int, num_cached: int) -> None:
        """Free the blocks of a beginning in ``release_deferred``; its request finds them (``FreedBlocks``)."""
        self.deferred_blocks += num_blocks
        self._deferred_parts.append((index, num_blocks, num_cached))

    def count_promised_blocks(self) -> int:
        """Count the blocks that started prefills have reserved and not taken."""
        num_promised = 0
        for request in self._started:
            num_promised += request.num_blocks - -(-request.num_computed_tokens // self._block_size)
        return num_promised

    def count_blocks_to_come(self) -> int:
        """Count the blocks that started prefills still need, where they take them by the chunk."""
        num_blocks = 0
        for request in self._started:
            num_blocks += -(-request.prefill_tokens // self._block_size) - request.num_blocks
        return num_blocks

    def has_waiting_recompute(self) -> bool:
        """Say whether a preempted request waits for blocks."""
        return any(entry[3].kind is RequestKind.RECOMPUTE for entry in self._waiting + self._deferred)

    def clear(self) -> tuple[list[SimRequest], list[SimRequest]]:
        """Give up everything: returns what waited and what had started."""
        return [entry[3] for entry in sorted(self._waiting + self._deferred)], self._started + self.completing

    def check_idle(self) -> None:
        """Assert that nothing is left, and that no sum has drifted."""
        assert not self._waiting
        assert not self._deferred
        assert not self._started
        assert not self.completing
        assert self.num_queued == self.queued_tokens == self.queued_work2 == 0
        assert self.batch.num_new_prompts == self.batch.num_started_prefills == self.batch.num_recomputing == 0
        assert self.freed is None

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
        if self._takes_by_chunk or self.freed is not None:
            self._take_chunk(request, self.count_chunk_blocks(request, tokens))
        before = request.num_computed_tokens
        after = request.num_computed_tokens = before + tokens
        self.num_tokens += tokens
        self.num_chunks += 1
        self.queued_tokens -= tokens
        if request.split_token and request.is_cut and request.kind is RequestKind.NEW_PROMPT:
            self.begun.append(request)
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
                first, second = self._policy.order_key(request.kind, request.arrival_s, request.priority)
                request.order = (first, second, request.index)
            self._started.append(request)
        return after * after - before * before

    def _admit(self, request: SimRequest, limits: BatchLimits, free_blocks: int) -> bool:
        """Let a prompt start; False when there are not enough blocks for all of it, or it may not run now."""
        if limits.hides(request.kind):
            return False
        blocks = -(-request.prefill_tokens // self._block_size)
        room = free_blocks - self.deferred_blocks - self.reserved_blocks
        if self._cache is None:
            if blocks > room:
                return False
            num_found = num_free_cached = self._reclaim_freed(request)
        else:
            index, prompt_tokens, hashes = request.index, request.prompt_tokens, request.block_hashes
            found = self._cache.find_cached_blocks(index, prompt_tokens, hashes, request.prefill_tokens - 1)
            num_found, num_free_cached = len(found), self._cache.count_free(found)
            if blocks - num_found + num_free_cached > room:
                return False
            self._reuse(request, self._cache, found)
        # Found blocks that nobody refers to are taken from among the free ones.
        request.num_blocks = num_found if self._takes_by_chunk else blocks
        self.reserved_blocks += request.num_blocks - num_found + num_free_cached
        return True

    def _reuse(self, request: SimRequest, cache: PrefixCache, found: list[int]) -> None:
        """Begin a prompt with the blocks that the cache has of it."""
        request.table = cache.open_table(request.index, request.prompt_tokens, request.block_hashes, found)
        tokens = self._skip(request, len(found))
        if request.kind is RequestKind.NEW_PROMPT:
            cache.num_queried_tokens += request.prefill_tokens
            cache.num_hit_tokens += tokens

    def _reclaim_freed(self, request: SimRequest) -> int:
        """Begin a prefill with what is left of the blocks that it was preempted from; returns how many these are."""
        if self.freed is None:
            return 0
        num_found = self.freed.reclaim(request.index)
        if num_found:
            self._skip(request, num_found)
        if not self.freed.is_needed:
            self.freed = None
        return num_found

    def _take_chunk(self, request: SimRequest, num_blocks: int) -> None:
        """Take the blocks of a chunk."""
        if self._takes_by_chunk:
            request.batch_number = self._batch_number
            self.reserved_blocks += num_blocks
            request.num_blocks += num_blocks
        if self.freed is not None:
            self.freed.take(num_blocks)

    def _skip(self, request: SimRequest, num_found: int) -> int:
        """Count the tokens of found blocks as computed; returns them."""
        tokens = num_found * self._block_size
        request.num_computed_tokens = request.num_cached_tokens = tokens
        self.queued_tokens -= tokens
        self.queued_work2 -= tokens * tokens
        return tokens

    def _return_new_prompts(self) -> None:
        """Give prompts back that have not started."""
        self.release_deferred()
        self._give_back_waiting()

    def _give_back_waiting(self) -> None:
        """Give back all new prompts that wait."""
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
            if self.freed is not None:
                self.freed.forget(request.index)
                if not self.freed.is_needed:
                    self.freed = None


def _order_of(request: SimRequest) -> tuple[int, float, int]:
    return request.order
