"""Requests whose clients are gone and may come back: they go on for a stated time, and nobody reads them."""

from __future__ import annotations

from sluice_core.records import RequestId
from sluice_router.scheduling import completion
from sluice_router.scheduling.state import RouterState

# They cost their engines as much as others do; beyond this many the oldest end early.
MAX_DETACHED = 4096


def detach(state: RouterState, request_id: RequestId, now: float) -> None:
    """Lets a request go on without its client; an unknown id is no error."""
    detached = state.requests.detached
    if request_id not in state.requests.live or request_id in detached:
        return
    # As long as engines keep requests of a lost router.
    resume_timeout_s = max((engine.resume_timeout_s for engine in state.engines.connected.values()), default=0.0)
    detached[request_id] = now + resume_timeout_s
    state.decision_log.record(now, request_id, "detached")


def expire(state: RouterState, now: float) -> None:
    """Ends those whose clients have not come back in time."""
    detached = state.requests.detached
    while detached and (next(iter(detached.values())) <= now or len(detached) > MAX_DETACHED):
        completion.cancel(state, state.requests.live[next(iter(detached))], "unclaimed", now)
