"""The simulated cluster between events: its engines, its links, and what its router knows and holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappush
from typing import Final

from sluice_core.latency import LatencyModel
from sluice_core.records import EngineId, MoveCause, PrefillRequest, RequestId
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.sim.cell import Arrival, Cell, EngineSetup, NoGrant, TtftEnd
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.gap_histogram import GapHistogram
from sluice_core.sim.known_prefixes import KnownPrefixes
from sluice_core.sim.requests import RequestState, SimRequest, check_arrivals
from sluice_core.sim.timeline import Timeline

ASSIGN_INTERVAL_S: Final = 0.005  # the router asks its placement policy again at most this often

# Kinds of events.
ITERATION_END: Final = 0
TRANSFER_END: Final = 1
RETRY: Final = 2
CLUSTER_CHANGE: Final = 3
MOVE_STEP: Final = 4
GRANT_EXPIRY: Final = 5
INTERRUPT: Final = 6
Event = tuple[float, int, int, object]


class SimCluster:
    """Engines, links and the router's queue; mutable, changed by ``Simulation`` and ``SimHandOffs``.

    Args:
        cell: The cluster.
        arrivals: The requests, in the order of their arrival.
        timeline: Takes what happens; None: nothing is kept.

    Attributes:
        now: Seconds of the simulated clock.
        requests: All requests, by their position in ``arrivals``.
        engines: All engines that there ever were.
        gaps: Gaps between tokens.
        num_moves: Moves that began, by cause.
        num_blocked_moves: Proposals without a target.
        transfer_s: Time that requests spent in transfers, waits for a link included.
        table: The engines as policies see them.

    Raises:
        ValueError: Arrivals out of order, or an engine twice.
    """

    def __init__(self, cell: Cell, arrivals: Sequence[Arrival], timeline: Timeline | None = None) -> None:
        self.cell = cell
        self.now = 0.0
        self.requests = [SimRequest(index, arrival) for index, arrival in enumerate(arrivals)]
        self.engines: list[SimEngine] = []
        self.gaps = GapHistogram()
        self.num_moves: dict[MoveCause, int] = dict.fromkeys(MoveCause, 0)
        self.num_blocked_moves = 0
        self.transfer_s = 0.0
        check_arrivals(self.requests, cell.options.hash_block_tokens)
        rng = random.Random(cell.seed)  # noqa: S311 - breaks ties
        self._policy = cell.strategy.make_router(cell.parameters, rng, num_records=0)
        self._timeline = timeline
        self._profiles: dict[EngineId, LatencyModel] = {}
        self.table = EngineTable(self._profiles.__getitem__, counts_decodes=cell.options.counts_decodes)
        self._by_id: dict[EngineId, SimEngine] = {}
        self._heap: list[Event] = []
        self._num_events = 0
        self._changed: list[EngineId] = []
        self._keeps_kv = False
        self._held: dict[RequestId, PrefillRequest] = {}
        self._link_free_at_s: dict[str, float] = {}
        self._last_assign_s = -1.0
        self._is_retry_due = False
        self._prefixes: KnownPrefixes | None = None
        options = cell.options
        if options.prefix_report_s is not None:
            assert options.hash_block_tokens is not None
            self._prefixes = KnownPrefixes(options.prefix_report_s, options.hash_block_tokens)
        for setup in cell.engines:
            self._add_engine(setup)
        self._spread_chunk_sizes()

    def start_engine(self, engine: SimEngine) -> None:
        """Start an iteration if the engine idles and has work."""
        raise NotImplementedError

    def get_engine(self, engine_id: EngineId) -> SimEngine:
        """Return an engine that lives."""
        return self._by_id[engine_id]

    def push_grant_expiry(self, request: SimRequest, limit_s: float) -> None:
        """Let the wait of a request for a grant end after ``limit_s``."""
        self._push(self.now + limit_s, GRANT_EXPIRY, request)

    def begin_transfer(self, request: SimRequest, source: SimEngine, target: SimEngine, cause: MoveCause) -> None:
        """Reserve the target's blocks and send the KV; transfers of one link go one after the other."""
        target.reserve(request.num_blocks)
        request.state = RequestState.MOVING
        request.target = target.engine_id
        self.send(request, source, cause, None)

    def hold(self, request: SimRequest) -> None:
        """Keep a request at the router until it is placed."""
        request.state = RequestState.WAITING
        request.held_since_s = self.now
        request.target = request.table = None
        self._held[request.request_id] = request.describe_prefill()

    def recover(self, request: SimRequest) -> None:
        """Keep a request that has lost its engine until it is placed again."""
        self.hold(request)
        self._schedule_retry()

    def _schedule_retry(self) -> None:
        if not self._is_retry_due:
            self._is_retry_due = True
            self._push(max(self.now, self._last_assign_s + ASSIGN_INTERVAL_S), RETRY, None)

    def _push(self, at_s: float, code: int, what: object) -> None:
        self._num_events += 1
        heappush(self._heap, (at_s, self._num_events, code, what))

    def _report_loads(self) -> None:
        """Bring the engine table up to date."""
        if self._keeps_kv:
            # A queue that waits for kept KV does not get shorter while its engine idles.
            for idle in self._by_id.values():
                if idle.prefills.num_queued and not idle.is_running:
                    idle.note_change()
        for engine_id in self._changed:
            engine = self._by_id.get(engine_id)
            if engine is not None:  # it has not failed since
                self.table.report(engine_id, engine.report_load(self.now), self.now)
        self._changed.clear()

    def find_target(
        self, request_id: RequestId, cause: MoveCause, source: SimEngine, num_blocks: int
    ) -> SimEngine | None:
        """Ask the strategy where a request may go; None: it stays."""
        self._report_loads()
        flow_request = FlowRequest(
            request_id=request_id,
            cause=cause,
            source=source.engine_id,
            num_blocks=num_blocks,
            tpot_slo_s=self.requests[int(request_id)].tpot_slo_s,
        )
        target_id = self._policy.target(self.now, flow_request, self.table)
        return None if target_id is None else self._by_id[target_id]

    def send(self, request: SimRequest, source: SimEngine, cause: MoveCause, move: object | None) -> None:
        """Send the KV over the source's link; with a move, ``SimHandOffs.receive`` gets its arrival."""
        request.num_moves += 1
        self.num_moves[cause] += 1
        link = source.setup.link
        name = link.name or source.engine_id
        num_tokens = request.num_kv_tokens
        if self.cell.options.hash_block_tokens is not None:
            assert request.target is not None
            num_tokens -= self._by_id[request.target].begin_pull(request)
        num_bytes = num_tokens * source.setup.kv_bytes_per_token
        free_at_s = self._link_free_at_s.get(name, 0.0)
        self._link_free_at_s[name], arrives_at_s = link.speed.schedule(self.now, free_at_s, num_bytes)
        self.transfer_s += arrives_at_s - self.now
        if move is None:
            self._push(arrives_at_s, TRANSFER_END, request)
        else:
            self._push(arrives_at_s, MOVE_STEP, move)
        if self._timeline is not None:
            self._timeline.note_transfer(request, cause, self.now, arrives_at_s)

    def send_message(self, move: object, duration_s: float) -> None:
        """Send a message from one engine of a move to the other; ``SimHandOffs.receive`` gets it."""
        self._push(self.now + duration_s, MOVE_STEP, move)

    def _add_engine(self, setup: EngineSetup) -> None:
        if setup.engine_id in self._profiles:
            raise ValueError(f"engine {setup.engine_id!r} is there twice")
        joins_end_ttft = self.cell.options.ttft_end is TtftEnd.DECODE_JOIN
        engine = SimEngine(
            setup,
            self.cell.strategy.make_engine(self.cell.parameters, counts_decodes=self.cell.options.counts_decodes),
            self.gaps,
            self._changed,
            joins_end_ttft=joins_end_ttft,
            schedules_ahead=self.cell.options.schedules_ahead,
            hash_block_tokens=self.cell.options.hash_block_tokens,
        )
        self.engines.append(engine)
        if self._prefixes is not None:
            self._prefixes.add(setup.engine_id, setup.block_size_tokens)
            assert engine.cache is not None
            engine.cache.take_changes()
        self._by_id[setup.engine_id] = engine
        self._profiles[setup.engine_id] = setup.profile
        spec = EngineConfig(
            block_size_tokens=setup.block_size_tokens,
            kv_bytes_per_token=setup.kv_bytes_per_token,
            max_num_seqs=setup.max_num_seqs,
            max_batch_tokens=setup.max_batch_tokens,
        )
        self.table.add(setup.engine_id, spec, role=setup.role, chunk_size_tokens=setup.chunk_size_tokens)

    def _spread_chunk_sizes(self) -> None:
        """Tell every engine's policy the chunk sizes of the cluster."""
        chunk_sizes = {state.chunk_size_tokens for state in self.table if not state.is_draining}
        self._keeps_kv = False
        papers_wait = self.cell.options.schedules_ahead and self.cell.options.no_grant is NoGrant.WAIT
        for engine in self._by_id.values():
            engine.policy.observe_chunk_sizes(chunk_sizes)
            engine.hands_off_prefills = engine.policy.hands_off_prefills(engine.role) or (
                papers_wait and self._policy.moves_first_decode(engine.role, self.table)
            )
            self._keeps_kv = self._keeps_kv or engine.hands_off_prefills
