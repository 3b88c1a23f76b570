"""How requests end: finished, failed, cancelled. Each ends once, leaves every table, and is counted once."""

from __future__ import annotations

from sluice.v1 import sampling_pb2
from sluice_core.slo_attainment import MET_NOTHING, RequestEnd, SloOutcome, check_slo, compute_tpot_s
from sluice_router.errors import OverloadError, OwnerLimitError, RequestError, RouterError, TakenOverError
from sluice_router.observability.metrics import RouterMetrics
from sluice_router.owner_limits.usage_window import count_computed
from sluice_router.scheduling import dispatch, planner_samples
from sluice_router.scheduling.entities import LiveRequest
from sluice_router.scheduling.moves import migration
from sluice_router.scheduling.requests import Finish, NewRequest, Usage
from sluice_router.scheduling.state import RouterState

_RESULTS = {sampling_pb2.FINISH_REASON_STOP: "stop", sampling_pb2.FINISH_REASON_LENGTH: "length"}


def finish(
    state: RouterState,
    request: LiveRequest,
    reason: sampling_pb2.FinishReason.ValueType,
    now: float,
    *,
    output_tokens: int | None = None,
    stop_token_id: int | None = None,
) -> None:
    """Ends a request well.

    Args:
        state: The router's state.
        request: Has at least one token, or asked for none.
        reason: STOP or LENGTH.
        now: The router's clock, in seconds.
        output_tokens: Output tokens that count; None: all.
        stop_token_id: Stop token that ended it.
    """
    num_output = len(request.output_token_ids) if output_tokens is None else output_tokens
    usage, outcome = _measure(request, num_output, now)
    _remove(state, request, num_output, now)
    if state.active.policy is not None:
        state.active.policy.note_finished(request.request_id, num_output)
    if request.last_engine is not None:
        request.last_engine.num_ended += 1
        request.last_engine.num_met_both += outcome.met_both
    state.outbox.actions.finishes.append(
        (request.response_stream, Finish(reason=reason, stop_token_id=stop_token_id, usage=usage))
    )
    state.decision_log.record(
        now, request.request_id, "finished", _RESULTS[reason], num_output, usage.ttft_s, usage.tpot_s, usage.is_slo_met
    )
    slo_class, metrics = request.new.slo_class, state.metrics
    state.statistics.attainment.record(now, slo_class, RequestEnd.FINISHED, outcome)
    _count(state.metrics, request.new, _RESULTS[reason])
    metrics.count("tokens", "output", by=num_output)
    metrics.duration_s[slo_class].observe(now - request.new.arrival_s)
    if usage.tpot_s is not None:
        metrics.tpot_s[slo_class].observe(usage.tpot_s)
    planner_samples.add(state.statistics, state.limits, request, num_output)


def fail(state: RouterState, request: LiveRequest, error: RouterError, now: float) -> None:
    """Ends a request with an error that its client sees."""
    _remove(state, request, len(request.output_token_ids), now)
    state.outbox.actions.failures.append((request.response_stream, error))
    state.decision_log.record(now, request.request_id, "failed", error.code, error.message)
    end = RequestEnd.REJECTED if isinstance(error, OverloadError) else RequestEnd.FAILED
    if isinstance(error, TakenOverError):
        end = RequestEnd.CANCELLED
    if not isinstance(error, OverloadError | RequestError):
        state.statistics.num_failed += 1
        if request.last_engine is not None:
            request.last_engine.num_ended += 1
            request.last_engine.num_failed += 1
    _count_bad_end(state, request.new, end, error.code, now)


def refuse(state: RouterState, new: NewRequest, error: OverloadError, now: float) -> None:
    """Counts a request that was not admitted for lack of room: it has met nothing."""
    _count_bad_end(state, new, RequestEnd.REJECTED, error.code, now)


def refuse_limited(state: RouterState, new: NewRequest, error: OwnerLimitError) -> None:
    """Counts a request beyond its owner's limits. It is none of the cluster's: attainment does not know of it."""
    owner = state.metrics.label_owner(new.owner)
    state.metrics.count("key_requests", owner, "limited")
    state.metrics.count("key_limited", owner, error.code)
    state.metrics.count("rejected", error.code)


def cancel(state: RouterState, request: LiveRequest, reason: str, now: float) -> None:
    """Ends a request that nobody reads any more; its response stream is not called again."""
    _remove(state, request, len(request.output_token_ids), now)
    state.decision_log.record(now, request.request_id, "cancelled", reason)
    _count_bad_end(state, request.new, RequestEnd.CANCELLED, reason, now)


def _count_bad_end(state: RouterState, new: NewRequest, end: RequestEnd, reason: str, now: float) -> None:
    state.statistics.attainment.record(now, new.slo_class, end)
    _count(state.metrics, new, end.value)
    state.metrics.count("rejected", reason)


def _count(metrics: RouterMetrics, new: NewRequest, result: str) -> None:
    metrics.count("requests", new.slo_class, result)
    if new.owner:
        metrics.count("key_requests", metrics.label_owner(new.owner), result)


def _remove(state: RouterState, request: LiveRequest, num_output: int, now: float) -> None:
    """Takes a request out of every table, and off its engine; what it has used is its owner's."""
    _settle(state, request, num_output, now)
    if state.active.policy is not None:
        state.active.policy.note_finished(request.request_id, 0)
    del state.requests.live[request.request_id]
    if request.new.resume_key:
        state.requests.by_resume_key.pop(request.new.resume_key, None)
        state.requests.detached.pop(request.request_id, None)
    state.requests.waiting.pop(request.request_id, None)
    state.requests.awaiting_resume.pop(request.request_id, None)
    # The end carries what is held back.
    state.outbox.actions.flushes.pop(request.request_id, None)
    if request.kept_kv is not None:
        migration.drop_kept(state, request, "ended", now)
    if request.migration is not None:
        migration.abandon(state, request.migration, "ended", now)
    submission, request.submission = request.submission, None
    if submission is not None:
        state.engines.table.cancel_placement(submission.engine.engine_id, request.request_id, now)
        dispatch.abort(state.outbox, submission)


def _settle(state: RouterState, request: LiveRequest, num_output: int, now: float) -> None:
    """Counts what was computed for an owner, whatever the end."""
    has_run = request.first_token_s is not None
    prompt_tokens, num_output = count_computed(
        len(request.new.prompt_token_ids),
        num_output,
        has_run=has_run,
        is_adopted=request.is_adopted,
        num_adopted_tokens=request.num_adopted_tokens,
    )
    if request.reservation is not None:
        state.limiter.end(request.reservation, prompt_tokens + num_output, now)
    if request.new.owner and has_run:
        state.fair_share.charge(request.new.owner, num_output, state.limiter.find_weight(request.new.owner))
        owner = state.metrics.label_owner(request.new.owner)
        state.metrics.count("key_tokens", owner, "prompt", by=prompt_tokens)
        state.metrics.count("key_tokens", owner, "output", by=num_output)


def _measure(request: LiveRequest, num_output: int, now: float) -> tuple[Usage, SloOutcome]:
    if request.first_token_s is None or num_output < 1:
        ttft_s, tpot_s, outcome = now - request.new.arrival_s, None, MET_NOTHING
    else:
        ttft_s = request.first_token_s - request.new.arrival_s
        tpot_s = compute_tpot_s(request.first_token_s, request.last_token_s, num_output)
        outcome = check_slo(request.slo, ttft_s, tpot_s)
    usage = Usage(
        prompt_tokens=len(request.new.prompt_token_ids),
        output_tokens=num_output,
        cached_tokens=request.cached_tokens,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        num_hand_offs=request.num_hand_offs,
        num_recoveries=request.num_recoveries,
        is_slo_met=outcome.met_both,
    )
    return usage, outcome
