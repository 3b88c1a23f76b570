"""Moves of running requests between engines (architecture.md 4.3): one mechanism for every cause.

    proposal ──► target ──► grant asked ──► granted ──► handing off ──► submitted ──► first token: source released
                   │            │              │              │             │
                   └── none     └── refused    └── source     └── refused   └── target lost, or no KV in time:
                       blocked      blocked        ended                        recompute elsewhere

The request runs on its source until the hand-off; without a grant it goes on there and is proposed again. Its owner changes
in one place, ``handle_handed_off``, with a new fencing number. The source keeps the KV until the target has the first token
or the request has ended. A move never outlives its request.

KV moves between equal fingerprints only. Where a draining engine is the last of its fingerprint (in the midst of a roll
that changes dtype or block size), nobody can read its KV: its requests are recomputed elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.kv import blocks_for_tokens
from sluice_core.records import EngineId, MoveCause, Role
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_router.errors import EngineProtocolError
from sluice_router.scheduling import dispatch, wire_conversion
from sluice_router.scheduling.entities import Migration, MigrationPhase

if TYPE_CHECKING:
    from sluice.v1 import engine_pb2
    from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest, Submission
    from sluice_router.scheduling.state import RouterState


def propose(
    state: RouterState, submission: Submission, cause: MoveCause, now: float, *, target_id: EngineId | None = None
) -> str:
    """Begins a move if there is where to and room to ask for it; else the request goes on where it is.

    Args:
        state: The router's state.
        submission: Where the request runs.
        cause: Why it should leave.
        now: The router's clock, in seconds.
        target_id: The target, for a move that somebody asked for; None: the flow policy picks it.

    Returns:
        Why nothing was begun; empty when the target was asked for a grant.
    """
    request, source = submission.request, submission.engine
    assert request is not None
    if request.migration is not None:
        return "moving"
    state.decision_log.record(
        now, request.request_id, "proposed", source.engine_id, cause.value, len(request.output_token_ids)
    )
    target, reason = _pick_target(state, submission, cause, now, target_id)
    if target is None:
        block(state, submission, cause, reason, now)
        return reason
    _ask_for_grant(state, submission, target, cause, now)
    return ""


def propose_first_decode(state: RouterState, submission: Submission, now: float) -> None:
    """Proposes the move of a prefill that has just completed on a P-heavy engine."""
    flow = state.active.flow
    if flow is None or not flow.moves_first_decodes or submission.engine.role is not Role.PREFILL_HEAVY:
        return
    if not state.engines.table.has_uniform_chunk_size:
        propose(state, submission, MoveCause.PREFILL_DONE, now)


def drain(state: RouterState, engine: ConnectedEngine, now: float) -> None:
    """Proposes again the decodes of a draining engine that found no target yet; or has them recomputed elsewhere."""
    is_last = _is_last_of_its_fingerprint(state, engine)
    for submission in list(engine.slots):
        if (
            submission is None
            or submission.request is None
            or not submission.has_token
            or submission.request.migration is not None
        ):
            continue
        if now >= submission.not_before_s:
            submission.not_before_s = now + state.limits.drain_retry_s
            if is_last:
                _recompute_elsewhere(state, submission, submission.request, now)
            else:
                propose(state, submission, MoveCause.DRAIN, now)


def block(state: RouterState, submission: Submission, cause: MoveCause, reason: str, now: float) -> None:
    """Counts a move that did not begin."""
    state.metrics.count("flow_blocked", cause.value, reason)
    state.decision_log.record(now, submission.request_id, "blocked", submission.engine.engine_id, cause.value, reason)


def handle_grant(state: RouterState, engine: ConnectedEngine, grant: engine_pb2.Grant, now: float) -> None:
    """An engine answered a grant request: hand off, or let the request go on."""
    state.engines.table.record_grant_answer(engine.engine_id, grant.grant_id)
    move = engine.grants.get(grant.grant_id)
    if move is None or move.phase is not MigrationPhase.GRANT_ASKED:
        if grant.is_granted and move is None:
            state.outbox.message_to(engine).released_grant_ids.append(grant.grant_id)
        return
    if not grant.is_granted:
        # There is nothing to give back.
        del engine.grants[grant.grant_id]
        abandon(state, move, grant.reason or "refused", now)
        return
    source = move.source
    move.phase = MigrationPhase.HANDING_OFF
    state.outbox.message_to(source.engine).hand_offs.add(slot=source.slot, fence=move.request.fence)
    state.decision_log.record(now, move.request.request_id, "granted", engine.engine_id, move.cause.value)


def handle_hand_off_refused(state: RouterState, submission: Submission, reason: str, now: float) -> None:
    """The source cannot hand off now: the request goes on there."""
    request = submission.request
    if request is not None and request.migration is not None and request.migration.phase is MigrationPhase.HANDING_OFF:
        abandon(state, request.migration, reason or "refused", now)


def handle_handed_off(state: RouterState, submission: Submission, finished: engine_pb2.Finished, now: float) -> None:
    """The source has ended its part and keeps the KV: the target becomes the owner."""
    request = submission.request
    move = None if request is None else request.migration
    submission.is_pinned = True
    if request is None:
        # It was aborted meanwhile: nobody will read that KV.
        dispatch.release(state, submission)
        return
    if move is None or move.phase is not MigrationPhase.HANDING_OFF:
        raise EngineProtocolError(f"slot {submission.slot} was handed off, and nobody had asked for it")
    _check_complete(submission, request, finished)
    submission.request, request.submission = None, None
    target = move.target
    if target is None:
        abandon(state, move, "target_lost", now)
        state.metrics.count("recoveries", "target_lost")
        request.num_recoveries += 1
        dispatch.enqueue(state, request, now)
        return
    move.phase, move.submitted_s = MigrationPhase.SUBMITTED, now
    target.grants.pop(move.grant_id, None)
    _note_move(request, move.cause)
    dispatch.submit(state, request, target, now, kv=finished.kv, grant_id=move.grant_id)
    state.decision_log.record(
        now,
        request.request_id,
        "handed_off",
        submission.engine.engine_id,
        target.engine_id,
        move.cause.value,
        request.fence,
        len(request.output_token_ids),
    )


def _check_complete(submission: Submission, request: LiveRequest, finished: engine_pb2.Finished) -> None:
    """Makes sure that every token of the source has come: the target goes on after the last one that is known here.

    Raises:
        EngineProtocolError: The source counts more, or has KV of more, which is of all but the last.
    """
    num_output, num_prompt = len(request.output_token_ids), len(request.new.prompt_token_ids)
    num_made = max(finished.num_output_tokens, finished.kv.num_tokens + 1 - num_prompt)
    if num_made > num_output:
        raise EngineProtocolError(f"slot {submission.slot} was handed off with {num_made} tokens, {num_output} came")


def complete(state: RouterState, move: Migration, now: float) -> None:
    """The target has the first token: the source may forget the KV."""
    request, target = move.request, move.target
    assert target is not None
    duration_s = now - move.started_s
    state.metrics.count("moves", move.cause.value, "done")
    state.metrics.move_s[move.cause.value].observe(duration_s)
    source_id = move.source.engine.engine_id
    state.decision_log.record(
        now, request.request_id, "moved", source_id, target.engine_id, move.cause.value, round(duration_s, 6)
    )
    request.num_hand_offs += 1
    _close(state, move)


def abandon(state: RouterState, move: Migration, reason: str, now: float) -> None:
    """Ends a move that does not come to its end; whoever owns the request goes on or ends by itself.

    Args:
        state: The router's state.
        move: The move.
        reason: Why, for metrics and explanations.
        now: The router's clock, in seconds.
    """
    target = move.target
    if target is not None and target.grants.pop(move.grant_id, None) is not None:
        state.outbox.message_to(target).released_grant_ids.append(move.grant_id)
        state.engines.table.record_grant_answer(target.engine_id, move.grant_id)
    if move.phase is MigrationPhase.GRANT_ASKED:
        block(state, move.source, move.cause, reason, now)
    state.metrics.count("moves", move.cause.value, reason)
    _close(state, move)


def drop_target(state: RouterState, move: Migration, now: float) -> None:
    """The target of a move is lost before it owned the request."""
    target = move.target
    assert target is not None
    if move.phase is MigrationPhase.GRANT_ASKED:
        abandon(state, move, "target_lost", now)
        return
    # The source was told to hand off: what becomes of the request shows when it has.
    target.migrations_in -= 1
    target.grants.pop(move.grant_id, None)
    move.target = None


def expire_grants(state: RouterState, engine: ConnectedEngine, now: float) -> None:
    """Gives up grant requests that the engine does not answer."""
    for move in list(engine.grants.values()):
        if move.phase is MigrationPhase.GRANT_ASKED and now - move.started_s > state.limits.grant_timeout_s:
            abandon(state, move, "grant_timeout", now)


def start_manual(state: RouterState, request_id: str, engine_id: EngineId, now: float) -> str:
    """Begins a move that somebody asked for.

    Args:
        state: The router's state.
        request_id: The router's id of the request, or the client's.
        engine_id: Where to.
        now: The router's clock, in seconds.

    Returns:
        Why not (control.proto, MoveResponse); empty when the target was asked for a grant.
    """
    request = state.requests.find(request_id)
    if request is None:
        return "unknown_request"
    if engine_id not in state.engines.table:
        return "unknown_engine"
    submission = request.submission
    if submission is None or not submission.has_token:
        return "not_decoding"
    if submission.engine.engine_id == engine_id:
        return "same_engine"
    return propose(state, submission, MoveCause.MANUAL, now, target_id=engine_id)


def _pick_target(
    state: RouterState, submission: Submission, cause: MoveCause, now: float, target_id: EngineId | None
) -> tuple[ConnectedEngine | None, str]:
    """Picks the engine to ask; or says why there is none."""
    request, source = submission.request, submission.engine
    assert request is not None
    if state.active.flow is None or state.active.plan is None:
        return None, "no_plan"
    cap = max(1, state.limits.max_moves_per_engine // state.active.plan.num_routers)
    if source.migrations_out >= cap:
        return None, "source_busy"
    if _is_too_soon(state, request, cause):
        return None, "too_soon"
    if target_id is None:
        unfit = {
            engine.engine_id
            for engine in state.engines.connected.values()
            if engine.migrations_in >= cap or engine.fingerprint != source.fingerprint
        }
        flow_request = FlowRequest(
            request_id=request.request_id,
            cause=cause,
            source=source.engine_id,
            num_blocks=blocks_for_tokens(request.num_tokens + 1, source.spec.block_size_tokens),
            excluded=frozenset(unfit | request.died_on),
        )
        target_id = state.active.flow.target(now, flow_request, state.engines.table)
    target = None if target_id is None else state.engines.connected.get(target_id)
    if target is None:
        return None, "no_target"
    if target.fingerprint != source.fingerprint:
        return None, "fingerprint"
    return (target, "") if target.migrations_in < cap else (None, "target_busy")


def _is_last_of_its_fingerprint(state: RouterState, engine: ConnectedEngine) -> bool:
    """Whether engines take requests over, and none of them can read this one's KV."""
    usable = [state.engines.connected[item.engine_id] for item in state.engines.table if not item.is_draining]
    others = [other for other in usable if other is not engine]
    return bool(others) and all(other.fingerprint != engine.fingerprint for other in others)


def _recompute_elsewhere(state: RouterState, submission: Submission, request: LiveRequest, now: float) -> None:
    """Takes a request off a draining engine; no engine has failed, so that this does not count against the request."""
    dispatch.withdraw(state, submission, request, "fingerprint", now)
    state.metrics.count("recoveries", "fingerprint")
    dispatch.enqueue(state, request, now)


def _is_too_soon(state: RouterState, request: LiveRequest, cause: MoveCause) -> bool:
    """Whether a degradation follows the last move too closely (router.md 3, against ping-pong)."""
    if cause is not MoveCause.DEGRADE or request.num_hand_offs == 0 or state.active.plan is None:
        return False
    since_move = len(request.output_token_ids) - request.moved_at_tokens
    return since_move < state.active.plan.parameters.min_tokens_between_moves


def _ask_for_grant(
    state: RouterState, submission: Submission, target: ConnectedEngine, cause: MoveCause, now: float
) -> None:
    request = submission.request
    assert request is not None
    target.num_grants += 1
    grant_id, num_tokens = target.num_grants, request.num_tokens + 1
    move = Migration(request=request, cause=cause, source=submission, target=target, grant_id=grant_id, started_s=now)
    request.migration = target.grants[grant_id] = move
    submission.engine.migrations_out += 1
    target.migrations_in += 1
    state.outbox.message_to(target).grant_requests.add(
        grant_id=grant_id, num_tokens=num_tokens, cause=wire_conversion.CAUSE_VALUES[cause]
    )
    num_blocks = blocks_for_tokens(num_tokens, target.spec.block_size_tokens)
    state.engines.table.record_grant_request(target.engine_id, grant_id, num_blocks)
    state.decision_log.record(
        now,
        request.request_id,
        "grant_asked",
        submission.engine.engine_id,
        target.engine_id,
        cause.value,
        num_tokens,
    )


def _note_move(request: LiveRequest, cause: MoveCause) -> None:
    """Backflow resets the length that Algorithm 1 sorts by (taichi.txt, 3.3)."""
    request.moved_at_tokens = len(request.output_token_ids)
    if cause is MoveCause.BACKFLOW:
        request.reset_at_tokens = request.moved_at_tokens


def _close(state: RouterState, move: Migration) -> None:
    """Takes a move out of the counts, and releases the KV if the source has handed off."""
    move.request.migration = None
    move.source.engine.migrations_out -= 1
    if move.target is not None:
        move.target.migrations_in -= 1
    dispatch.release(state, move.source)
