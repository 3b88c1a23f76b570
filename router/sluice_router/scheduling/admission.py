"""Admission of requests, and their placement on engines by the core's policy."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from sluice_core.records import Hold, Place, PrefillRequest, Slo
from sluice_core.scheduling.waiting_order import select_urgent
from sluice_router.errors import (
    MIN_RETRY_S,
    DeadlineError,
    InvalidRequestError,
    NoEngineError,
    NotAllowedError,
    OwnerLimitError,
    QueueFullError,
    ShuttingDownError,
    SloInfeasibleError,
)
from sluice_router.scheduling import completion, dispatch, prefixes, wire_conversion
from sluice_router.scheduling.entities import LiveRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_core.records import EngineId, Plan, SloClass
    from sluice_core.scheduling.engine_table import EngineTable
    from sluice_core.scheduling.waiting_order import Urgency
    from sluice_core.strategies.interface import RouterPolicy
    from sluice_router.owner_limits.limiter import Reservation
    from sluice_router.scheduling.requests import NewRequest, ResponseStream
    from sluice_router.scheduling.state import EnginePool, RequestQueues, RouterState

# Shortest time between two placements of the whole queue, and most requests placed at once: bounds the loop's pauses.
ASSIGN_INTERVAL_S = 0.005


def admit(state: RouterState, new: NewRequest, response_stream: ResponseStream, now: float) -> None:
    """Takes a request over.

    Args:
        state: The router's state.
        new: The request.
        response_stream: Where its tokens go.
        now: The router's clock, in seconds.

    Raises:
        InvalidRequestError: Names the field, the value and the limit.
        NotAllowedError: The owner of its API key may not use its class or priority.
        OwnerLimitError: A limit of the owner is reached.
        ShuttingDownError: This router accepts no more.
        QueueFullError: Too many requests wait.
        NoEngineError: No plan is in force.
    """
    plan = _check_accepting(state)
    slo_class = _find_class(plan, new.slo_class)
    _check_length(new, state.active.max_model_len_tokens)
    _check_allowed(state, plan, new, slo_class)
    _check_queue(state, plan, new, now)
    reservation = _reserve(state, new, now)
    request = LiveRequest(
        request_id=new.request_id,
        new=new,
        slo=Slo(
            ttft_s=slo_class.slo.ttft_s if new.ttft_slo_s is None else new.ttft_slo_s,
            tpot_s=slo_class.slo.tpot_s if new.tpot_slo_s is None else new.tpot_slo_s,
        ),
        priority=slo_class.priority if new.priority is None else new.priority,
        response_stream=response_stream,
        itl_s=state.metrics.itl_s[new.slo_class],
        reservation=reservation,
        waiting_since_s=now,
    )
    if wire_conversion.is_random(new.sampling) and not new.sampling.HasField("seed"):
        # With a seed a recovered request goes on with the draws it would have had.
        new.sampling.seed = state.rng.getrandbits(63)
    _register(state, request, now)
    # Behind others the policy decides at the next pass over the queue; alone, a request need not wait for it.
    was_empty = not state.requests.waiting
    state.requests.waiting[request.request_id] = request
    if was_empty:
        assign(state, now)


def assign(state: RouterState, now: float) -> None:
    """Places what waits, in the order that the policy sees fit."""
    policy = state.active.policy
    if policy is None or not state.requests.waiting:
        return
    state.requests.last_assign_s = now
    free = _find_placeable(state.requests)
    prefills = _select(state, free, _make_urgency(policy, now))
    decisions = policy.assign(now, prefills, state.engines.table)
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


def expire(state: RouterState, now: float) -> None:
    """Ends requests whose deadline has passed, or that waited for an engine as long as they may."""
    while state.requests.deadlines and state.requests.deadlines[0][0] <= now:
        _, request_id = heapq.heappop(state.requests.deadlines)
        request = state.requests.live.get(request_id)
        # A caller that came back has another deadline than at first.
        if request is not None and request.new.deadline_s is not None and request.new.deadline_s <= now:
            late = f"the caller's deadline passed after {now - request.new.arrival_s:.1f} s"
            completion.fail(state, request, DeadlineError(late), now)
    queues = state.requests
    limit_s = _note_hold(state, now)
    for request in [item for item in queues.waiting.values() if _waited_s(state, item, now) >= limit_s]:
        why = request.wait_reason or "no_engine"
        message = f"no engine took the request within {limit_s:g} s ({why})"
        # An outage of unknown length is expected to last as long again as it has lasted.
        error = NoEngineError(message, retry_after_s=max(MIN_RETRY_S, now - request.waiting_since_s))
        completion.fail(state, request, error, now)


def _note_hold(state: RouterState, now: float) -> float:
    """Notes that requests are held, if they are; returns how long one may wait, in seconds."""
    limit_s = state.limits.wait_limit_s
    if not state.active.is_holding or state.active.plan is None:
        return limit_s
    state.requests.held_s = now
    return max(limit_s, state.active.plan.hold_s)


def _waited_s(state: RouterState, request: LiveRequest, now: float) -> float:
    """How long a request has waited; once there are engines again, since then."""
    held_s = -math.inf if state.active.is_holding else state.requests.held_s
    return now - max(request.waiting_since_s, held_s)


def end_replaced(state: RouterState, now: float) -> None:
    """Ends what waits for an engine of a model that has been replaced, once none of its engines is left.

    Another model's engine would go on with other tokens than the client has, and answer under this one's name.
    """
    plan = state.active.plan
    if plan is None or not state.model_id or next(iter(plan.served_models), state.model_id) == state.model_id:
        return
    if any(not engine.serves_other_model(state.model_id) for engine in state.engines.connected.values()):
        return
    for request in list(state.requests.waiting.values()):
        if request.request_id not in state.requests.awaiting_resume:
            message = "the model of this request has been replaced, and no engine of it is left; send the request again"
            completion.fail(state, request, NoEngineError(message, retry_after_s=MIN_RETRY_S), now)


def _check_accepting(state: RouterState) -> Plan:
    if not state.status.is_accepting:
        raise ShuttingDownError("this router is about to leave", retry_after_s=MIN_RETRY_S)
    if state.active.plan is None:
        raise NoEngineError("no plan is in force yet", retry_after_s=MIN_RETRY_S)
    return state.active.plan


def _check_queue(state: RouterState, plan: Plan, new: NewRequest, now: float) -> None:
    limit = max(1, state.limits.max_waiting // plan.num_routers)
    if len(state.requests.waiting) >= limit:
        state.statistics.num_arrived += 1
        message = f"{len(state.requests.waiting)} requests wait for an engine, the limit is {limit}"
        oldest = next(iter(state.requests.waiting.values()))
        # The queue moves by its length in about the time that its head has waited.
        error = QueueFullError(message, retry_after_s=max(MIN_RETRY_S, now - oldest.waiting_since_s))
        completion.refuse(state, new, error, now)
        raise error


def _find_class(plan: Plan, name: str) -> SloClass:
    for slo_class in plan.slo_classes:
        if slo_class.name == name:
            return slo_class
    known = ", ".join(repr(slo_class.name) for slo_class in plan.slo_classes)
    raise InvalidRequestError(f"slo_class {name!r} is unknown; known are {known}", param="slo_class")


def _check_allowed(state: RouterState, plan: Plan, new: NewRequest, slo_class: SloClass) -> None:
    """Refuses a class that the owner of the API key may not use, and a priority above that of each class it may."""
    limits = state.limiter.find_limits(new.owner)
    if limits is None or not limits.classes:
        return
    if slo_class.name not in limits.classes:
        known = ", ".join(repr(name) for name in sorted(limits.classes))
        message = f"slo_class {slo_class.name!r} is not open to {new.owner}; open are {known}"
        raise NotAllowedError(message, param="slo_class", code="class_not_allowed")
    highest = max(item.priority for item in plan.slo_classes if item.name in limits.classes)
    if new.priority is not None and new.priority > highest:
        message = f"priority is {new.priority}, at most {highest} is open to {new.owner}"
        raise NotAllowedError(message, param="priority", code="priority_not_allowed")


def _reserve(state: RouterState, new: NewRequest, now: float) -> Reservation | None:
    """Takes a request's share of its owner's limits."""
    try:
        return state.limiter.admit(new.owner, len(new.prompt_token_ids) + new.sampling.max_tokens, now)
    except OwnerLimitError as error:
        completion.refuse_limited(state, new, error)
        raise


def _check_length(new: NewRequest, limit: int) -> None:
    """Refuses what is longer than the model; a limit of 0 is not known yet."""
    prompt_tokens, max_tokens = len(new.prompt_token_ids), new.sampling.max_tokens
    if prompt_tokens < 1:
        raise InvalidRequestError("the prompt has no tokens", param="prompt")
    if max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {max_tokens}, at least 1 is needed", param="max_tokens")
    if limit and prompt_tokens + max_tokens > limit:
        message = (
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: "
            f"together more than the model's {limit}"
        )
        raise InvalidRequestError(message, param="max_tokens", code="context_length_exceeded")


def _register(state: RouterState, request: LiveRequest, now: float) -> None:
    """Puts an admitted request into the tables."""
    new = request.new
    state.requests.live[request.request_id] = request
    state.statistics.num_arrived += 1
    if new.resume_key:
        state.requests.by_resume_key[new.resume_key] = request
    state.requests.note_deadline(new)
    state.metrics.count("tokens", "prompt", by=len(new.prompt_token_ids))
    state.decision_log.record(
        now,
        request.request_id,
        "admitted",
        new.client_request_id,
        len(new.prompt_token_ids),
        new.sampling.max_tokens,
        request.slo.ttft_s,
        request.slo.tpot_s,
        new.slo_class,
        request.priority,
    )


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
        cached_tokens=prefixes.find_cached(pool, request) if pool.prefixes else {},
    )


def _find_avoided(table: EngineTable, request: LiveRequest) -> frozenset[EngineId]:
    """Engines that a request is better not given to; none while there are no others."""
    avoided = request.excluded | request.died_on
    has_others = any(engine.engine_id not in avoided for engine in table if not engine.is_draining)
    return frozenset(avoided) if has_others else frozenset()


def _place(state: RouterState, request: LiveRequest, decision: Place, now: float) -> None:
    engine = state.engines.connected[decision.engine_id]
    del state.requests.waiting[request.request_id]
    request.excluded = frozenset()
    request.prompt_hashes.clear()
    request.route = decision.route
    dispatch.submit(state, request, engine, now)
    state.engines.table.mark_submitted(engine.engine_id, request.request_id, engine.num_submits)
    if request.new.owner and request.first_token_s is None:
        state.fair_share.place(request.new.owner, request.num_tokens, state.limiter.find_weight(request.new.owner))
    role = engine.role.value if engine.role is not None else ""
    state.metrics.count("placements", role, decision.reason)
    state.metrics.queue_s[request.new.slo_class].observe(max(0.0, now - request.waiting_since_s))
    if request.first_token_s is None and math.isfinite(decision.predicted_ttft_s):
        request.predicted_ttft_s = decision.predicted_ttft_s
    state.decision_log.record(
        now,
        request.request_id,
        "submitted",
        engine.engine_id,
        request.fence,
        len(request.output_token_ids),
        request.first_token_s is not None,
    )
    if request.route:
        first, second = request.route
        state.decision_log.record(
            now, request.request_id, "split", first.engine_id, second.engine_id, request.split_output_tokens
        )
