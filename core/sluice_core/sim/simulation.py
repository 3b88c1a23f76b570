"""The event loop, and the router's part: placement, moves, failures (simulation.md, section 2).

Events are arrivals, ends of iterations, arrivals of KV transfers and of messages between engines, and what is asked to
happen to the cluster. Those of one moment are handled in the order in which they were scheduled, arrivals first. The
policies are those of the router and the engine; the engine table that placements read is brought up to date when they
read it.

At the end of every run nothing may be left and nothing may be lost: see ``Simulation.check``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Final

from sluice_core.latency import LatencyModel
from sluice_core.records import EngineId, Hold, MoveCause, MoveProposal, Place, PrefillRequest, RequestId, Role
from sluice_core.scheduling.batching import BatchPolicy, ChunkedPrefillPolicy, RequestKind
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.sim.cell import (
    AddEngineEvent,
    Arrival,
    Cell,
    ClusterEvent,
    ConfigureEvent,
    EngineSetup,
    FailEvent,
    NoGrant,
    TtftEnd,
)
from sluice_core.sim.deadlines import TtftDeadlines
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.gap_histogram import GapHistogram
from sluice_core.sim.hand_offs import SimHandOffs, SimMove
from sluice_core.sim.requests import RequestState, SimRequest, check_arrivals, find_expired
from sluice_core.sim.timeline import Timeline
from sluice_core.strategies import get_strategy

ASSIGN_INTERVAL_S: Final = 0.005  # the router looks at its queue again at most this often
MAX_ASSIGNED_AT_ONCE: Final = 256  # requests of one look

_ITERATION: Final = 0  # kinds of events
_TRANSFER: Final = 1
_RETRY: Final = 2
_CLUSTER: Final = 3
_MOVE: Final = 4
_Event = tuple[float, int, int, object]


class Simulation:
    """One run of a cell on a workload; mutable, used once.

    Args:
        cell: The cluster.
        arrivals: The requests, in the order of their arrival.
        timeline: Takes what happens, for ``Timeline.to_chrome_trace``; None: nothing is kept.

    Attributes:
        now: Seconds of the simulated clock.
        requests: All requests, by their position in ``arrivals``.
        engines: All engines that there ever were.
        gaps: Gaps between tokens.
        num_moves: Moves that began, by cause.
        num_blocked_moves: Proposals without a target.
        num_arrived: Requests that have arrived.
        num_missed: Requests that ended and missed an objective, rejected ones included; in a run that may give up also
            those that are late already.
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
        self.num_arrived = 0
        self.num_missed = 0
        self.transfer_s = 0.0
        check_arrivals(self.requests, cell.options.hash_block_tokens)
        rng = random.Random(cell.seed)  # noqa: S311 - breaks ties
        self._rng = rng
        self._placement = cell.strategy.make_placement(cell.parameters, rng, num_records=0)
        self._flow = cell.strategy.make_flow(cell.parameters, rng)
        self._no_flow = get_strategy("aggregated").make_flow(cell.parameters, rng)
        self._batching: BatchPolicy = ChunkedPrefillPolicy(counts_decodes=cell.options.counts_decodes)
        self._waits_for_grant = cell.options.no_grant is NoGrant.WAIT
        self._hand_offs = SimHandOffs(self) if cell.options.schedules_ahead else None
        self._timeline = timeline
        self._profiles: dict[EngineId, LatencyModel] = {}
        self.table = EngineTable(self._profiles.__getitem__, counts_decodes=cell.options.counts_decodes)
        self._by_id: dict[EngineId, SimEngine] = {}
        self._heap: list[_Event] = []
        self._num_events = 0
        self._changed: list[SimEngine] = []
        self._held: dict[RequestId, PrefillRequest] = {}
        self._parked: deque[tuple[SimRequest, int]] = deque()
        self._link_free_at_s: dict[str, float] = {}
        self._last_assign_s = -1.0
        self._is_retry_due = False
        for setup in cell.engines:
            self._add_engine(setup)
        self._has_targets = self._find_targets()
        for event in sorted(cell.events, key=_at_s_of):
            self._push(event.at_s, _CLUSTER, event)

    def run(self, most_missed: int | None = None) -> bool:
        """Run until every request has ended, then check the invariants.

        Args:
            most_missed: Give up as soon as more requests have missed an objective; None: never.

        Returns:
            False when it gave up.
        """
        heap, requests = self._heap, self.requests
        num_requests = len(requests)
        limit = num_requests if most_missed is None else most_missed
        deadlines = TtftDeadlines([] if most_missed is None else requests)
        while self.num_missed <= limit:
            if self.num_arrived < num_requests and (not heap or requests[self.num_arrived].arrival_s <= heap[0][0]):
                request = requests[self.num_arrived]
                self.num_arrived += 1
                self.now = request.arrival_s
                self._arrive(request)
                continue
            if not heap:
                break
            at_s, _, code, what = heappop(heap)
            self.now = at_s
            if deadlines.next_s < at_s:
                self.num_missed += deadlines.mark_late(at_s)
            if code == _ITERATION:
                assert isinstance(what, SimEngine)
                if not what.is_dead:
                    self._end_iteration(what)
            elif code == _TRANSFER:
                assert isinstance(what, SimRequest)
                self._end_transfer(what)
            elif code == _MOVE:
                assert isinstance(what, SimMove)
                assert self._hand_offs is not None
                self._hand_offs.receive(what)
            elif code == _RETRY:
                self._is_retry_due = False
                self._assign_held()
            else:
                self._change_cluster(what)
        else:
            return False
        self.check()
        return True

    def check(self) -> None:
        """Assert that no request, block or token was lost or counted twice."""
        assert not self._held, f"{len(self._held)} requests wait at the router for ever"
        assert not self._parked, f"{len(self._parked)} requests wait for a target for ever"
        num_output_tokens = num_recomputed = 0
        for request in self.requests:
            assert request.state in {RequestState.FINISHED, RequestState.REJECTED}, request.request_id
            if request.state is RequestState.FINISHED:
                assert request.generated_tokens == request.output_tokens, request.request_id
                assert request.arrival_s <= request.first_token_s <= request.last_token_s, request.request_id
                num_output_tokens += request.output_tokens
                num_recomputed += request.prompt_tokens
        assert sum(engine.counters.num_output_tokens for engine in self.engines) == num_output_tokens
        for engine in self.engines:
            assert (
                engine.counters.num_prefill_tokens
                == engine.counters.num_completed_prefill_tokens + engine.counters.num_lost_prefill_tokens
            ), engine.engine_id
            if not engine.is_dead:
                engine.check_idle()
        if all(request.num_preemptions == 0 for request in self.requests):
            num_completed = sum(engine.counters.num_completed_prefill_tokens for engine in self.engines)
            num_found = sum(engine.cache.num_hit_tokens for engine in self.engines if engine.cache is not None)
            assert num_completed + num_found >= num_recomputed

    # --- arrivals and placement --------------------------------------------------------------------------------

    def _arrive(self, request: SimRequest) -> None:
        """Take a request in; one that no engine can ever hold is rejected."""
        num_tokens = request.prompt_tokens + request.output_tokens
        if all(num_tokens > engine.total_blocks * engine.setup.block_size_tokens for engine in self._by_id.values()):
            self._reject(request)
            return
        self.hold(request)
        if len(self._held) == 1:
            self._assign_held()
        else:
            self._schedule_retry()

    def hold(self, request: SimRequest) -> None:
        """Keep a request at the router until it is placed."""
        request.state = RequestState.WAITING
        request.target = request.table = None
        self._held[request.request_id] = request.describe_prefill()

    def recover(self, request: SimRequest) -> None:
        """Keep a request that has lost its engine until it is placed again."""
        self.hold(request)
        self._schedule_retry()

    def _schedule_retry(self) -> None:
        if not self._is_retry_due:
            self._is_retry_due = True
            self._push(max(self.now, self._last_assign_s + ASSIGN_INTERVAL_S), _RETRY, None)

    def _assign_held(self) -> None:
        """Ask the placement policy about what waits at the router."""
        for request in find_expired(self._held, self.requests, self.now, self.cell.options.wait_limit_s):
            del self._held[request.request_id]
            self._reject(request)
        if not self._held:
            return
        self._last_assign_s = self.now
        self._report_loads()
        waiting = list(islice(self._held.values(), MAX_ASSIGNED_AT_ONCE))
        for decision in self._placement.assign(self.now, waiting, self.table):
            if isinstance(decision, Hold):
                continue
            del self._held[decision.request_id]
            request = self.requests[int(decision.request_id)]
            if isinstance(decision, Place):
                self._submit(request, self._by_id[decision.engine_id])
            else:
                self._reject(request)

    def _reject(self, request: SimRequest) -> None:
        request.state = RequestState.REJECTED
        self._count_missed(request)

    def _count_missed(self, request: SimRequest) -> None:
        if not request.has_missed_ttft:
            self.num_missed += 1

    def _submit(self, request: SimRequest, engine: SimEngine) -> None:
        is_recovery = request.first_token_s >= 0.0
        number = engine.submit(request, RequestKind.RECOVERY if is_recovery else RequestKind.NEW_PROMPT)
        self.table.mark_submitted(engine.engine_id, request.request_id, number)
        self.start_engine(engine)

    def _report_loads(self) -> None:
        """Bring the engine table up to date."""
        for engine in self._changed:
            if not engine.is_dead:
                self.table.report(engine.engine_id, engine.report_load(self.now), self.now)
        self._changed.clear()

    # --- iterations --------------------------------------------------------------------------------------------

    def _push(self, at_s: float, code: int, what: object) -> None:
        self._num_events += 1
        heappush(self._heap, (at_s, self._num_events, code, what))

    def start_engine(self, engine: SimEngine) -> None:
        """Start an iteration if the engine idles and has work."""
        if engine.is_running or engine.is_dead:
            return
        duration_s = engine.start(self.now)
        while duration_s < 0.0 and self._hand_offs is not None and self._hand_offs.run_pending_steps(engine):
            duration_s = engine.start(self.now)
        if engine.prefills.returned:
            self._hold_returned(engine)
        if duration_s >= 0.0:
            self._num_events += 1
            heappush(self._heap, (engine.ends_at_s, self._num_events, _ITERATION, engine))
            if self._timeline is not None:
                self._timeline.note_iteration(engine, self.now)

    def _hold_returned(self, engine: SimEngine) -> None:
        """Hold prompts that an engine gave back; a new report tells the table that they are gone."""
        returned, engine.prefills.returned = engine.prefills.returned, []
        for request in returned:
            self.hold(request)
        self._schedule_retry()

    def _end_iteration(self, engine: SimEngine) -> None:
        engine.end(self.now)
        for request in engine.finished:
            if not request.has_met_slo:
                self._count_missed(request)
        if self._timeline is not None:
            self._timeline.note_finished(engine.finished)
        if engine.batch.num_decodes:
            self._propose(engine)
        if self._hand_offs is not None:
            self._hand_offs.end_iteration(engine)
        if engine.has_freed_blocks:
            engine.has_freed_blocks = False
            if self._parked:
                self._place_parked()
        self.start_engine(engine)
        if self._held:
            self._retry_held()

    def _retry_held(self) -> None:
        if self.now - self._last_assign_s >= ASSIGN_INTERVAL_S:
            self._assign_held()
        else:
            self._schedule_retry()

    # --- moves -------------------------------------------------------------------------------------------------

    def _propose(self, engine: SimEngine) -> None:
        """Ask which decodes should leave, and let them."""
        flow = self._no_flow if self.table.has_uniform_chunk_size else self._flow
        proposals = flow.propose(self.now, engine.batch.decodes)
        if self._hand_offs is not None:
            self._hand_offs.propose(engine, proposals)
            return
        while proposals:
            num_left = 0
            for proposal in proposals:
                num_left += self._move(engine, proposal)
            # Without a grant a request waits off the batch here, so that more may be proposed at once.
            proposals = flow.propose(self.now, engine.batch.decodes) if self._waits_for_grant and num_left else []

    def _move(self, engine: SimEngine, proposal: MoveProposal) -> bool:
        """Move a request if there is a target; returns whether it left the decode batch."""
        must_wait = self._waits_for_grant and self._has_targets and proposal.cause is MoveCause.PREFILL_DONE
        target = None
        if not (must_wait and self._parked):
            target = self.find_target(proposal.request_id, proposal.cause, engine, proposal.num_blocks)
        if target is None and not must_wait:
            self.num_blocked_moves += 1
            return False
        request = engine.hand_off(proposal.request_id, self.now)
        request.source = engine.engine_id
        if proposal.cause is MoveCause.BACKFLOW:
            request.reset_tokens = request.generated_tokens
        if target is None:
            request.state = RequestState.PARKED
            self._parked.append((request, request.batch_epoch))
        else:
            self._begin_transfer(request, engine, target, proposal.cause)
        return True

    def find_target(
        self, request_id: RequestId, cause: MoveCause, source: SimEngine, num_blocks: int
    ) -> SimEngine | None:
        """Ask the flow policy where a request may go; None: it stays."""
        self._report_loads()
        flow_request = FlowRequest(request_id=request_id, cause=cause, source=source.engine_id, num_blocks=num_blocks)
        target_id = self._flow.target(self.now, flow_request, self.table)
        return None if target_id is None else self._by_id[target_id]

    def _place_parked(self) -> None:
        """Let finished prefills go whose turn has come; first come, first served."""
        while self._parked:
            request, batch_epoch = self._parked[0]
            if request.state is not RequestState.PARKED or request.batch_epoch != batch_epoch:
                self._parked.popleft()
                continue
            assert request.source is not None
            source = self._by_id[request.source]
            if not self._has_targets or source.role is Role.DECODE_HEAVY:
                # A plan has changed meanwhile: its decode may stay.
                self._parked.popleft()
                request.state = RequestState.MOVING
                source.resume(request)
                self.start_engine(source)
                continue
            target = self.find_target(request.request_id, MoveCause.PREFILL_DONE, source, request.num_blocks)
            if target is None:
                break
            self._parked.popleft()
            self._begin_transfer(request, source, target, MoveCause.PREFILL_DONE)

    def _begin_transfer(self, request: SimRequest, source: SimEngine, target: SimEngine, cause: MoveCause) -> None:
        """Reserve the target's blocks and send the KV; transfers of one link go one after the other."""
        target.reserve(request.num_blocks)
        request.state = RequestState.MOVING
        request.target = target.engine_id
        self.send(request, source, cause, None)

    def send(self, request: SimRequest, source: SimEngine, cause: MoveCause, move: SimMove | None) -> None:
        """Send the KV over the source's link; with a move, ``SimHandOffs`` hears of its arrival."""
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
            self._push(arrives_at_s, _TRANSFER, request)
        else:
            self._push(arrives_at_s, _MOVE, move)
        if self._timeline is not None:
            self._timeline.note_transfer(request, cause, self.now, arrives_at_s)

    def send_message(self, move: SimMove, duration_s: float) -> None:
        """Send what ``SimMove.step`` says from one engine of a move to the other; ``SimHandOffs`` hears of its arrival."""
        self._push(self.now + duration_s, _MOVE, move)

    def _end_transfer(self, request: SimRequest) -> None:
        """Free the source's blocks and hand the request to the target."""
        source = None if request.source is None else self._by_id.get(request.source)
        target = None if request.target is None else self._by_id.get(request.target)
        if source is not None:
            source.release(request.num_blocks, request.num_kv_tokens, request.source_table)
        if target is None:
            # The target has died meanwhile: the router recovers the request.
            self.recover(request)
        elif source is None:
            target.recompute_arrival(request)
            self.start_engine(target)
        else:
            target.receive(request)
            self.start_engine(target)
        if source is not None:
            self.start_engine(source)
            if source.has_freed_blocks and self._parked:
                source.has_freed_blocks = False
                self._place_parked()
            if self._held:
                self._retry_held()

    # --- the cluster changes -----------------------------------------------------------------------------------

    def _add_engine(self, setup: EngineSetup) -> None:
        if setup.engine_id in self._profiles:
            raise ValueError(f"engine {setup.engine_id!r} is there twice")
        joins_end_ttft = self.cell.options.ttft_end is TtftEnd.DECODE_JOIN
        engine = SimEngine(
            setup,
            self._batching,
            self.gaps,
            self._changed,
            joins_end_ttft=joins_end_ttft,
            schedules_ahead=self.cell.options.schedules_ahead,
            hash_block_tokens=self.cell.options.hash_block_tokens,
        )
        self.engines.append(engine)
        self._by_id[setup.engine_id] = engine
        self._profiles[setup.engine_id] = setup.profile
        spec = EngineConfig(
            block_size_tokens=setup.block_size_tokens,
            kv_bytes_per_token=setup.kv_bytes_per_token,
            max_num_seqs=setup.max_num_seqs,
            max_batch_tokens=setup.max_batch_tokens,
        )
        self.table.add(setup.engine_id, spec, role=setup.role, chunk_size_tokens=setup.chunk_size_tokens)

    def _change_cluster(self, event: object) -> None:
        if isinstance(event, AddEngineEvent):
            self._add_engine(event.setup)
        elif isinstance(event, FailEvent):
            self._fail(event.engine_id)
        else:
            assert isinstance(event, ConfigureEvent)
            self._configure(event)
        self._has_targets = self._find_targets()
        if self._parked:
            self._place_parked()
        if self._held:
            self._schedule_retry()

    def _find_targets(self) -> bool:
        """Say whether first decodes have anywhere to go at all."""
        decode_heavy = [engine for engine in self._by_id.values() if engine.role is Role.DECODE_HEAVY]
        return not self.table.has_uniform_chunk_size and not all(engine.is_draining for engine in decode_heavy)

    def _configure(self, event: ConfigureEvent) -> None:
        """Put a plan in force; an iteration under way keeps the batch that it has."""
        engine = self._by_id.get(event.engine_id)
        if engine is None:
            return
        engine.configure(event.role, event.chunk_size_tokens, is_draining=event.is_draining)
        self.table.configure(
            event.engine_id,
            role=event.role,
            chunk_size_tokens=event.chunk_size_tokens,
            is_draining=event.is_draining,
        )
        self.start_engine(engine)

    def _fail(self, engine_id: EngineId) -> None:
        """Take an engine away; what it held is placed again, what was on its way there or from there is recomputed."""
        engine = self._by_id.pop(engine_id, None)
        if engine is None:
            return
        self.table.remove(engine_id)
        for request in engine.clear(self.now):
            request.num_blocks = 0
            self.hold(request)
        if self._hand_offs is not None:
            self._hand_offs.fail(engine)
        for request, batch_epoch in self._parked:
            if (
                request.source == engine_id
                and request.batch_epoch == batch_epoch
                and request.state is RequestState.PARKED
            ):
                self.hold(request)
        if self._held:
            self._schedule_retry()


def _at_s_of(event: ClusterEvent) -> float:
    return event.at_s
