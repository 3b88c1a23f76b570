"""Who owns a request: slots, fencing numbers, the queue.

A request has at most one owner. ``submit`` gives it one with a new fencing number, ``resume`` gives it its last one
back, ``enqueue`` lets it wait. Tokens of a former owner are dropped, because its submission has no request any more.
"""

from __future__ import annotations

from sluice.v1 import engine_pb2
from sluice_router.observability.decision_log import DecisionLog
from sluice_router.scheduling import wire_conversion
from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest, PendingResume, Submission
from sluice_router.scheduling.state import RequestQueues, RouterOutbox, RouterState


def submit(
    state: RouterState,
    request: LiveRequest,
    engine: ConnectedEngine,
    now: float,
    *,
    kv: engine_pb2.KvHandle | None = None,
    grant_id: int = 0,
) -> None:
    """Makes an engine the owner of a request, with a new fencing number.

    Args:
        state: The router's state.
        request: Has no owner.
        engine: The new owner.
        now: The router's clock, in seconds.
        kv: Where its KV waits; None: prefill there.
        grant_id: Grant that reserves the room; 0: none.
    """
    assert request.submission is None
    slot = engine.take_slot()
    engine.num_submits += 1
    request.fence += 1
    request.pending_resume = None
    request.last_engine = engine
    request.submission = engine.slots[slot] = Submission(
        engine=engine,
        slot=slot,
        request=request,
        request_id=request.request_id,
        submit_number=engine.num_submits,
    )
    wire_conversion.add_submit(
        state.outbox.message_to(engine),
        request,
        slot=slot,
        submit_number=engine.num_submits,
        now=now,
        kv=kv,
        grant_id=grant_id,
    )


def resume(
    state: RouterState, request: LiveRequest, pending: PendingResume, engine: ConnectedEngine, now: float
) -> None:
    """Gives a request back to the engine whose stream broke, with the same fencing number.

    Args:
        state: The router's state.
        request: Waits.
        pending: What the engine still has of it.
        engine: The engine's new stream; its hello named the request.
        now: The router's clock, in seconds.
    """
    assert request.submission is None
    del state.requests.waiting[request.request_id]
    state.requests.awaiting_resume.pop(request.request_id, None)
    request.pending_resume = None
    bind(state, request, engine, has_token=pending.submission.has_token)
    num_output = len(request.output_token_ids)
    stall_s = 0.0
    if request.lost_since_s is not None:
        stall_s, request.lost_since_s = now - request.lost_since_s, None
        state.metrics.recovery_stall_s["link"].observe(stall_s)
    state.metrics.count("resumed")
    state.decision_log.record(now, request.request_id, "resumed", engine.engine_id, num_output, stall_s)


def bind(state: RouterState, request: LiveRequest, engine: ConnectedEngine, *, has_token: bool) -> None:
    """Makes an engine the owner of a request that it holds for this router, with the fencing number that it has."""
    assert request.submission is None
    slot = engine.take_slot()
    request.last_engine = engine
    request.submission = engine.slots[slot] = Submission(
        engine=engine,
        slot=slot,
        request=request,
        request_id=request.request_id,
        # Submits count per stream; this one belongs to another stream.
        submit_number=0,
        has_token=has_token,
    )
    num_output = len(request.output_token_ids)
    state.outbox.message_to(engine).resumes.add(
        slot=slot, request_id=request.request_id, fence=request.fence, next_output_index=num_output
    )


def enqueue(queues: RequestQueues, request: LiveRequest, now: float) -> None:
    """Lets a request without an owner wait for an engine."""
    assert request.submission is None
    request.waiting_since_s = now
    request.wait_reason = ""
    request.predicted_ttft_s = None
    queues.waiting[request.request_id] = request


def abort(outbox: RouterOutbox, submission: Submission) -> None:
    """Tells an engine to end what it runs in a slot; the slot is free once the engine has answered."""
    submission.request = None
    if not submission.is_aborted:
        submission.is_aborted = True
        outbox.message_to(submission.engine).aborts.add(slot=submission.slot)


def withdraw(state: RouterState, submission: Submission, request: LiveRequest, reason: str, now: float) -> None:
    """Takes a request off an engine that lives on; the caller decides what becomes of it."""
    abort(state.outbox, submission)
    request.submission = None
    record_loss(state.decision_log, submission.engine, request, reason, now)


def record_loss(
    decision_log: DecisionLog, engine: ConnectedEngine, request: LiveRequest, reason: str, now: float
) -> None:
    """Records that an engine no longer owns a request, and since when its client waits for tokens."""
    decision_log.record(now, request.request_id, "lost", engine.engine_id, reason, len(request.output_token_ids))
    if request.first_token_s is not None and request.lost_since_s is None:
        request.lost_since_s = now


def release(outbox: RouterOutbox, submission: Submission) -> None:
    """Lets the source of a hand-off free the KV; the slot is free with it."""
    if submission.is_pinned:
        submission.is_pinned = False
        outbox.message_to(submission.engine).released_slots.append(submission.slot)
        outbox.free_slot(submission)
