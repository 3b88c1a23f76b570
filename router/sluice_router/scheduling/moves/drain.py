"""Decodes leave a draining engine: by moves, or recomputed elsewhere where nobody can read their KV."""

from __future__ import annotations

from sluice.v1 import control_pb2
from sluice_core.records import MoveCause
from sluice_router.limit_type import Limit
from sluice_router.scheduling import dispatch
from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest, Submission
from sluice_router.scheduling.moves import migration
from sluice_router.scheduling.state import EnginePool, RouterState, RouterStatus

DRAIN_RETRY_S = Limit("drain_retry_s", 0.25, "pause before a draining engine's decode is proposed again", above=0)


def drain(state: RouterState, engine: ConnectedEngine, now: float) -> None:
    """Moves decodes off a draining engine: proposes them again until they find a target, or recomputes them."""
    # Nobody can read the KV of the last engine of its fingerprint, as in a roll that changes dtype or block size.
    is_last = _is_last_of_its_fingerprint(state.engines, engine)
    for submission in list(engine.slots):
        if (
            submission is None
            or submission.request is None
            or not submission.has_token
            or submission.request.migration is not None
        ):
            continue
        if now >= submission.not_before_s:
            submission.not_before_s = now + state.limits[DRAIN_RETRY_S]
            if is_last:
                _recompute_elsewhere(state, submission, submission.request, now)
            else:
                migration.propose(state, submission, MoveCause.DRAIN, now)


def _is_last_of_its_fingerprint(engines: EnginePool, engine: ConnectedEngine) -> bool:
    """Whether engines take requests over, and none of them can read this one's KV."""
    usable = [engines.connected[item.engine_id] for item in engines.table if not item.is_draining]
    others = [other for other in usable if other is not engine]
    return bool(others) and all(other.fingerprint != engine.fingerprint for other in others)


def _recompute_elsewhere(state: RouterState, submission: Submission, request: LiveRequest, now: float) -> None:
    """Takes a request off a draining engine; no engine has failed, so that this does not count against the request."""
    dispatch.withdraw(state, submission, request, "fingerprint", now)
    state.metrics.count("recoveries", "fingerprint")
    dispatch.enqueue(state.requests, request, now)


def note_drained(router_status: RouterStatus, engine: ConnectedEngine) -> None:
    """Notes whether an engine serves, drains, or is drained: nothing runs there, and nobody reads KV from it."""
    load = engine.load
    is_busy = bool(load.queued_requests or load.running_decodes or load.pulling_requests or load.kv_blocks_pinned)
    if not engine.is_draining:
        status = control_pb2.ENGINE_STATE_READY
    elif is_busy or engine.num_taken_slots:
        status = control_pb2.ENGINE_STATE_DRAINING
    else:
        status = control_pb2.ENGINE_STATE_DRAINED
    if engine.status not in {status, control_pb2.ENGINE_STATE_REFUSED, control_pb2.ENGINE_STATE_LOST}:
        engine.status = status
        router_status.mark_changed()
