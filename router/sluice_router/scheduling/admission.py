"""Admission of requests: checks, the queue's limit, the owner's limits."""

from __future__ import annotations

from sluice_core.records import Plan, Slo, SloClass
from sluice_router.errors import (
    MIN_RETRY_S,
    InvalidRequestError,
    NoEngineError,
    OwnerLimitError,
    QueueFullError,
    ShuttingDownError,
)
from sluice_router.limit_type import Limit
from sluice_router.owner_limits import permissions
from sluice_router.owner_limits.limiter import Reservation
from sluice_router.scheduling import completion, placement, wire_conversion
from sluice_router.scheduling.entities import LiveRequest
from sluice_router.scheduling.requests import NewRequest, ResponseStream
from sluice_router.scheduling.state import RouterState

MAX_WAITING = Limit(
    "max_waiting",
    4096,
    "most requests that wait for an engine, in all routers of the plan together",
    at_least=1,
)


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
    permissions.check_class(
        new.owner, state.limiter.find_limits(new.owner), plan.slo_classes, slo_class.name, new.priority
    )
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
        placement.assign(state, now)


def _check_accepting(state: RouterState) -> Plan:
    if not state.status.is_accepting:
        raise ShuttingDownError("this router is about to leave", retry_after_s=MIN_RETRY_S)
    if state.active.plan is None:
        raise NoEngineError("no plan is in force yet", retry_after_s=MIN_RETRY_S)
    return state.active.plan


def _check_queue(state: RouterState, plan: Plan, new: NewRequest, now: float) -> None:
    limit = max(1, state.limits[MAX_WAITING] // plan.num_routers)
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
