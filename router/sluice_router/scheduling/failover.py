"""What happens to requests when an engine fails: they resume there, or are recomputed elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.v1 import control_pb2, engine_pb2, sampling_pb2
from sluice_core.records import EngineId, RequestId
from sluice_router.errors import EngineFaultError
from sluice_router.limit_type import Limit
from sluice_router.scheduling import completion, dispatch, prefixes
from sluice_router.scheduling.entities import (
    ConnectedEngine,
    LiveRequest,
    Migration,
    MigrationPhase,
    PendingResume,
    Submission,
)
from sluice_router.scheduling.moves import migration
from sluice_router.scheduling.resumption import claims
from sluice_router.scheduling.state import RouterState

# A stream that broke or went silent says nothing about the engine behind it, which may go on with its requests.
RESUMABLE = frozenset({"stream", "silence"})
RESUME_GRACE_S = Limit(
    "resume_grace_s",
    0.3,
    "longest wait of a request for the engine whose stream broke, before it goes elsewhere",
    at_least=0,
)
MAX_RECOVERIES = Limit("max_recoveries", 3, "most times a request goes on elsewhere after a failure", at_least=0)
MAX_DEATHS = Limit("max_deaths", 2, "engines that fail under a request until it is given up", at_least=1)


def lose_engine(state: RouterState, engine: ConnectedEngine, reason: str, now: float, *, fault: str = "") -> None:
    """Takes an engine's stream out of service, and recovers the requests that ran there.

    Args:
        state: The router's state.
        engine: The stream; one that is lost already changes nothing.
        reason: One word for metrics: ``stream``, ``epoch``, ``silence``, ``hang``, ``protocol``.
        now: The router's clock, in seconds.
        fault: What happened, for people.
    """
    if engine.is_lost:
        return
    engine.status = control_pb2.ENGINE_STATE_LOST
    engine.last_fault = fault or reason
    if state.engines.connected.get(engine.engine_id) is engine:
        del state.engines.connected[engine.engine_id]
        state.engines.table.remove(engine.engine_id)
        prefixes.forget(state.engines, engine)
    state.outbox.actions.closes.append((engine, reason))
    state.metrics.count("engine_losses", reason)
    state.status.mark_changed()
    claims.forget_engine(state, engine)
    for move in list(engine.grants.values()):
        migration.drop_target(state, move, now)
    for submission in engine.slots:
        if submission is not None and submission.request is not None:
            _recover(state, submission, submission.request, reason, now)
    for request in list(state.requests.kept.values()):
        if request.kept_kv is not None and request.kept_kv.source.engine is engine:
            give_up_kept(state, request, reason, now)
    if reason in {"silence", "hang"}:
        # A hung process keeps its connections open: engines that pull KV from it would wait for ever.
        _give_up_pulls_from(state, engine, now)


def resume_kept_requests(
    state: RouterState, engine: ConnectedEngine, held: Iterable[engine_pb2.HeldRequest], now: float
) -> None:
    """Resumes what an engine kept of the last stream's requests, as its new stream's hello names them.

    Those that still wait here resume there; the rest are aborted there. What waits for that engine in vain is recovered
    elsewhere.
    """
    for item in held:
        request = state.requests.waiting.get(RequestId(item.request_id))
        pending = None if request is None else request.pending_resume
        is_ours = (
            request is not None
            and pending is not None
            and (pending.submission.engine.engine_id, pending.submission.engine.epoch)
            == (engine.engine_id, engine.epoch)
            # A higher fence here means that another engine has owned the request since.
            and item.fence == request.fence
            # An engine that has fewer tokens than the client got cannot go on with the next one.
            and item.num_output_tokens >= len(request.output_token_ids)
        )
        if is_ours:
            assert request is not None
            assert pending is not None
            dispatch.resume(state, request, pending, engine, now)
        else:
            state.outbox.message_to(engine).aborts.add(held_request_id=item.request_id)
    give_up_resumes(state, engine.engine_id, now)


def give_up_resumes(state: RouterState, engine_id: EngineId, now: float) -> None:
    """Recovers elsewhere what waits for an engine that does not have it, or cannot be reached."""
    for request in list(state.requests.awaiting_resume.values()):
        if request.pending_resume is not None and request.pending_resume.submission.engine.engine_id == engine_id:
            _give_up_resume(state, request, request.pending_resume, now)


def expire_resumes(state: RouterState, now: float) -> None:
    """Recovers requests elsewhere whose engine has not come back in time."""
    for request in list(state.requests.awaiting_resume.values()):
        if request.pending_resume is not None and now >= request.pending_resume.until_s:
            _give_up_resume(state, request, request.pending_resume, now)


def _give_up_resume(state: RouterState, request: LiveRequest, pending: PendingResume, now: float) -> None:
    del state.requests.awaiting_resume[request.request_id], state.requests.waiting[request.request_id]
    _recover_elsewhere(state, pending.submission, request, pending.reason, now)


def expire_pulls(state: RouterState, engine: ConnectedEngine, now: float) -> None:
    """Takes requests off an engine that has not got their KV in time."""
    if not engine.migrations_in:
        return
    for submission in list(engine.slots):
        request = None if submission is None else submission.request
        move = None if request is None else request.migration
        if request is None or move is None or move.phase is not MigrationPhase.SUBMITTED:
            continue
        if migration.is_pull_late(state.limits, move, now):
            _give_up_pull(state, request, move, "pull_timeout", now)


def _give_up_pulls_from(state: RouterState, source: ConnectedEngine, now: float) -> None:
    for request in list(state.requests.live.values()):
        move = request.migration
        if move is not None and move.phase is MigrationPhase.SUBMITTED and move.source.engine is source:
            _give_up_pull(state, request, move, "source_lost", now)


def _give_up_pull(state: RouterState, request: LiveRequest, move: Migration, reason: str, now: float) -> None:
    """Takes a request off the target of its migration, which waits for KV; it is recomputed from its tokens."""
    submission = request.submission
    assert submission is not None
    migration.abandon(state, move, reason, now)
    dispatch.withdraw(state, submission, request, reason, now)
    requeue(state, request, reason, now)


def give_up_kept(state: RouterState, request: LiveRequest, reason: str, now: float) -> None:
    """Ends a finished prefill's wait for an engine that decodes: it is recomputed, and decodes where that is done."""
    assert request.kept_kv is not None
    engine = request.kept_kv.source.engine
    migration.drop_kept(state, request, reason, now)
    dispatch.record_loss(state.decision_log, engine, request, reason, now)
    requeue(state, request, reason, now)


def requeue(state: RouterState, request: LiveRequest, reason: str, now: float) -> None:
    """Puts a request without an owner back into the queue, or ends it when that makes no sense any more.

    Args:
        state: The router's state.
        request: Neither owned nor waiting.
        reason: Why it lost its owner, for metrics.
        now: The router's clock, in seconds.
    """
    if len(request.output_token_ids) >= request.new.sampling.max_tokens:
        # Its last token came; the message that it was the last one did not.
        completion.finish(state, request, sampling_pb2.FINISH_REASON_LENGTH, now)
        return
    request.num_recoveries += 1
    state.metrics.count("recoveries", reason)
    dispatch.enqueue(state.requests, request, now)


def _recover(state: RouterState, submission: Submission, request: LiveRequest, reason: str, now: float) -> None:
    """Takes a request off a lost engine: it waits for a resume if the engine may go on, else it goes elsewhere."""
    engine = submission.engine
    submission.request, request.submission = None, None
    # An engine that was asked to hand off, or that pulls KV which the source frees now, has no copy to be trusted.
    is_whole = request.migration is None or request.migration.phase in {
        MigrationPhase.GRANT_ASKED,
        MigrationPhase.COPYING,
    }
    if request.migration is not None:
        in_time = request.migration.phase is MigrationPhase.SUBMITTED
        migration.abandon(state, request.migration, "target_lost" if in_time else "source_lost", now)
    dispatch.record_loss(state.decision_log, engine, request, reason, now)
    if not is_whole or reason not in RESUMABLE:
        _recover_elsewhere(state, submission, request, reason, now)
        return
    # A silent engine has used up its time already.
    grace_s = state.limits[RESUME_GRACE_S] if reason == "stream" else 0.0
    request.pending_resume = PendingResume(submission=submission, reason=reason, until_s=now + grace_s)
    state.requests.awaiting_resume[request.request_id] = request
    dispatch.enqueue(state.requests, request, now)
    if not grace_s:
        _give_up_resume(state, request, request.pending_resume, now)


def _recover_elsewhere(
    state: RouterState, submission: Submission, request: LiveRequest, reason: str, now: float
) -> None:
    """Queues a request for another engine, or fails it when it was recovered too often."""
    engine = submission.engine
    if submission.submit_number <= engine.load.last_submit_number or submission.has_token:
        # It had reached the scheduler: it may be what killed the engine.
        request.num_deaths += 1
    request.died_on.add(engine.engine_id)
    max_deaths, max_recoveries = state.limits[MAX_DEATHS], state.limits[MAX_RECOVERIES]
    # A request that ran on several engines when they failed may be the cause: no further engine is risked.
    if request.num_deaths >= max_deaths:
        message = f"{request.num_deaths} engines failed while they ran the request; the limit is {max_deaths}"
        completion.fail(state, request, EngineFaultError(message), now)
    elif request.num_recoveries >= max_recoveries:
        message = f"the request went on elsewhere {request.num_recoveries} times; the limit is {max_recoveries}"
        completion.fail(state, request, EngineFaultError(message), now)
    else:
        requeue(state, request, reason, now)
