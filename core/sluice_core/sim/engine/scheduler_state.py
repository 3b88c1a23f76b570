"""What the scheduler of a simulated engine decides on, shared by its iterations and by ``preemption``."""

from __future__ import annotations

from sluice_core.latency import LatencyModel, OnlineLatencyModel
from sluice_core.latency.scaled_latency_model import scale_latency
from sluice_core.records import EngineId
from sluice_core.scheduling.engine_policy import EnginePolicy, RequestKind
from sluice_core.sim.block_table import BlockTable
from sluice_core.sim.engine.decode_batch import DecodeBatch
from sluice_core.sim.engine.engine_counters import EngineCounters
from sluice_core.sim.engine.host_cache import HostCache
from sluice_core.sim.engine.host_prefills import HostPrefills
from sluice_core.sim.engine.prefill_queue import PrefillQueue
from sluice_core.sim.engine.prefix_cache import CacheChanges, PrefixCache
from sluice_core.sim.engine.selected_prefills import SelectedPrefills
from sluice_core.sim.requests import SimRequest
from sluice_core.sim.sim_setup import EngineSetup


class SchedulerState:
    """The queue, the decodes and the KV blocks of one engine; mutable, changed by the engine and by ``preemption``.

    KV accounting: ``used_blocks`` is what requests hold here, ``pinned_blocks`` the part whose transfer away is under
    way, ``granted_blocks`` what is reserved for transfers to here.

    Args:
        setup: What the engine is.
        policy: What an iteration may hold, and what should leave.
        changed: Where it puts its name when its load has changed since the last report.
        schedules_ahead: What an iteration may hold was decided when the one before it began: requests that came and
            blocks that became free since then are not in it.
        hash_block_tokens: See ``SimOptions``.

    Attributes:
        policy: As given.
        cache: Its blocks, with prefix reuse; None: without.
        host: Those of its host's memory; None: it has none.
        counters: What it has done.
        latency: How long it takes its iterations to take, as its policy and the routers know it.
        selector: Selects its prompts; None: its policy orders them by its key.
        prefills: Its prefills.
        batch: Its decodes.
        is_running: An iteration is under way.
        schedules_late: Nothing could be scheduled ahead.
        ending: Requests that ended while the next iteration was scheduled already, until it starts.
        joined: Decodes that have just joined or were left out, whose last token is not of the last iteration.
        is_reported: The load is as last reported.
        has_freed_blocks: Blocks became free since the simulation last checked.
        schedules_ahead: As given.
    """

    __slots__ = (
        "_changed",
        "batch",
        "cache",
        "counters",
        "ending",
        "engine_id",
        "granted_blocks",
        "has_freed_blocks",
        "host",
        "is_reported",
        "is_running",
        "joined",
        "latency",
        "pinned_blocks",
        "policy",
        "prefills",
        "schedules_ahead",
        "schedules_late",
        "selector",
        "setup",
        "total_blocks",
        "used_blocks",
    )

    def __init__(
        self,
        setup: EngineSetup,
        policy: EnginePolicy,
        changed: list[EngineId],
        *,
        schedules_ahead: bool,
        hash_block_tokens: int | None,
    ) -> None:
        self.setup = setup
        self.engine_id: EngineId = setup.engine_id
        self.policy = policy
        self.schedules_ahead = schedules_ahead
        self.counters = EngineCounters()
        self.cache: PrefixCache | None = None
        if hash_block_tokens is not None:
            self.cache = PrefixCache(setup.kv_blocks_total, setup.block_size_tokens, hash_block_tokens)
        # What the policy and the routers know of how long iterations take.
        self.latency: LatencyModel = (
            OnlineLatencyModel() if setup.learns_latency else scale_latency(setup.profile, setup.latency_factor)
        )
        self.selector = policy.make_selector(self.latency)
        self.host: HostCache | None = None
        self.prefills = self._make_prefills()
        self.batch = DecodeBatch(setup)
        if not schedules_ahead:
            self.batch.decodes.split_lead_tokens = 0  # a hand-off takes no time to prepare
        policy.bind(self.batch.decodes, self.latency)
        self.total_blocks = setup.kv_blocks_total
        self.used_blocks = 0
        self.pinned_blocks = 0
        self.granted_blocks = 0
        self.has_freed_blocks = False
        self.is_running = False
        self.schedules_late = False
        self.ending: list[SimRequest] = []
        self.joined: list[SimRequest] = []
        self._changed = changed
        self.is_reported = True
        self.note_change()

    def _make_prefills(self) -> PrefillQueue:
        """Make the queue, and the host's memory where there is one."""
        setup, policy, cache, selector = self.setup, self.policy, self.cache, self.selector
        if setup.host_kv_blocks is not None:
            if cache is None or selector is not None:
                raise ValueError(
                    f"engine {setup.engine_id!r} has KV in its host's memory: this needs prefix reuse, and a strategy "
                    "whose engines compute prompts in the order of the queue"
                )
            block_bytes = setup.kv_bytes_per_token * setup.block_size_tokens
            host = self.host = HostCache(setup.host_kv_blocks, block_bytes, setup.host_bytes_per_s)
            return HostPrefills(setup, policy, cache, host, takes_by_chunk=self.schedules_ahead)
        if selector is not None:
            return SelectedPrefills(setup, policy, selector, cache, takes_by_chunk=self.schedules_ahead)
        return PrefillQueue(setup, policy, cache, takes_by_chunk=self.schedules_ahead)

    @property
    def iteration(self) -> int:
        """Iterations so far."""
        return self.batch.iteration

    @property
    def decode_context_tokens(self) -> int:
        """Sum of the decodes' contexts."""
        return self.batch.context_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds or was promised."""
        return self.total_blocks - self.used_blocks - self.granted_blocks

    def count_schedulable_blocks(self) -> int:
        """Count the blocks that the next iteration may take."""
        return self.free_blocks - self.prefills.deferred_blocks

    def becomes_late(self, now: float) -> bool:
        """Say whether a prompt here may have become late since the last report, with time alone."""
        return self.selector is not None and self.selector.find_next_late_s() <= now

    def note_change(self) -> None:
        """Note that the load is no longer what was last reported."""
        if self.is_reported:
            self.is_reported = False
            self._changed.append(self.engine_id)

    def enqueue(self, request: SimRequest, kind: RequestKind) -> None:
        """Queue a prefill."""
        self.prefills.add(request, kind, is_deferred=self.schedules_ahead and self.is_running)
        self.note_change()

    def cache_filled_blocks(self, request: SimRequest) -> None:
        """Cache the blocks that a request has filled, with prefix reuse."""
        if self.cache is not None and request.table is not None:
            self.cache.cache_filled_blocks(request.table, request.num_kv_tokens)

    def take_cache_changes(self, *, with_host: bool) -> CacheChanges:
        """Return what of prompts entered and left its cache since the last call.

        Args:
            with_host: What is in its host's memory counts as cached.
        """
        cache, host = self.cache, self.host
        assert cache is not None
        changes = cache.take_changes()
        if host is None or not with_host:
            return changes
        host_changes = host.take_changes()
        changes.stored |= host_changes.stored
        changes.removed |= host_changes.removed
        changes.removed = {key for key in changes.removed if not cache.holds(key) and not host.holds(key)}
        changes.stored -= changes.removed
        return changes

    def ungrant(self, num_blocks: int) -> None:
        """Take granted blocks back."""
        self.granted_blocks -= num_blocks
        if self.prefills.freed is not None:
            self.prefills.freed.free(num_blocks, 0)

    def free_kv(self, num_blocks: int, num_kv_tokens: int, table: BlockTable | None) -> None:
        """Free the blocks of a request; with prefix reuse those that no other request refers to.

        Args:
            num_blocks: Blocks that it held.
            num_kv_tokens: Tokens in them.
            table: Their content, with prefix reuse.
        """
        prefills, num_cached = self.prefills, num_kv_tokens // self.setup.block_size_tokens
        if self.cache is not None and table is not None:
            num_blocks = self.cache.release(table)
            if self.host is not None:
                self.host.end_request(table.index)
        self.used_blocks -= num_blocks
        self.has_freed_blocks = True
        if self.schedules_ahead:
            prefills.deferred_blocks += num_blocks
            prefills.deferred_cached_blocks += num_cached
        elif prefills.freed is not None:
            prefills.freed.free(num_blocks, num_cached)
