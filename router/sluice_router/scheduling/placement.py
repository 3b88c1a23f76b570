"""Placement of requests on engines by the core's policy."""

from __future__ import annotations

import math
from collections.abc import Callable

from sluice_core.records import EngineId, Hold, Place, PrefillRequest
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.prefill_feasibility import record_prefill
from sluice_core.scheduling.waiting_order import Urgency, select_urgent
from sluice_core.strategies.interface import RouterPolicy
from sluice_router.errors import SloInfeasibleError
from sluice_router.scheduling import completion, dispatch, prefixes
from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest
from sluice_router.scheduling.state import EnginePool, RequestQueues, RouterState

# Shortest time between two placements of the whole queue, and most requests placed at once: bounds the loop's pauses.
ASSIGN_INTERVAL_S = 0.005


def assign(state: RouterState, now: float) -> None:
    """Places what waits, in the order that the policy sees fit."""
    policy = state.active.policy
    if policy is None or not state.requests.waiting:
        return
    state.requests.last_assign_s = now
    free = _find_placeable(state.requests)
    prefills = _select(state, free, _make_urgency(policy, now))
    decisions = policy.assign(now, prefills, state.engines.table)
    for event in policy.take_events():
        state.metrics.count("strategy_events", event)
    for decision, record in zip(decisions, policy.take_records(len(decisions)), strict=True):
        request = state.requests.waiting[decision.request_id]
        if isinstance(decision, Hold):
            if decision.reason != request.wait_reason:
                request.wait_reason = decision.reason
                state.decision_log.record(now, request.request_id, "placement", record)
            continue
        state.decision_log.record(now, request.request_id, "placement", record)
        if isinstance(decision, Place):
            _place(state, request, decision, now)
        else:
            message = (
                f"no engine can send the first token within {request.slo.ttft_s:g} s; "
                f"the nearest would be {decision.retry_after_s:.1f} s late"
            )
            completion.fail(state, request, SloInfeasibleError(message, retry_after_s=decision.retry_after_s), now)


def assign_if_due(state: RouterState, now: float) -> None:
    """Places the whole queue again unless that was just done."""
    if state.requests.waiting and now - state.requests.last_assign_s >= ASSIGN_INTERVAL_S:
        assign(state, now)


def _find_placeable(queues: RequestQueues) -> list[LiveRequest]:
    """What any engine may take: all that waits, but for those that wait for the engine whose stream they lost."""
    if not queues.awaiting_resume:
        return list(queues.waiting.values())
    return [request for request_id, request in queues.waiting.items() if request_id not in queues.awaiting_resume]


def _select(
    state: RouterState, free: list[LiveRequest], urgency_of: Callable[[LiveRequest], Urgency]
) -> list[PrefillRequest]:
    """Describes what one pass looks at. Owners of API keys take turns; among requests of one owner there are none."""
    pool, held_s = state.engines, state.requests.held_s
    if len(free) < 2 or len({request.new.owner for request in free}) == 1:
        return [_describe(pool, request, held_s) for request in select_urgent(free, urgency_of)]
    selected = state.fair_share.select(
        free, _get_owner, urgency_of, lambda request: request.num_tokens, state.limiter.find_weight
    )
    return [_describe(pool, request, held_s, turn) for turn, request in enumerate(selected)]


def _get_owner(request: LiveRequest) -> str:
    return request.new.owner


def _make_urgency(policy: RouterPolicy, now: float) -> Callable[[LiveRequest], Urgency]:
    def get_urgency(request: LiveRequest) -> Urgency:
        return policy.compute_urgency(
            now,
            is_recovery=request.first_token_s is not None,
            next_token_due_s=request.next_token_due_s,
            priority=request.priority,
            arrival_s=request.new.arrival_s,
            ttft_slo_s=request.slo.ttft_s,
            prompt_tokens=request.num_tokens,
        )

    return get_urgency


def _describe(pool: EnginePool, request: LiveRequest, held_s: float, turn: int = 0) -> PrefillRequest:
    return PrefillRequest(
        request_id=request.request_id,
        # A request that was held is as good as new for the engine that came for it.
        arrival_s=max(request.new.arrival_s, held_s),
        prompt_tokens=request.num_tokens,
        slo=request.slo,
        priority=request.priority,
        is_recovery=request.first_token_s is not None,
        # Most requests have no engine to avoid; then there is no need to go through the engines.
        excluded=_find_avoided(pool.table, request) if request.excluded or request.died_on else frozenset(),
        next_token_due_s=request.next_token_due_s,
        turn=turn,
        max_output_tokens=request.new.sampling.max_tokens,
        is_whole=request.is_whole,
        cached_tokens=prefixes.find_cached(pool, request) if pool.prefixes else {},
    )


def _find_avoided(table: EngineTable, request: LiveRequest) -> frozenset[EngineId]:
    """Engines that a request is better not given to; none while there are no others."""
    avoided = request.excluded | request.died_on
    has_others = any(engine.engine_id not in avoided for engine in table if not engine.is_draining)
    return frozenset(avoided) if has_others else frozenset()


def submit_whole(
    state: RouterState, request: LiveRequest, engine: ConnectedEngine, num_cached_tokens: int, now: float
) -> None:
    """Submits a prompt to the engine that has the KV of its first tokens; the table has to be told."""
    prefill = PrefillRequest(
        request_id=request.request_id,
        arrival_s=request.new.arrival_s,
        prompt_tokens=request.num_tokens,
        slo=request.slo,
        cached_tokens={engine.engine_id: num_cached_tokens},
    )
    record_prefill(now, prefill, state.engines.table, engine.engine_id)
    _submit(state, request, engine, now)


def _submit(state: RouterState, request: LiveRequest, engine: ConnectedEngine, now: float) -> None:
    """Submits a request to an engine in whose queue the table counts it already."""
    dispatch.submit(state, request, engine, now)
    state.engines.table.mark_submitted(engine.engine_id, request.request_id, engine.num_submits)
    state.decision_log.record(
        now,
        request.request_id,
        "submitted",
        engine.engine_id,
        request.fence,
        len(request.output_token_ids),
        request.first_token_s is not None,
    )


def _place(state: RouterState, request: LiveRequest, decision: Place, now: float) -> None:
    engine = state.engines.connected[decision.engine_id]
    del state.requests.waiting[request.request_id]
    request.excluded = frozenset()
    request.prompt_hashes.clear()
    request.route = decision.route
    _submit(state, request, engine, now)
    if request.new.owner and request.first_token_s is None:
        state.fair_share.place(request.new.owner, request.num_tokens, state.limiter.find_weight(request.new.owner))
    role = engine.role.value if engine.role is not None else ""
    state.metrics.count("placements", role, decision.reason)
    state.metrics.queue_s[request.new.slo_class].observe(max(0.0, now - request.waiting_since_s))
    if request.first_token_s is None and math.isfinite(decision.predicted_ttft_s):
        request.predicted_ttft_s = decision.predicted_ttft_s
    if request.route:
        first, second = request.route
        kind, num_tokens = "split", request.split_output_tokens
        if request.split_prompt_tokens:
            kind, num_tokens = "cut", request.split_prompt_tokens
        state.decision_log.record(now, request.request_id, kind, first.engine_id, second.engine_id, num_tokens)
