"""The event loop, and the router's part: placement, moves, failures.

Events are arrivals, ends of iterations, arrivals of KV transfers and of messages between engines, and what is asked to
happen to the cluster. Those of one moment are handled in the order in which they were scheduled, arrivals first. The
policies are those of the router and the engine; the engine table that placements read is brought up to date when they
read it.

At the end of every run nothing may be left and nothing may be lost: see ``Simulation.check``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from sluice_core.records import Hold, Leg, MoveCause, MoveProposal, Place, PrefillRequest
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.scheduling.waiting_order import Urgency, select_urgent
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.cluster import (
    ASSIGN_INTERVAL_S,
    CLUSTER_CHANGE,
    GRANT_EXPIRY,
    INTERRUPT,
    ITERATION_END,
    LOAD_END,
    MOVE_STEP,
    RETRY,
    STEER,
    TRANSFER_END,
)
from sluice_core.sim.cluster_changes import ChangingCluster
from sluice_core.sim.engine.host_prefills import HostPrefills
from sluice_core.sim.engine.operator_interrupts import find_interrupt_s, interrupt
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.known_prefixes import KnownPrefixes
from sluice_core.sim.moves.hand_offs import SimMove
from sluice_core.sim.moves.kept_prefills import KeptPrefills
from sluice_core.sim.requests import RequestState, SimRequest, find_expired
from sluice_core.sim.routers import SimRouter
from sluice_core.sim.sim_setup import (
    Arrival,
    Cell,
    ClusterEvent,
    FailEvent,
    NoGrant,
)
from sluice_core.sim.ttft_deadlines import TtftDeadlines
from sluice_core.strategies.interface import RouterPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """What changes the cluster while a run goes on, such as a scaler.

    Args:
        interval_s: Time between two calls; the first comes at the start.
        steer: Looks at the run, and says what is to happen from now on.
    """

    interval_s: float
    steer: Callable[[Simulation], Sequence[ClusterEvent]]


class Simulation(ChangingCluster):
    """One run of a cell on a workload; mutable, used once.

    Args:
        cell: The cluster.
        arrivals: The requests, in the order of their arrival.
        timeline: Takes what happens, for ``Timeline.to_chrome_trace``; None: nothing is kept.
        steering: Changes the cluster meanwhile. Then requests wait while there is no engine, as long as
            ``SimOptions.wait_limit_s`` allows. None: nothing but the cell's own events does.

    Attributes:
        num_arrived: Requests that have arrived.
        num_missed: Requests that ended and missed an objective, rejected ones included; in a run that may give up also
            those that are late already.

    Raises:
        ValueError: Arrivals out of order, or an engine twice.
    """

    def __init__(
        self,
        cell: Cell,
        arrivals: Sequence[Arrival],
        timeline: Timeline | None = None,
        steering: Steering | None = None,
    ) -> None:
        super().__init__(cell, arrivals, timeline)
        self._steering = steering
        self.num_arrived = 0
        self.num_missed = 0
        self._waits_for_grant = cell.options.no_grant is NoGrant.WAIT
        for event in sorted(cell.events, key=_at_s_of):
            self._push(event.at_s, CLUSTER_CHANGE, event)
        if steering is not None:
            self._push(0.0, STEER, None)

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
            if self._report_s and self._changed:
                self._send_reports()
            if not heap and self.num_arrived == num_requests:
                self._schedule_ticks()
            if self.num_arrived < num_requests and (not heap or requests[self.num_arrived].arrival_s <= heap[0][0]):
                request = requests[self.num_arrived]
                self.num_arrived += 1
                self.now = request.arrival_s
                self._arrive(request)
                continue
            if not heap:
                break
            at_s, _, code, what = heappop(heap)
            if code == GRANT_EXPIRY and not self._is_parked(what):
                continue
            self.now = at_s
            if deadlines.next_s < at_s:
                self.num_missed += deadlines.mark_late(at_s)
            if code == ITERATION_END:
                assert isinstance(what, SimEngine)
                if what.ends_at_s == at_s and not what.is_dead:  # else it has stopped before
                    self._end_iteration(what)
            else:
                self._handle(code, what)
        else:
            return False
        self.check()
        return True

    def _handle(self, code: int, what: object) -> None:
        """Handle any event but the end of an iteration."""
        if code == TRANSFER_END:
            assert isinstance(what, SimRequest)
            self._end_transfer(what)
        elif code == MOVE_STEP:
            assert isinstance(what, SimMove)
            assert self._hand_offs is not None
            self._hand_offs.receive(what)
        elif code == RETRY:
            assert isinstance(what, SimRouter)
            what.is_retry_due = False
            self._assign_held(what)
            if self._report_s:
                self._decide_on_reports(what)
        elif code == GRANT_EXPIRY:
            assert isinstance(what, SimRequest)
            self._grants_of(what).expire(what)
        elif code == STEER:
            self._steer()
        elif code == LOAD_END:
            assert isinstance(what, SimEngine)
            self.start_engine(what)
        elif code == INTERRUPT:
            assert isinstance(what, SimEngine)
            self._interrupt(what)
        else:
            self._change_cluster(what)

    def _steer(self) -> None:
        """Let leaving engines go that are empty, and ask what is to happen, until every request has ended."""
        assert self._steering is not None
        for engine in [engine for engine in self._leaving.values() if _is_empty(engine)]:
            self._change_cluster(FailEvent(at_s=self.now, engine_id=engine.engine_id))
        for event in self._steering.steer(self):
            self._push(max(event.at_s, self.now), CLUSTER_CHANGE, event)
        self._retry_held()
        if self.num_arrived < len(self.requests) or self._heap or self.num_held:
            self._push(self.now + self._steering.interval_s, STEER, None)

    @staticmethod
    def _is_parked(what: object) -> bool:
        assert isinstance(what, SimRequest)
        return what.state is RequestState.PARKED

    def check(self) -> None:
        """Assert that no request, block or token was lost or counted twice."""
        for router in self.routers.routers:
            assert not router.held, f"{len(router.held)} requests wait at router {router.number} for ever"
        for grants in self._grants:
            grants.forget_placed()
            assert not len(grants), f"{len(grants)} requests wait for a target for ever"
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
            num_found += sum(engine.host.num_hit_tokens for engine in self.engines if engine.host is not None)
            assert num_completed + num_found >= num_recomputed

    # --- arrivals and placement --------------------------------------------------------------------------------

    def _arrive(self, request: SimRequest) -> None:
        """Take a request in; one that no engine can ever hold is rejected."""
        num_tokens = request.prompt_tokens + request.output_tokens
        can_wait = self._steering is not None and not self._by_id
        if not can_wait and all(
            num_tokens > engine.total_blocks * engine.setup.block_size_tokens for engine in self._by_id.values()
        ):
            self._reject(request)
            return
        self.hold(request)
        router = self.routers.of_request(request.index)
        if len(router.held) == 1:
            self._assign_held(router)
        else:
            self._schedule_retry(router)

    def _assign_held(self, router: SimRouter) -> None:
        """Ask the placement policy about what waits at a router."""
        for request in find_expired(router.held, self.requests, self.now, self.cell.options.wait_limit_s):
            self._take_out(router, request)
            self._reject(request)
        if not router.held:
            return
        router.last_assign_s = self.now
        self._report_loads(router)
        waiting = select_urgent(list(router.held.values()), self._make_urgency(router.policy))
        if self._prefixes is not None:
            waiting = [self._describe_with_prefixes(prefill, self._prefixes) for prefill in waiting]
        for decision in router.policy.assign(self.now, waiting, router.table):
            if isinstance(decision, Hold):
                continue
            request = self.requests[int(decision.request_id)]
            self._take_out(router, request)
            if isinstance(decision, Place):
                engine = self._by_id[decision.engine_id]
                if decision.route:
                    self._plan_parts(request, decision.route)
                self._submit(request, router, engine)
            else:
                self._reject(request)

    def _take_out(self, router: SimRouter, request: SimRequest) -> None:
        """Let a request wait no more at its router."""
        del router.held[request.request_id]
        if self._prefixes is not None:
            self._prefixes.drop(request)

    def _decide_on_reports(self, router: SimRouter) -> None:
        """Do what a router does on a report besides placing; then wait for the next one that is under way."""
        self._grants[router.number].place()
        router.receive(self.now)
        if router.reports and self._waits_for_reports(router):
            self._schedule_retry(router, router.reports[0].arrives_at_s)

    def _waits_for_reports(self, router: SimRouter) -> bool:
        """Say whether a router has anything to decide on its next report."""
        return bool(router.held) or len(self._grants[router.number]) > 0

    def _describe_with_prefixes(self, prefill: PrefillRequest, prefixes: KnownPrefixes) -> PrefillRequest:
        """Describe a request together with what engines are known to hold of it."""
        request = self.requests[int(prefill.request_id)]
        cached = prefixes.find(request, self.now)
        return request.describe_prefill(cached) if cached else prefill

    def _make_urgency(self, policy: RouterPolicy) -> Callable[[PrefillRequest], Urgency]:
        """Make what orders the requests that wait at a router."""

        def compute_urgency(request: PrefillRequest) -> Urgency:
            return policy.compute_urgency(
                self.now,
                is_recovery=request.is_recovery,
                next_token_due_s=request.next_token_due_s,
                priority=request.priority,
                arrival_s=request.arrival_s,
                ttft_slo_s=request.slo.ttft_s,
                prompt_tokens=request.prompt_tokens,
            )

        return compute_urgency

    def _reject(self, request: SimRequest) -> None:
        request.state = RequestState.REJECTED
        self._count_missed(request)

    def _count_missed(self, request: SimRequest) -> None:
        if not request.has_missed_ttft:
            self.num_missed += 1

    @staticmethod
    def _plan_parts(request: SimRequest, route: tuple[Leg, ...]) -> None:
        """Take the parts of a request that is split."""
        request.split_token = route[0].end_token
        request.planned_target = route[1].engine_id

    def _submit(self, request: SimRequest, router: SimRouter, engine: SimEngine) -> None:
        is_recovery = request.first_token_s >= 0.0
        number = engine.submit(request, RequestKind.RECOVERY if is_recovery else RequestKind.NEW_PROMPT)
        router.table.mark_submitted(engine.engine_id, request.request_id, number)
        if engine.num_operators:
            interrupts_at_s = find_interrupt_s(engine, self.now)
            if interrupts_at_s < math.inf:
                self._push(interrupts_at_s, INTERRUPT, engine)
        self.start_engine(engine)

    # --- iterations --------------------------------------------------------------------------------------------

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
            heappush(self._heap, (engine.ends_at_s, self._num_events, ITERATION_END, engine))
            if self._timeline is not None:
                self._timeline.note_iteration(engine, self.now)
        elif isinstance(engine.prefills, HostPrefills):
            wakes_at_s = engine.prefills.find_wake_s(self.now)
            if wakes_at_s < math.inf:
                self._push(wakes_at_s, LOAD_END, engine)

    def _interrupt(self, engine: SimEngine) -> None:
        """Stop an iteration for a more urgent prompt, unless it has ended."""
        if engine.is_running and engine.interrupts_at_s == self.now and not engine.is_dead:
            interrupt(engine, self.now)
            if self._timeline is not None:
                self._timeline.note_interrupt(engine, self.now)
            self.start_engine(engine)

    def _hold_returned(self, engine: SimEngine) -> None:
        """Hold prompts that an engine gave back; a new report removes them from the table."""
        returned, engine.prefills.returned = engine.prefills.returned, []
        for request in returned:
            self.recover(request)

    def _end_iteration(self, engine: SimEngine) -> None:
        engine.end(self.now)
        if self._prefixes is not None and engine.cache is not None:
            changes = engine.take_cache_changes(with_host=self.cell.options.knows_host_kv)
            self._prefixes.report(engine.engine_id, changes, self.now)
        self._note_finished(engine)
        if self._timeline is not None:
            self._timeline.note_finished(engine.finished)
        may_place = engine.has_freed_blocks or bool(engine.prefilled)
        if engine.prefilled:
            for request in engine.prefilled:
                self._grants_of(request).add(request, engine)
            engine.prefilled.clear()
        if engine.prefills.begun or engine.engine_id in self._cut_prompts.computing:
            self._cut_prompts.end_iteration(engine)
        if engine.batch.num_decodes:
            self._propose(engine)
        if self._hand_offs is not None:
            self._hand_offs.end_iteration(engine)
            may_place = True  # what a target refuses is not known before it answers
        engine.has_freed_blocks = False
        if may_place:
            self._place_granted(engine)
        self.start_engine(engine)
        if engine.prefills.begun:
            self._cut_prompts.note_begun(engine)
        self._retry_held()

    def _note_finished(self, engine: SimEngine) -> None:
        for request in engine.finished:
            if not request.has_met_slo:
                self._count_missed(request)
            self.routers.of_request(request.index).policy.note_finished(request.request_id, request.output_tokens)

    def _retry_held(self) -> None:
        """Ask the policies again whose routers hold requests, and see loads as they are."""
        if self._report_s:
            return  # they are asked when the report arrives
        for router in self.routers.routers:
            if router.held:
                if self.now - router.last_assign_s >= ASSIGN_INTERVAL_S:
                    self._assign_held(router)
                else:
                    self._schedule_retry(router)

    def _grants_of(self, request: SimRequest) -> KeptPrefills:
        """Return what waits for a grant at a request's router."""
        return self._grants[self.routers.of_request(request.index).number]

    # --- moves -------------------------------------------------------------------------------------------------

    def _propose(self, engine: SimEngine) -> None:
        """Ask which decodes should leave, and let them."""
        policy = engine.policy
        proposals = policy.propose(self.now, engine.batch.decodes)
        if self._hand_offs is not None:
            self._hand_offs.propose(engine, proposals)
            return
        while proposals:
            num_left = 0
            for proposal in proposals:
                num_left += self._move(engine, proposal)
            # Without a grant a request waits off the batch here, so that more may be proposed at once.
            proposals = policy.propose(self.now, engine.batch.decodes) if self._waits_for_grant and num_left else []

    def _move(self, engine: SimEngine, proposal: MoveProposal) -> bool:
        """Move a request if there is a target; returns whether it left the decode batch."""
        request = self.requests[int(proposal.request_id)]
        grants = self._grants_of(request)
        must_wait = self._waits_for_grant and grants.has_targets and proposal.cause is MoveCause.PREFILL_DONE
        target = None
        if not (must_wait and len(grants)):
            target = self.find_target(request, proposal.cause, engine, proposal.num_blocks)
        if target is None and not must_wait:
            self.num_blocked_moves += 1
            return False
        engine.hand_off(proposal.request_id, self.now)
        request.source = engine.engine_id
        if proposal.cause is MoveCause.BACKFLOW:
            request.reset_tokens = request.generated_tokens
        if target is None:
            grants.add(request, engine)
        else:
            self.begin_transfer(request, engine, target, proposal.cause)
        return True

    def _end_transfer(self, request: SimRequest) -> None:
        """Free the source's blocks and hand the request to the target."""
        source = None if request.source is None else self._by_id.get(request.source)
        if request.part_tokens:
            planned = None if request.planned_target is None else self._by_id.get(request.planned_target)
            self._cut_prompts.arrive(request, source, planned)
        else:
            self._end_move(request, source)
        if source is not None:
            self.start_engine(source)
            if source.has_freed_blocks:
                source.has_freed_blocks = False  # whoever waits later has asked since
                self._place_granted()
            self._retry_held()

    def _end_move(self, request: SimRequest, source: SimEngine | None) -> None:
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


def _is_empty(engine: SimEngine) -> bool:
    """Whether no request is on an engine, waits there, or is on its way from or to it."""
    num_blocks = engine.used_blocks + engine.pinned_blocks + engine.granted_blocks
    return not (engine.is_running or engine.num_incoming or engine.prefills.num_queued or num_blocks)


def _at_s_of(event: ClusterEvent) -> float:
    return event.at_s
