"""What an engine does with requests that come with their KV, and with those that leave: reserve, pull, pin, release."""

from __future__ import annotations

from sluice_core.records import EngineId, RequestId
from sluice_core.scheduling.engine_policy import EnginePolicy, RequestKind
from sluice_core.sim.block_table import BlockTable
from sluice_core.sim.engine.freed_blocks import FreedBlocks
from sluice_core.sim.engine.preemption import leave_decodes
from sluice_core.sim.engine.prefix_cache import PrefixCache
from sluice_core.sim.engine.scheduler_state import SchedulerState
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.sim_setup import EngineSetup


class MovingRequests(SchedulerState):
    """The part of ``SimEngine`` that moves requests; mutable.

    Args:
        setup: What the engine is.
        policy: See ``SchedulerState``.
        changed: See ``SchedulerState``.
        schedules_ahead: See ``SchedulerState``.
        hash_block_tokens: See ``SimOptions``.

    Attributes:
        num_incoming: Requests whose KV is on its way here, or waits to join.
        arrived: Requests that join at the next iteration boundary.
    """

    __slots__ = ("arrived", "num_incoming")

    def __init__(
        self,
        setup: EngineSetup,
        policy: EnginePolicy,
        changed: list[EngineId],
        *,
        schedules_ahead: bool,
        hash_block_tokens: int | None,
    ) -> None:
        super().__init__(setup, policy, changed, schedules_ahead=schedules_ahead, hash_block_tokens=hash_block_tokens)
        self.num_incoming = 0
        self.arrived: list[SimRequest] = []

    def reserve(self, num_blocks: int) -> None:
        """Grant blocks and a seat to a transfer to here."""
        self.num_incoming += 1
        self.reserve_more(num_blocks)

    def reserve_more(self, num_blocks: int) -> None:
        """Grant more blocks to a transfer that has some."""
        assert num_blocks <= self.free_blocks
        self.granted_blocks += num_blocks
        if self.prefills.freed is not None:
            self.prefills.freed.take(num_blocks)
        self.note_change()

    def cancel_grant(self, num_blocks: int) -> None:
        """Take the blocks and the seat of a transfer back."""
        self.ungrant(num_blocks)
        self.num_incoming -= 1
        self.note_change()

    def begin_pull(self, request: SimRequest) -> int:
        """Take the granted blocks, with prefix reuse, or refer to those that still are here of the request's tokens.

        Returns:
            Tokens that need not be moved.
        """
        cache = self.cache
        assert cache is not None
        index, prompt_tokens, hashes = request.index, request.prompt_tokens, request.block_hashes
        found = cache.find_cached_blocks(index, prompt_tokens, hashes, request.num_kv_tokens)
        self.granted_blocks -= len(found)
        self.used_blocks += cache.count_free(found)
        request.table = cache.open_table(index, prompt_tokens, hashes, found)
        cache.reserve(request.table, request.num_blocks)
        self.note_change()
        return len(found) * self.setup.block_size_tokens

    def receive(self, request: SimRequest) -> None:
        """Take a request over whose KV has arrived; it joins at the next iteration boundary."""
        num_moved = self._count_moved(request)
        self.granted_blocks -= num_moved
        self.used_blocks += num_moved
        self.cache_filled_blocks(request)
        self.arrived.append(request)
        self.note_change()

    def keep_room(self, request: SimRequest, num_blocks: int) -> None:
        """Grant blocks and a seat to a prompt whose beginning another engine computes; cached blocks are held."""
        self.reserve(num_blocks)
        request.part_blocks = num_blocks
        if self.cache is not None:
            table = request.part_table = self._hold_cached(self.cache, request, request.split_token)
            self.granted_blocks -= table.num_found
            request.sent_tokens = table.num_found * self.setup.block_size_tokens

    def give_up_room(self, request: SimRequest) -> None:
        """Take back what was kept for a prompt that was cut."""
        self.ungrant(self._open_room(request))
        self.num_incoming -= 1
        self.note_change()

    def take_part(self, request: SimRequest, num_tokens: int) -> None:
        """Go on with a prompt that was cut.

        Args:
            request: It.
            num_tokens: Tokens from its first one on whose KV has come.
        """
        block_size, cache, before = self.setup.block_size_tokens, self.cache, num_tokens
        self.ungrant(self._open_room(request))
        num_found = 0
        if cache is not None:
            table = request.table = self._hold_cached(cache, request, request.prompt_tokens - 1)
            num_found = table.num_found
            before = max(before, num_found * block_size)
            cache.extend(table, before)
            cache.num_queried_tokens += request.prompt_tokens - num_tokens
            cache.num_hit_tokens += before - num_tokens
        # As vLLM does it takes blocks by the chunk from now on; papers' engines have all of them at once.
        request.num_blocks = -(-(before if self.schedules_ahead else request.prompt_tokens) // block_size)
        self.used_blocks += request.num_blocks - num_found
        if self.prefills.freed is not None:
            self.prefills.freed.take(-(-before // block_size))
        self.num_incoming -= 1
        request.state = RequestState.QUEUED
        request.target = self.engine_id
        self.prefills.add_part(request, before)
        request.split_token = request.part_tokens = request.sent_tokens = request.part_move = 0
        self.note_change()

    def free_part(self, request: SimRequest) -> None:
        """Free the beginning of a prompt whose rest is computed here too: it may find it again."""
        num_blocks, num_tokens = request.num_blocks, request.part_tokens
        self.pinned_blocks -= num_blocks
        if self.cache is not None:
            self.free_kv(num_blocks, num_tokens, request.source_table)
        else:
            prefills, num_cached = self.prefills, num_tokens // self.setup.block_size_tokens
            if prefills.freed is None:
                prefills.freed = FreedBlocks(self.count_schedulable_blocks() + prefills.count_promised_blocks())
            self.used_blocks -= num_blocks
            self.has_freed_blocks = True
            if self.schedules_ahead:
                prefills.freed.expect(request.index)
                prefills.defer_part(request.index, num_blocks, num_cached)
            else:
                prefills.freed.free_preempted(request.index, num_blocks, num_cached)
        request.num_blocks = request.part_tokens = request.split_token = request.sent_tokens = 0
        request.source_table = None
        self.note_change()

    def _hold_cached(self, cache: PrefixCache, request: SimRequest, most_tokens: int) -> BlockTable:
        """Hold the cached blocks of a prompt's first tokens."""
        index, prompt_tokens, hashes = request.index, request.prompt_tokens, request.block_hashes
        found = cache.find_cached_blocks(index, prompt_tokens, hashes, most_tokens)
        self.used_blocks += cache.count_free(found)
        return cache.open_table(index, prompt_tokens, hashes, found)

    def _open_room(self, request: SimRequest) -> int:
        """Let go of cached blocks that were held for a prompt; returns those that are granted without content."""
        num_granted = request.part_blocks
        if request.part_table is not None:
            assert self.cache is not None
            num_granted -= request.part_table.num_found
            self.used_blocks -= self.cache.release(request.part_table)
        request.part_table = None
        request.part_blocks = 0
        return num_granted

    def recompute_arrival(self, request: SimRequest) -> None:
        """Take a request over whose KV will not arrive: it is recomputed here."""
        num_moved = self._count_moved(request)
        self.ungrant(num_moved)
        if self.cache is not None and request.table is not None:
            self.used_blocks += num_moved - self.cache.release(request.table)
            request.table = None
        self.num_incoming -= 1
        request.num_blocks = 0
        request.state = RequestState.QUEUED
        request.is_moved_in = True
        self.enqueue(request, RequestKind.RECOMPUTE)

    def hand_off(self, request_id: RequestId, now: float) -> SimRequest:
        """End a decode's part here and pin its KV until ``release``."""
        request = self.batch[request_id]
        leave_decodes(self, request, now)
        request.split_token = 0
        self.pinned_blocks += request.num_blocks
        self.cache_filled_blocks(request)
        request.source_table, request.table = request.table, None
        self.note_change()
        return request

    def count_blocks(self, request: SimRequest) -> int:
        """Count the blocks that a decode holds."""
        return -(-(self.count_tokens(request) - 1) // self.setup.block_size_tokens)

    def count_tokens(self, request: SimRequest) -> int:
        """Count the tokens of a decode, prompt and output."""
        return request.prompt_tokens + self.batch.iteration - request.start_iteration

    def count_running(self) -> int:
        """Count the requests that hold a seat: all decodes, and the prefills that have started or load."""
        num_loading = 0 if self.host is None else self.host.num_loads
        return len(self.batch.list_requests()) + len(self.prefills.list_started()) + num_loading

    def resume(self, request: SimRequest) -> None:
        """Take a request back that was handed off and has not left; it joins at the next iteration boundary."""
        self.pinned_blocks -= request.num_blocks
        request.table, request.source_table = request.source_table, None
        self.num_incoming += 1
        self.arrived.append(request)
        self.note_change()

    def release(self, num_blocks: int, num_kv_tokens: int, table: BlockTable | None) -> None:
        """Free the KV of a request that was handed off.

        Args:
            num_blocks: Blocks that it held.
            num_kv_tokens: Tokens in them.
            table: What they are, with prefix reuse.
        """
        self.pinned_blocks -= num_blocks
        self.free_kv(num_blocks, num_kv_tokens, table)
        self.note_change()

    def _count_moved(self, request: SimRequest) -> int:
        """Count the blocks of a request on its way here that were not here already."""
        return request.num_blocks - (0 if request.table is None else request.table.num_found)
