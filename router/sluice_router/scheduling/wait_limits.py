"""How long requests may wait: the caller's deadline, the longest wait for an engine; longer if held or begun."""

from __future__ import annotations

import heapq
import math

from sluice.v1 import control_pb2
from sluice_core.scheduling.router_wait_limit import ROUTER_WAIT_LIMIT_S
from sluice_router.errors import MIN_RETRY_S, DeadlineError, NoEngineError, ShuttingDownError
from sluice_router.limit_type import Limit
from sluice_router.scheduling import completion
from sluice_router.scheduling.entities import LiveRequest
from sluice_router.scheduling.state import RouterState

WAIT_LIMIT_S = Limit("wait_limit_s", ROUTER_WAIT_LIMIT_S, "longest wait for an engine", above=0)
# Where one engine is all that decodes, its requests wait until it runs again: a start takes minutes for a large model.
# Their clients have tokens already, and could only ask for all of them again.
STREAM_WAIT_LIMIT_S = Limit("stream_wait_limit_s", 600.0, "longest wait of a request whose client has tokens", above=0)


def expire(state: RouterState, now: float) -> None:
    """Ends requests whose deadline has passed, or that waited for an engine as long as they may."""
    while state.requests.deadlines and state.requests.deadlines[0][0] <= now:
        _, request_id = heapq.heappop(state.requests.deadlines)
        request = state.requests.live.get(request_id)
        # A caller that came back has another deadline than at first.
        if request is not None and request.new.deadline_s is not None and request.new.deadline_s <= now:
            late = f"the caller's deadline passed after {now - request.new.arrival_s:.1f} s"
            completion.fail(state, request, DeadlineError(late), now)
    limit_s = _note_hold(state, now)
    stream_limit_s = max(limit_s, _stream_limit_s(state))
    for request in list(state.requests.waiting.values()):
        longest_s = stream_limit_s if request.output_token_ids else limit_s
        if _waited_s(state, request, now) < longest_s:
            continue
        why = request.wait_reason or "no_engine"
        message = f"no engine took the request within {longest_s:g} s ({why})"
        # An outage of unknown length is expected to last as long again as it has lasted.
        error = NoEngineError(message, retry_after_s=max(MIN_RETRY_S, now - request.waiting_since_s))
        completion.fail(state, request, error, now)


def _stream_limit_s(state: RouterState) -> float:
    """How long a request may wait whose client has tokens, in seconds."""
    engines = state.engines.connected.values()
    if engines and all(engine.status == control_pb2.ENGINE_STATE_REFUSED for engine in engines):
        return 0.0  # they serve another model, and are taken once no stream of the old one waits
    return state.limits[STREAM_WAIT_LIMIT_S]


def _note_hold(state: RouterState, now: float) -> float:
    """Notes that requests are held, if they are; returns how long one may wait, in seconds."""
    limit_s = state.limits[WAIT_LIMIT_S]
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


def end_abandoned(state: RouterState, now: float) -> None:
    """Ends prompts that wait at a router that leaves while all its engines leave too, as in a cluster that is deleted.

    Who has tokens already waits on: where the engines are only replaced, new ones take the request.
    """
    engines = state.engines.connected.values()
    if state.status.is_accepting or not engines or not all(engine.is_draining for engine in engines):
        return
    for request in list(state.requests.waiting.values()):
        if not request.output_token_ids and request.request_id not in state.requests.awaiting_resume:
            message = "this router and its engines are about to leave, and none of them had begun the request"
            completion.fail(state, request, ShuttingDownError(message, retry_after_s=MIN_RETRY_S), now)
