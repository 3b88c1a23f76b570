"""Tokens of engines to their response streams, and what follows the end of a submission.

``handle_tokens`` is the hot path: no await, no queue, and one flush per response stream that got tokens.
"""

from __future__ import annotations

import logging

from sluice.v1 import engine_pb2, sampling_pb2
from sluice_router.errors import EngineFaultError, EngineProtocolError, InvalidRequestError, TakenOverError
from sluice_router.scheduling import completion, dispatch, failover
from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest, MigrationPhase, Submission
from sluice_router.scheduling.moves import migration
from sluice_router.scheduling.resumption import adoption
from sluice_router.scheduling.state import RouterState

logger = logging.getLogger(__name__)

_ENDS = (sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH)


def handle_tokens(state: RouterState, engine: ConnectedEngine, message: engine_pb2.AttachResponse, now: float) -> None:
    """Delivers the columns of a message, token by token.

    Raises:
        EngineProtocolError: A slot is unknown, or a token is missing.
    """
    # Where the router is compiled, protobuf's fields have no types, and what follows from an untyped value is slow.
    slots: list[int] = list(message.slots)
    token_ids: list[int] = list(message.token_ids)
    indexes: list[int] = list(message.output_indexes)
    if not len(slots) == len(token_ids) == len(indexes):
        raise EngineProtocolError(f"columns of {len(slots)}, {len(token_ids)} and {len(indexes)} values")
    logprobs = {entry.column: entry for entry in message.logprobs} if message.logprobs else None
    table = engine.slots
    num_slots, num_stale = len(table), 0
    for column in range(len(slots)):
        slot, token_id, index = slots[column], token_ids[column], indexes[column]
        submission = table[slot] if slot < num_slots else None
        if submission is None:
            raise EngineProtocolError(f"slot {slot} is unknown")
        request = submission.request
        if request is None:
            # From a former owner: aborted or handed off here, owned elsewhere.
            num_stale += 1
            continue
        output = request.output_token_ids
        num_output = len(output)
        if index != num_output:
            if index > num_output:
                raise EngineProtocolError(f"slot {slot}: token {index} came where {num_output} was due")
            # Delivered already: an engine that resumes may repeat tokens.
            num_stale += 1
            continue
        output.append(token_id)
        if submission.has_token:
            request.itl_s.observe(now - request.last_token_s)
            request.last_token_s = now
        else:
            _note_first_of_submission(state, submission, request, now)
        # A request that did not ask for logprobs has none, even beside one that did.
        _deliver(state, request, token_id, None if logprobs is None else logprobs.get(column), now)
    if num_stale:
        state.metrics.count("stale_tokens", by=num_stale)


def _deliver(
    state: RouterState, request: LiveRequest, token_id: int, logprobs: engine_pb2.TokenLogprobs | None, now: float
) -> None:
    """Hands a token to the request's response stream."""
    try:
        stop_at = request.response_stream.on_token(token_id, logprobs)
    except Exception:  # the outermost frame of a client's code: its fault must not cost the engine's other requests
        logger.exception("request %s: its answer cannot be written", request.request_id)
        state.metrics.count("sink_faults")
        completion.cancel(state, request, "sink_fault", now)
        return
    if stop_at is None:
        state.outbox.actions.flushes[request.request_id] = request
    else:
        completion.finish(state, request, sampling_pb2.FINISH_REASON_STOP, now, output_tokens=stop_at)


def _note_first(state: RouterState, submission: Submission, request: LiveRequest, now: float) -> None:
    """Notes the first token of a request."""
    request.first_token_s = now
    slo_class, ttft_s, predicted_s = request.new.slo_class, now - request.new.arrival_s, request.predicted_ttft_s
    state.metrics.ttft_s[slo_class].observe(ttft_s)
    if predicted_s is not None:
        state.metrics.ttft_prediction_error_s[slo_class].observe(predicted_s - ttft_s)
    state.decision_log.record(now, request.request_id, "first_token", submission.engine.engine_id, ttft_s, predicted_s)


def _note_first_of_submission(state: RouterState, submission: Submission, request: LiveRequest, now: float) -> None:
    """Notes the first token of a submission: what began with it, and what it completes."""
    submission.has_token = True
    if request.first_token_s is None:
        _note_first(state, submission, request, now)
    else:
        request.itl_s.observe(now - request.last_token_s)
    request.last_token_s = now
    if request.lost_since_s is not None:
        stall_s, request.lost_since_s = now - request.lost_since_s, None
        state.metrics.recovery_stall_s["engine"].observe(stall_s)
        state.decision_log.record(
            now,
            request.request_id,
            "recovered",
            submission.engine.engine_id,
            len(request.output_token_ids),
            stall_s,
        )
    if request.migration is not None and request.migration.phase is MigrationPhase.SUBMITTED:
        migration.complete(state, request.migration, now)
    elif len(request.output_token_ids) < request.new.sampling.max_tokens:
        migration.propose_first_decode(state, submission, now)


def look_up(engine: ConnectedEngine, slot: int) -> Submission | None:
    """Finds what a slot of an engine holds; None: nothing, or there is no such slot."""
    return engine.slots[slot] if slot < len(engine.slots) else None


def _find_submission(engine: ConnectedEngine, slot: int) -> Submission:
    submission = look_up(engine, slot)
    if submission is None:
        raise EngineProtocolError(f"slot {slot} is unknown")
    return submission


def handle_finished(state: RouterState, engine: ConnectedEngine, finished: engine_pb2.Finished, now: float) -> None:
    """Ends a submission; what that means for its request depends on the reason.

    Raises:
        EngineProtocolError: The slot is unknown, or tokens are missing.
    """
    submission = _find_submission(engine, finished.slot)
    if submission.request is not None:
        submission.request.cached_tokens = max(submission.request.cached_tokens, finished.num_cached_tokens)
    if finished.reason == sampling_pb2.FINISH_REASON_HANDED_OFF:
        if not adoption.take_stray_hand_off(state, submission, now):
            migration.handle_handed_off(state, submission, finished, now)
        return
    request = submission.request
    if request is not None and finished.reason in _ENDS and finished.num_output_tokens > len(request.output_token_ids):
        raise EngineProtocolError(
            f"slot {finished.slot} ended with {finished.num_output_tokens} tokens, {len(request.output_token_ids)} came"
        )
    submission.request = None
    state.outbox.free_slot(submission)
    if request is None:
        return
    request.submission = None
    if finished.reason in _ENDS:
        stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
        completion.finish(state, request, finished.reason, now, stop_token_id=stop_token_id)
        return
    _handle_bad_end(state, engine, request, finished, now)


def _handle_bad_end(
    state: RouterState, engine: ConnectedEngine, request: LiveRequest, finished: engine_pb2.Finished, now: float
) -> None:
    """A submission ended before its request did."""
    state.engines.table.cancel_placement(engine.engine_id, request.request_id, now)
    if request.migration is not None:
        migration.abandon(state, request.migration, "target_failed", now)
    if finished.reason == sampling_pb2.FINISH_REASON_REFUSED:
        completion.fail(state, request, InvalidRequestError(finished.error or "an engine refused the request"), now)
    elif finished.reason == sampling_pb2.FINISH_REASON_ERROR:
        message = f"engine {engine.engine_id} cannot run the request: {finished.error or 'no reason given'}"
        completion.fail(state, request, EngineFaultError(message), now)
    elif finished.reason == sampling_pb2.FINISH_REASON_CLAIMED:
        completion.fail(state, request, TakenOverError("the client goes on with the answer at another router"), now)
    elif finished.reason == sampling_pb2.FINISH_REASON_RETURNED:
        state.decision_log.record(now, request.request_id, "returned", engine.engine_id)
        request.excluded |= {engine.engine_id}
        dispatch.enqueue(state.requests, request, now)
    else:
        failover.requeue(state, request, "aborted", now)
