"""Goes on with an answer that another router began, or that another connection of its client had.

A request that runs is resumed where it runs, at its next token. One whose part on an engine has ended is recomputed
from prompt and tokens, as after the loss of an engine. One that has ended ends here once more, for its last tokens.
"""

from __future__ import annotations

from dataclasses import replace

from sluice.v1 import sampling_pb2
from sluice_core.records import Slo
from sluice_router.errors import MIN_RETRY_S, EngineFaultError, NoEngineError, ShuttingDownError, TakenOverError
from sluice_router.scheduling import completion, dispatch
from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest, MigrationPhase, Submission
from sluice_router.scheduling.moves import migration
from sluice_router.scheduling.requests import FoundRequest, NewRequest, ResponseStream
from sluice_router.scheduling.state import RouterState

_ENDS = (sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH)


def adopt(
    state: RouterState,
    found: FoundRequest,
    new: NewRequest,
    response_stream: ResponseStream,
    now: float,
    *,
    stop_at: int | None,
) -> None:
    """Goes on with a request that was found.

    Args:
        state: The router's state.
        found: Where and how it is.
        new: What its first router had admitted.
        response_stream: Has taken the tokens of ``found``.
        now: The router's clock, in seconds.
        stop_at: Output tokens up to the stop string that they complete; None: they complete none.

    Raises:
        ShuttingDownError: This router accepts no more.
        NoEngineError: It has changed hands since it was found.
    """
    if not state.status.is_accepting:
        raise ShuttingDownError("this router is about to leave", retry_after_s=MIN_RETRY_S)
    live = state.requests.live.get(new.request_id)
    if live is not found.live:
        raise NoEngineError("the answer has changed hands meanwhile", retry_after_s=MIN_RETRY_S)
    if live is not None:
        live.new = replace(live.new, deadline_s=new.deadline_s)
        state.requests.note_deadline(live.new)
        _take_over(state, live, found, response_stream, now)
        return
    request = _make_live(state, found, new, response_stream, now)
    state.requests.live[request.request_id] = request
    state.requests.by_resume_key[new.resume_key] = request
    state.requests.note_deadline(new)
    engine = _find_engine(found)
    engine_id = "" if engine is None else engine.engine_id
    state.decision_log.record(now, request.request_id, "adopted", engine_id, len(request.output_token_ids))
    how = _go_on(state, request, found, stop_at, now)
    state.metrics.count("adopted", how)


def _take_over(
    state: RouterState,
    request: LiveRequest,
    found: FoundRequest,
    response_stream: ResponseStream,
    now: float,
) -> None:
    """Gives a request that runs here another response stream."""
    known = len(found.output_token_ids)
    if len(request.output_token_ids) > known and request.new.sampling.HasField("num_logprobs"):
        _rewind_live(state, request, known, now)
    for token_id in request.output_token_ids[known:]:
        response_stream.on_token(token_id, None)
    state.requests.detached.pop(request.request_id, None)
    error = TakenOverError("the client goes on with the answer on another connection")
    state.outbox.actions.failures.append((request.response_stream, error))
    request.response_stream = response_stream
    state.outbox.actions.flushes[request.request_id] = request
    state.metrics.count("adopted", "here")


def _rewind_live(state: RouterState, request: LiveRequest, num_tokens: int, now: float) -> None:
    """Makes the tokens behind ``num_tokens`` once more: only their first stream had their logprobs."""
    del request.output_token_ids[num_tokens:]
    submission = request.submission
    if request.kept_kv is not None:
        migration.drop_kept(state, request, "rewound", now)
    if request.migration is not None:
        migration.abandon(state, request.migration, "rewound", now)
    if submission is not None:
        dispatch.withdraw(state, submission, request, "rewound", now)
    # Else it waits already, or its engine has it and sends the tokens behind ``num_tokens`` again.
    if request.request_id not in state.requests.waiting:
        recompute(state, request, now)


def _make_live(
    state: RouterState, found: FoundRequest, new: NewRequest, response_stream: ResponseStream, now: float
) -> LiveRequest:
    submit, num_output = found.submit, len(found.output_token_ids)
    history = submit.history
    return LiveRequest(
        request_id=new.request_id,
        new=new,
        slo=Slo(ttft_s=submit.ttft_slo_s, tpot_s=submit.tpot_slo_s),
        priority=submit.priority,
        response_stream=response_stream,
        itl_s=state.metrics.itl_s[new.slo_class],
        output_token_ids=found.output_token_ids,
        fence=submit.fence,
        first_token_s=_estimate_first_token_s(found, now),
        last_token_s=now,
        waiting_since_s=now,
        lost_since_s=now if num_output else None,
        reset_at_tokens=found.num_tokens_before - submit.output_tokens_since_reset,
        is_adopted=True,
        num_adopted_tokens=num_output,
        reservation=state.limiter.take_over(new.owner, new.sampling.max_tokens - num_output, now),
        num_hand_offs=history.num_hand_offs + submit.HasField("kv"),
        num_recoveries=history.num_recoveries,
        cached_tokens=max(history.num_cached_tokens, 0 if found.ended is None else found.ended.num_cached_tokens),
    )


def _find_engine(found: FoundRequest) -> ConnectedEngine | None:
    """The engine that holds the request for this router, unless its stream has ended since."""
    engine = found.engine
    return engine if isinstance(engine, ConnectedEngine) and not engine.is_lost else None


def _estimate_first_token_s(found: FoundRequest, now: float) -> float | None:
    """When the client's first token came: known from the second engine on; before, tokens count as evenly spaced."""
    if found.submit.HasField("since_first_token_s"):
        return now - found.submit.since_first_token_s - found.elapsed_s
    num_output = len(found.output_token_ids)
    return now - found.elapsed_s * (num_output - 1) / num_output if num_output else None


def _go_on(state: RouterState, request: LiveRequest, found: FoundRequest, stop_at: int | None, now: float) -> str:
    """Goes on as the request's state demands; returns how, for metrics."""
    if stop_at is not None or (found.ended is not None and found.ended.reason in _ENDS):
        _end(state, request, found, stop_at, now)
        return "ended"
    if found.ended is not None and found.ended.reason == sampling_pb2.FINISH_REASON_ERROR:
        completion.fail(state, request, EngineFaultError(found.ended.error or "the engine gave no reason"), now)
        return "failed"
    if len(request.output_token_ids) >= request.new.sampling.max_tokens:
        _end(state, request, found, None, now)
        return "ended"
    engine = _find_engine(found)
    if engine is not None and found.ended is not None:  # rewound
        state.outbox.message_to(engine).aborts.add(held_request_id=request.request_id)
    elif engine is not None:
        # After a prefill there, where it decodes is not decided yet.
        dispatch.bind(state, request, engine, has_token=found.num_tokens_before > 0)
        return "running"
    recompute(state, request, now)
    return "recomputed"


def _end(state: RouterState, request: LiveRequest, found: FoundRequest, stop_at: int | None, now: float) -> None:
    engine = _find_engine(found)
    if engine is not None:
        state.outbox.message_to(engine).aborts.add(held_request_id=request.request_id)
    ended = found.ended
    if stop_at is not None:
        completion.finish(state, request, sampling_pb2.FINISH_REASON_STOP, now, output_tokens=stop_at)
    elif ended is not None and ended.reason in _ENDS:
        stop_token_id = ended.stop_token_id if ended.HasField("stop_token_id") else None
        completion.finish(state, request, ended.reason, now, stop_token_id=stop_token_id)
    else:
        completion.finish(state, request, sampling_pb2.FINISH_REASON_LENGTH, now)


def recompute(state: RouterState, request: LiveRequest, now: float) -> None:
    """Places a request without an owner again."""
    request.num_recoveries += 1
    state.metrics.count("recoveries", "router_lost")
    dispatch.enqueue(state.requests, request, now)


def take_stray_hand_off(state: RouterState, submission: Submission, now: float) -> bool:
    """Recomputes a request that its former router had told its engine to hand off.

    Returns:
        False when this router, or the engine by itself after a prefill, has handed it off.
    """
    request = submission.request
    if (
        request is None
        or not request.is_adopted
        or (request.migration is not None and request.migration.phase is not MigrationPhase.GRANT_ASKED)
        or len(request.output_token_ids) == 1
        or request.split_prompt_tokens
    ):
        return False
    submission.request, request.submission = None, None
    if request.migration is not None:
        migration.abandon(state, request.migration, "handed_off", now)
    submission.is_pinned = True
    dispatch.release(state.outbox, submission)
    dispatch.record_loss(state.decision_log, submission.engine, request, "router_lost", now)
    recompute(state, request, now)
    return True
