"""Moves of running requests between engines (architecture.md 4.3): one mechanism for every cause.

    proposal ──► target ──► grant asked ──► granted ──► handing off ──► submitted ──► first token: source released
                   │            │              │              │             │
                   └── none     └── refused    └── source     └── refused   └── target lost, or no KV in time:
                       blocked      blocked        ended                        recompute elsewhere

The request runs on its source until the hand-off; without a grant it goes on there and is proposed again. Its owner changes
in one place, ``take_handed_off``, with a new fencing number. The source keeps the KV until the target has the first token
or the request has ended. A move never outlives its request.

KV moves between equal fingerprints only. Where a draining engine is the last of its fingerprint (in the midst of a roll
that changes dtype or block size), nobody can read its KV: its requests are recomputed elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.kv import blocks_for_tokens
from sluice_core.records import EngineId, MoveCause, Role
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_router.scheduling import dispatch, wire_conversion
from sluice_router.scheduling.state import Move, MovePhase, StreamBrokenError

if TYPE_CHECKING:
    from sluice.v1 import engine_pb2
    from sluice_router.scheduling.requests import LiveRequest
    from sluice_router.scheduling.state import Engine, RouterState, Stay


def propose(state: RouterState, stay: Stay, cause: MoveCause, now: float, *, target_id: EngineId | None = None) -> str:
    """Begins a move if there is where to and room to ask for it; else the request goes on where it is.

    Args:
        state: The router's state.
        stay: Where the request runs.
        cause: Why it should leave.
        now: The router's clock, in seconds.
        target_id: The target, for a move that somebody asked for; None: the flow policy picks it.

    Returns:
        Why nothing was begun; empty when the target was asked for a grant.
    """
    request, source = stay.request, stay.engine
    assert request is not None
    if request.move is not None:
        return "moving"
    state.ring.record(now, request.request_id, "proposed", source.engine_id, cause.value, len(request.output_token_ids))
    target, reason = _pick_target(state, stay, cause, now, target_id)
    if target is None:
        block(state, stay, cause, reason, now)
        return reason
    _ask_for_grant(state, stay, target, cause, now)
    return ""


def propose_first_decode(state: RouterState, stay: Stay, now: float) -> None:
    """Proposes the move of a prefill that has just completed on a P-heavy engine."""
    flow = state.flow
    if flow is None or not flow.moves_first_decodes or stay.engine.role is not Role.PREFILL_HEAVY:
        return
    if not state.table.has_uniform_chunk_size:
        propose(state, stay, MoveCause.PREFILL_DONE, now)


def drain(state: RouterState, engine: Engine, now: float) -> None:
    """Proposes again the decodes of a draining engine that found no target yet; or has them recomputed elsewhere."""
    is_last = _is_last_of_its_fingerprint(state, engine)
    for stay in list(engine.slots):
        if stay is None or stay.request is None or not stay.has_token or stay.request.move is not None:
            continue
        if now >= stay.not_before_s:
            stay.not_before_s = now + state.limits.drain_retry_s
            if is_last:
                _recompute_elsewhere(state, stay, stay.request, now)
            else:
                propose(state, stay, MoveCause.DRAIN, now)


def block(state: RouterState, stay: Stay, cause: MoveCause, reason: str, now: float) -> None:
    """Counts a move that did not begin."""
    state.metrics.count("flow_blocked", cause.value, reason)
    state.ring.record(now, stay.request_id, "blocked", stay.engine.engine_id, cause.value, reason)


def take_grant(state: RouterState, engine: Engine, grant: engine_pb2.Grant, now: float) -> None:
    """An engine answered a grant request: hand off, or let the request go on."""
    state.table.record_grant_answer(engine.engine_id, grant.grant_id)
    move = engine.grants.get(grant.grant_id)
    if move is None or move.phase is not MovePhase.GRANT_ASKED:
        if grant.is_granted and move is None:
            state.message_to(engine).released_grant_ids.append(grant.grant_id)
        return
    if not grant.is_granted:
        # There is nothing to give back.
        del engine.grants[grant.grant_id]
        abandon(state, move, grant.reason or "refused", now)
        return
    source = move.source
    move.phase = MovePhase.HANDING_OFF
    state.message_to(source.engine).hand_offs.add(slot=source.slot, fence=move.request.fence)
    state.ring.record(now, move.request.request_id, "granted", engine.engine_id, move.cause.value)


def take_refusal(state: RouterState, stay: Stay, reason: str, now: float) -> None:
    """The source cannot hand off now: the request goes on there."""
    request = stay.request
    if request is not None and request.move is not None and request.move.phase is MovePhase.HANDING_OFF:
        abandon(state, request.move, reason or "refused", now)


def take_handed_off(state: RouterState, stay: Stay, finished: engine_pb2.Finished, now: float) -> None:
    """The source has ended its part and keeps the KV: the target becomes the owner."""
    request = stay.request
    move = None if request is None else request.move
    stay.is_pinned = True
    if request is None:
        # It was aborted meanwhile: nobody will read that KV.
        dispatch.release(state, stay)
        return
    if move is None or move.phase is not MovePhase.HANDING_OFF:
        raise StreamBrokenError(f"slot {stay.slot} was handed off, and nobody had asked for it")
    _check_complete(stay, request, finished)
    stay.request, request.stay = None, None
    target = move.target
    if target is None:
        abandon(state, move, "target_lost", now)
        state.metrics.count("recoveries", "target_lost")
        request.num_recoveries += 1
        dispatch.enqueue(state, request, now)
        return
    move.phase, move.submitted_s = MovePhase.SUBMITTED, now
    target.grants.pop(move.grant_id, None)
    _note_move(request, move.cause)
    dispatch.submit(state, request, target, now, kv=finished.kv, grant_id=move.grant_id)
    state.ring.record(
        now,
        request.request_id,
        "handed_off",
        stay.engine.engine_id,
        target.engine_id,
        move.cause.value,
        request.fence,
        len(request.output_token_ids),
    )


def _check_complete(stay: Stay, request: LiveRequest, finished: engine_pb2.Finished) -> None:
    """Makes sure that every token of the source has come: the target goes on after the last one that is known here.

    Raises:
        StreamBrokenError: The source counts more, or has KV of more, which is of all but the last.
    """
    num_output, num_prompt = len(request.output_token_ids), len(request.new.prompt_token_ids)
    num_made = max(finished.num_output_tokens, finished.kv.num_tokens + 1 - num_prompt)
    if num_made > num_output:
        raise StreamBrokenError(f"slot {stay.slot} was handed off with {num_made} tokens, {num_output} came")


def complete(state: RouterState, move: Move, now: float) -> None:
    """The target has the first token: the source may forget the KV."""
    request, target = move.request, move.target
    assert target is not None
    duration_s = now - move.started_s
    state.metrics.count("moves", move.cause.value, "done")
    state.metrics.move_s[move.cause.value].observe(duration_s)
    source_id = move.source.engine.engine_id
    state.ring.record(
        now, request.request_id, "moved", source_id, target.engine_id, move.cause.value, round(duration_s, 6)
    )
    request.num_hand_offs += 1
    _close(state, move)


def abandon(state: RouterState, move: Move, reason: str, now: float) -> None:
    """Ends a move that does not come to its end; whoever owns the request goes on or ends by itself.

    Args:
        state: The router's state.
        move: The move.
        reason: Why, for metrics and explanations.
        now: The router's clock, in seconds.
    """
    target = move.target
    if target is not None and target.grants.pop(move.grant_id, None) is not None:
        state.message_to(target).released_grant_ids.append(move.grant_id)
        state.table.record_grant_answer(target.engine_id, move.grant_id)
    if move.phase is MovePhase.GRANT_ASKED:
        block(state, move.source, move.cause, reason, now)
    state.metrics.count("moves", move.cause.value, reason)
    _close(state, move)


def drop_target(state: RouterState, move: Move, now: float) -> None:
    """The target of a move is lost before it owned the request."""
    target = move.target
    assert target is not None
    if move.phase is MovePhase.GRANT_ASKED:
        abandon(state, move, "target_lost", now)
        return
    # The source was told to hand off: what becomes of the request shows when it has.
    target.moves_in -= 1
    target.grants.pop(move.grant_id, None)
    move.target = None


def expire_grants(state: RouterState, engine: Engine, now: float) -> None:
    """Gives up grant requests that the engine does not answer."""
    for move in list(engine.grants.values()):
        if move.phase is MovePhase.GRANT_ASKED and now - move.started_s > state.limits.grant_timeout_s:
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
    request = state.find_request(request_id)
    if request is None:
        return "unknown_request"
    if engine_id not in state.table:
        return "unknown_engine"
    stay = request.stay
    if stay is None or not stay.has_token:
        return "not_decoding"
    if stay.engine.engine_id == engine_id:
        return "same_engine"
    return propose(state, stay, MoveCause.MANUAL, now, target_id=engine_id)


def _pick_target(
    state: RouterState, stay: Stay, cause: MoveCause, now: float, target_id: EngineId | None
) -> tuple[Engine | None, str]:
    """Picks the engine to ask; or says why there is none."""
    request, source = stay.request, stay.engine
    assert request is not None
    if state.flow is None or state.plan is None:
        return None, "no_plan"
    cap = max(1, state.limits.max_moves_per_engine // state.plan.num_routers)
    if source.moves_out >= cap:
        return None, "source_busy"
    if _is_too_soon(state, request, cause):
        return None, "too_soon"
    if target_id is None:
        unfit = {
            engine.engine_id
            for engine in state.engines.values()
            if engine.moves_in >= cap or engine.fingerprint != source.fingerprint
        }
        flow_request = FlowRequest(
            request_id=request.request_id,
            cause=cause,
            source=source.engine_id,
            num_blocks=blocks_for_tokens(request.num_tokens + 1, source.spec.block_size_tokens),
            excluded=frozenset(unfit | request.died_on),
        )
        target_id = state.flow.target(now, flow_request, state.table)
    target = None if target_id is None else state.engines.get(target_id)
    if target is None:
        return None, "no_target"
    if target.fingerprint != source.fingerprint:
        return None, "fingerprint"
    return (target, "") if target.moves_in < cap else (None, "target_busy")


def _is_last_of_its_fingerprint(state: RouterState, engine: Engine) -> bool:
    """Whether engines take requests over, and none of them can read this one's KV."""
    usable = [state.engines[item.engine_id] for item in state.table if not item.is_draining]
    others = [other for other in usable if other is not engine]
    return bool(others) and all(other.fingerprint != engine.fingerprint for other in others)


def _recompute_elsewhere(state: RouterState, stay: Stay, request: LiveRequest, now: float) -> None:
    """Takes a request off a draining engine; no engine has failed, so that this does not count against the request."""
    dispatch.take_off(state, stay, request, "fingerprint", now)
    state.metrics.count("recoveries", "fingerprint")
    dispatch.enqueue(state, request, now)


def _is_too_soon(state: RouterState, request: LiveRequest, cause: MoveCause) -> bool:
    """Whether a degradation follows the last move too closely (router.md 3, against ping-pong)."""
    if cause is not MoveCause.DEGRADE or request.num_hand_offs == 0 or state.plan is None:
        return False
    since_move = len(request.output_token_ids) - request.moved_at_tokens
    return since_move < state.plan.parameters.min_tokens_between_moves


def _ask_for_grant(state: RouterState, stay: Stay, target: Engine, cause: MoveCause, now: float) -> None:
    request = stay.request
    assert request is not None
    target.num_grants += 1
    grant_id, num_tokens = target.num_grants, request.num_tokens + 1
    move = Move(request=request, cause=cause, source=stay, target=target, grant_id=grant_id, started_s=now)
    request.move = target.grants[grant_id] = move
    stay.engine.moves_out += 1
    target.moves_in += 1
    state.message_to(target).grant_requests.add(
        grant_id=grant_id, num_tokens=num_tokens, cause=wire_conversion.CAUSE_VALUES[cause]
    )
    num_blocks = blocks_for_tokens(num_tokens, target.spec.block_size_tokens)
    state.table.record_grant_request(target.engine_id, grant_id, num_blocks)
    state.ring.record(
        now,
        request.request_id,
        "grant_asked",
        stay.engine.engine_id,
        target.engine_id,
        cause.value,
        num_tokens,
    )


def _note_move(request: LiveRequest, cause: MoveCause) -> None:
    """Backflow resets the length that Algorithm 1 sorts by (taichi.txt, 3.3)."""
    request.moved_at_tokens = len(request.output_token_ids)
    if cause is MoveCause.BACKFLOW:
        request.reset_at_tokens = request.moved_at_tokens


def _close(state: RouterState, move: Move) -> None:
    """Takes a move out of the counts, and releases the KV if the source has handed off."""
    move.request.move = None
    move.source.engine.moves_out -= 1
    if move.target is not None:
        move.target.moves_in -= 1
    dispatch.release(state, move.source)
