"""The simulated cluster between events: its engines, and what its routers know and hold."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from heapq import heappush
from typing import Final

from sluice_core.records import EngineId, MoveCause
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.prefill_feasibility import record_prefill
from sluice_core.scheduling.splitting.predicted_output_lengths import KnownLengths, NoisyLengths, OutputLengths
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.engine.gap_histogram import GapHistogram
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.known_prefixes import KnownPrefixes
from sluice_core.sim.links import SimLinks
from sluice_core.sim.requests import RequestState, SimRequest, check_arrivals
from sluice_core.sim.routers import SimRouter, SimRouters
from sluice_core.sim.sim_setup import Arrival, Cell, EngineSetup, LengthsKnown, NoGrant, TtftEnd

ASSIGN_INTERVAL_S: Final = 0.005  # the router asks its placement policy again at most this often
TICK_S: Final = 0.05  # and so often where nothing happens any more, as the product's router does

# Kinds of events.
ITERATION_END: Final = 0
TRANSFER_END: Final = 1
RETRY: Final = 2
CLUSTER_CHANGE: Final = 3
MOVE_STEP: Final = 4
GRANT_EXPIRY: Final = 5
STEER: Final = 6
INTERRUPT: Final = 7
LOAD_END: Final = 8
Event = tuple[float, int, int, object]


class SimCluster:
    """Engines, links and the routers' queues; mutable, changed by ``Simulation`` and ``SimHandOffs``.

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
        num_cut: Prompts that were cut and that the second engine went on with.
        num_whole: Prompts that were to be cut and for which the second engine had no room.
        links: Its links.
        routers: The routers.

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
        self.num_cut = self.num_whole = 0
        self.links = SimLinks()
        check_arrivals(self.requests, cell.options.hash_block_tokens)
        self.routers = SimRouters(cell, len(self.requests))
        self._report_s = cell.options.report_s
        self._timeline = timeline
        self._by_id: dict[EngineId, SimEngine] = {}
        self._known_ids: set[EngineId] = set()
        self._heap: list[Event] = []
        self._num_events = 0
        self._changed: list[EngineId] = []
        self._num_late_grants = 0
        self._prefixes: KnownPrefixes | None = None
        options = cell.options
        if options.prefix_report_s is not None:
            assert options.hash_block_tokens is not None
            self._prefixes = KnownPrefixes(options.prefix_report_s, options.hash_block_tokens)
        if options.output_lengths is not LengthsKnown.LEARNED:
            for router in self.routers.routers:
                router.policy.use_lengths(self._make_lengths())
        for setup in cell.engines:
            self._add_engine(setup)
        self._spread_chunk_sizes()

    def _make_lengths(self) -> OutputLengths:
        """Make what tells the router how long outputs will be."""
        options = self.cell.options
        known = KnownLengths({request.request_id: request.output_tokens for request in self.requests})
        if options.output_lengths is LengthsKnown.EXACT:
            return known
        rng = random.Random(self.cell.seed)  # noqa: S311 - draws errors
        return NoisyLengths(known, options.length_deviation_tokens, rng)

    @property
    def table(self) -> EngineTable:
        """The engines as the first router sees them."""
        return self.routers.first.table

    def start_engine(self, engine: SimEngine) -> None:
        """Start an iteration if the engine idles and has work."""
        raise NotImplementedError

    def get_engine(self, engine_id: EngineId) -> SimEngine:
        """Return an engine that lives."""
        return self._by_id[engine_id]

    def list_engines(self) -> list[SimEngine]:
        """List the engines that live, draining ones included, in the order in which they joined."""
        return list(self._by_id.values())

    @property
    def num_held(self) -> int:
        """Requests that wait at the router."""
        return sum(len(router.held) for router in self.routers.routers)

    def push_grant_expiry(self, request: SimRequest, limit_s: float) -> None:
        """Let the wait of a request for a grant end after ``limit_s``."""
        self._push(self.now + limit_s, GRANT_EXPIRY, request)

    def begin_transfer(self, request: SimRequest, source: SimEngine, target: SimEngine, cause: MoveCause) -> None:
        """Reserve the target's blocks and send the KV; transfers of one link go one after the other."""
        target.reserve(request.num_blocks)
        self.note_grant(request, target, request.num_blocks)
        request.state = RequestState.MOVING
        request.target = target.engine_id
        self.send(request, source, cause, None)

    def note_grant(self, request: SimRequest, target: SimEngine, num_blocks: int) -> None:
        """Let a router count what it has got at once, until a report can have it."""
        if self._report_s:
            self._num_late_grants += 1
            self.note_grant_request(request, target, -self._num_late_grants, num_blocks)
            self.note_grant_answer(request, target, -self._num_late_grants)

    def note_grant_request(self, request: SimRequest, target: SimEngine, grant_id: int, num_blocks: int) -> None:
        """Let a request's router count blocks that it asks a target for."""
        router = self.routers.of_request(request.index)
        router.table.record_grant_request(target.engine_id, grant_id, num_blocks)

    def note_grant_answer(self, request: SimRequest, target: SimEngine, grant_id: int) -> None:
        """Tell a request's router that a target has answered."""
        router = self.routers.of_request(request.index)
        if self._report_s:
            router.send_grant_answer(target.engine_id, grant_id, self.now + self._report_s)
        else:
            router.table.record_grant_answer(target.engine_id, grant_id)

    def hold(self, request: SimRequest) -> None:
        """Keep a request at its router until it is placed."""
        request.state = RequestState.WAITING
        request.held_since_s = self.now
        if request.part_blocks:
            self.take_room_back(request)
        request.target = request.table = request.planned_target = None
        request.num_blocks = 0
        request.split_token = request.part_tokens = request.sent_tokens = request.part_move = 0
        self.routers.of_request(request.index).held[request.request_id] = request.describe_prefill()

    def take_room_back(self, request: SimRequest) -> None:
        """Keep no room any more for a prompt that was cut; the engine that did may have died."""
        planned = None if request.planned_target is None else self._by_id.get(request.planned_target)
        if planned is None:
            request.part_blocks, request.part_table = 0, None
        else:
            planned.give_up_room(request)
            self.start_engine(planned)  # it may have idled for want of these blocks

    def recover(self, request: SimRequest) -> None:
        """Keep a request that has lost its engine until it is placed again."""
        self.hold(request)
        self._schedule_retry(self.routers.of_request(request.index))

    def _schedule_retry(self, router: SimRouter, not_before_s: float = 0.0) -> None:
        if not router.is_retry_due:
            router.is_retry_due = True
            at_s = max(self.now, router.last_assign_s + ASSIGN_INTERVAL_S, not_before_s)
            self._push(at_s, RETRY, router)

    def _schedule_ticks(self) -> None:
        """Have policies asked again although nothing happens: some place a prompt once it would be late otherwise."""
        for router in self.routers.routers:
            if any(self.now < prefill.arrival_s + prefill.slo.ttft_s < math.inf for prefill in router.held.values()):
                self._schedule_retry(router, self.now + TICK_S)

    def push(self, at_s: float, code: int, what: object) -> None:
        """Schedule an event."""
        self._push(at_s, code, what)

    def _push(self, at_s: float, code: int, what: object) -> None:
        self._num_events += 1
        heappush(self._heap, (at_s, self._num_events, code, what))

    def _report_loads(self, router: SimRouter) -> None:
        """Bring a router's engine table up to date."""
        if self._report_s:
            router.receive(self.now)
            return
        # A queue that waits for kept KV, or for what transfers hold, does not get shorter while its engine idles.
        # Where prompts are ordered by slack, they become late with time alone.
        for queued in self._by_id.values():
            if queued.prefills.num_queued and (not queued.is_running or queued.becomes_late(self.now)):
                queued.note_change()
        routers = self.routers.routers
        for engine_id in self._changed:
            engine = self._by_id.get(engine_id)
            if engine is None:  # it has failed since
                continue
            load = engine.report_load(self.now)
            if len(routers) == 1:
                router.table.report(engine_id, load, self.now)
                continue
            for each, copy in zip(routers, self.routers.copy_loads(engine_id, load), strict=True):
                each.table.report(engine_id, copy, self.now)
        self._changed.clear()

    def _send_reports(self) -> None:
        """Send the loads that have changed to all routers, which get them ``report_s`` later."""
        arrives_at_s = self.now + self._report_s
        for engine_id in self._changed:
            engine = self._by_id.get(engine_id)
            if engine is not None:
                copies = self.routers.copy_loads(engine_id, engine.report_load(self.now))
                for router, copy in zip(self.routers.routers, copies, strict=True):
                    router.send(engine_id, copy, arrives_at_s)
        self._changed.clear()
        for router in self.routers.routers:
            if self._waits_for_reports(router):
                self._schedule_retry(router, arrives_at_s)

    def _waits_for_reports(self, router: SimRouter) -> bool:
        """Say whether a router has anything to decide on its next report."""
        raise NotImplementedError

    def find_target(
        self, request: SimRequest, cause: MoveCause, source: SimEngine, num_blocks: int
    ) -> SimEngine | None:
        """Ask the strategy where a request may go; None: it stays."""
        router = self.routers.of_request(request.index)
        self._report_loads(router)
        flow_request = FlowRequest(
            cause=cause,
            source=source.engine_id,
            num_blocks=num_blocks,
            tpot_slo_s=request.tpot_slo_s,
            planned_target=request.planned_target,
        )
        target_id = router.policy.target(self.now, flow_request, router.table)
        if target_id is None:
            return None
        target = self._by_id[target_id]
        if self._report_s and not self.cell.options.schedules_ahead and not has_room(target, num_blocks):
            return None  # the target refuses: the router did not know yet how full it is
        return target

    def begin_move(self, request: SimRequest, cause: MoveCause) -> int:
        """Count the move of a request that was handed off; returns its tokens that the target has by chance."""
        request.num_moves += 1
        self.num_moves[cause] += 1
        if self.cell.options.hash_block_tokens is None:
            return 0
        assert request.target is not None
        return self._by_id[request.target].begin_pull(request)

    def send(
        self,
        request: SimRequest,
        source: SimEngine,
        cause: MoveCause,
        move: object | None,
        num_copied_tokens: int = 0,
    ) -> None:
        """Send the KV over the source's link; with a move, ``SimHandOffs.receive`` gets its arrival."""
        num_present = max(self.begin_move(request, cause), num_copied_tokens)
        arrives_at_s = self.links.send(self.now, source.setup, max(0, request.num_kv_tokens - num_present))
        if move is None:
            self._push(arrives_at_s, TRANSFER_END, request)
        else:
            self._push(arrives_at_s, MOVE_STEP, move)
        if self._timeline is not None:
            self._timeline.note_transfer(request, cause, self.now, arrives_at_s)

    def go_on_whole(self, request: SimRequest, source: SimEngine) -> None:
        """Let the engine of a prompt's beginning compute the rest too: the other one has no room."""
        self.num_whole += 1
        request.is_whole = True
        if source.is_draining:
            source.release(request.num_blocks, request.part_tokens, request.source_table)
            request.source_table = None
            self.recover(request)
            return
        router, block_size = self.routers.of_request(request.index), source.setup.block_size_tokens
        cached = {source.engine_id: request.part_tokens // block_size * block_size}
        self._report_loads(router)
        record_prefill(self.now, request.describe_prefill(cached), router.table, source.engine_id)
        number = source.submit_whole(request)
        router.table.mark_submitted(source.engine_id, request.request_id, number)

    def copy(self, source: SimEngine, num_tokens: int, move: object, *, is_ahead: bool = False) -> None:
        """Send the KV of some tokens while their request runs on; ``SimHandOffs.receive`` gets its arrival."""
        self._push(self.links.send(self.now, source.setup, num_tokens, is_ahead=is_ahead), MOVE_STEP, move)

    def send_part(self, request: SimRequest, source: SimEngine, num_tokens: int, move: object) -> None:
        """Send the KV of a prompt that was cut and waits for it; ``SimHandOffs.receive`` gets its arrival."""
        arrives_at_s = self.links.send(self.now, source.setup, num_tokens)
        self._push(arrives_at_s, MOVE_STEP, move)
        if self._timeline is not None:
            self._timeline.note_transfer(request, MoveCause.SPLIT, self.now, arrives_at_s)

    def send_message(self, move: object, duration_s: float) -> None:
        """Send a message from one engine of a move to the other; ``SimHandOffs.receive`` gets it."""
        self._push(self.now + duration_s, MOVE_STEP, move)

    def _add_engine(self, setup: EngineSetup) -> None:
        if setup.engine_id in self._known_ids:
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
            engine.take_cache_changes(with_host=self.cell.options.knows_host_kv)
        self._by_id[setup.engine_id] = engine
        self._known_ids.add(setup.engine_id)
        self.routers.add_engine(setup, engine.latency)

    def _spread_chunk_sizes(self) -> None:
        """Tell every engine's policy the chunk sizes of the cluster."""
        chunk_sizes = {state.chunk_size_tokens for state in self.table if not state.is_draining}
        papers_wait = self.cell.options.schedules_ahead and self.cell.options.no_grant is NoGrant.WAIT
        for engine in self._by_id.values():
            engine.policy.observe_chunk_sizes(chunk_sizes)
            engine.hands_off_prefills = engine.policy.hands_off_prefills(engine.role) or (
                papers_wait and self.routers.first.policy.moves_first_decode(engine.role, self.table)
            )


def has_room(target: SimEngine, num_blocks: int) -> bool:
    """Say whether a target can take a request that moves there at once."""
    num_seqs = target.num_incoming + target.count_running()
    return not target.is_draining and num_blocks <= target.free_blocks and num_seqs < target.setup.max_num_seqs
