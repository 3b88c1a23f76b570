"""Migration of running requests between engines: one mechanism for every cause.

    proposal ──► target ──► grant asked ──► copying ──► handing off ──► submitted ──► first token: source released
                   │            │              │              │             │
                   └── none     └── refused    └── source     └── refused   └── target lost, or no KV in time:
                       blocked      blocked        ended                        recompute elsewhere

The request runs on its source until the hand-off, while ``kv_copies`` brings its full KV blocks to the target. The
source keeps the KV until the target has the first token.

A strategy's engines may end a prefill with a hand-off to nobody. Its KV is *kept* there until ``kept_prefills`` has got
a grant for it.
"""

from __future__ import annotations

from sluice.v1 import engine_pb2
from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.records import EngineId, MoveCause
from sluice_core.strategy_parameters import StrategyParameters
from sluice_router.errors import EngineProtocolError
from sluice_router.limit_type import Limit, Limits
from sluice_router.scheduling import dispatch, wire_conversion
from sluice_router.scheduling.entities import (
    ConnectedEngine,
    KeptKv,
    LiveRequest,
    Migration,
    MigrationPhase,
    Submission,
)
from sluice_router.scheduling.moves import kv_copies, move_targets
from sluice_router.scheduling.state import RouterOutbox, RouterState

GRANT_TIMEOUT_S = Limit("grant_timeout_s", 2.0, "longest wait for an answer to a grant request", above=0)
PULL_TIMEOUT_S = Limit("pull_timeout_s", 10.0, "longest wait for a moved request's next token", above=0)
# Before a finished prefill that an engine has refused room asks again: about an iteration of a decode engine.
KEPT_RETRY_S = 0.02
DEFAULT_GRANT_WAIT_S = StrategyParameters().grant_wait_s


def propose(
    state: RouterState, submission: Submission, cause: MoveCause, now: float, *, target_id: EngineId | None = None
) -> str:
    """Asks a target for a grant, if there is a target; else the request goes on where it is.

    Args:
        state: The router's state.
        submission: Where the request runs.
        cause: Why it should leave.
        now: The router's clock, in seconds.
        target_id: The target of a manual migration; None: the flow policy picks one.

    Returns:
        Why no grant was asked for; empty when one was.
    """
    request, source = submission.request, submission.engine
    assert request is not None
    if request.migration is not None:
        return "moving"
    state.decision_log.record(
        now, request.request_id, "proposed", source.engine_id, cause.value, len(request.output_token_ids)
    )
    target, reason = move_targets.pick_target(state, request, source, cause, now, target_id=target_id)
    if target is None:
        record_blocked(state, submission, cause, reason, now)
        return reason
    _ask_for_grant(state, request, submission, target, cause=cause, now=now)
    return ""


def ask_for_kept(state: RouterState, request: LiveRequest, kept: KeptKv, now: float) -> str:
    """Asks a target for room for a finished prefill whose KV waits, if there is one.

    Returns:
        Why no grant was asked for; empty when one was.
    """
    cause = MoveCause.SPLIT if request.split_prompt_tokens else MoveCause.PREFILL_DONE
    target, reason = move_targets.pick_target(state, request, kept.source.engine, cause, now)
    if target is not None:
        _ask_for_grant(state, request, kept.source, target, cause=cause, now=now)
    return reason


def drop_kept(state: RouterState, request: LiveRequest, reason: str, now: float) -> None:
    """Ends a finished prefill's wait for an engine: its KV is released."""
    kept, request.kept_kv = request.kept_kv, None
    assert kept is not None
    del state.requests.kept[request.request_id]
    if request.migration is not None:
        abandon(state, request.migration, reason, now)
    dispatch.release(state.outbox, kept.source)


def propose_first_decode(state: RouterState, submission: Submission, now: float) -> None:
    """Proposes the migration of a request whose prefill has just completed, if its strategy wants that."""
    policy = state.active.policy
    if policy is not None and policy.moves_first_decode(submission.engine.role, state.engines.table):
        propose(state, submission, MoveCause.PREFILL_DONE, now)


def record_blocked(state: RouterState, submission: Submission, cause: MoveCause, reason: str, now: float) -> None:
    """Counts a migration that did not begin."""
    state.metrics.count("flow_blocked", cause.value, reason)
    state.decision_log.record(now, submission.request_id, "blocked", submission.engine.engine_id, cause.value, reason)


def handle_grant(state: RouterState, engine: ConnectedEngine, grant: engine_pb2.Grant, now: float) -> None:
    """Takes an engine's answer to a grant request: the source hands off, or the request goes on there."""
    state.engines.table.record_grant_answer(engine.engine_id, grant.grant_id)
    move = engine.grants.get(grant.grant_id)
    if move is None or move.phase is not MigrationPhase.GRANT_ASKED:
        # The migration was abandoned meanwhile: the target gets its room back.
        if grant.is_granted and move is None:
            state.outbox.message_to(engine).released_grant_ids.append(grant.grant_id)
        return
    if not grant.is_granted:
        # Out of the table first: ``abandon`` would give back a room that was never granted.
        del engine.grants[grant.grant_id]
        if move.request.kept_kv is not None:
            move.request.kept_kv.not_before_s = now + KEPT_RETRY_S
        abandon(state, move, grant.reason or "refused", now)
        return
    if move.request.kept_kv is not None:
        state.decision_log.record(now, move.request.request_id, "granted", engine.engine_id, move.cause.value)
        submit_kept(state, move, move.request.kept_kv, engine, now)
        return
    state.decision_log.record(now, move.request.request_id, "granted", engine.engine_id, move.cause.value)
    if kv_copies.can_copy(move):
        move.phase, move.copied_s = MigrationPhase.COPYING, now
        kv_copies.ask_for_offer(state.outbox, move)
    else:
        hand_off(state, move)


def hand_off(state: RouterState, move: Migration) -> None:
    """Tells the source to end its part; the first part of a prompt ends by itself."""
    move.phase = MigrationPhase.HANDING_OFF
    if move.is_cut:
        return
    num_output_tokens = move.request.split_output_tokens if move.cause is MoveCause.SPLIT else 0
    state.outbox.message_to(move.source.engine).hand_offs.add(
        slot=move.source.slot, fence=move.request.fence, num_output_tokens=num_output_tokens
    )


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
        dispatch.release(state.outbox, submission)
        return
    _check_complete(submission, request, finished)
    if request.split_prompt_tokens:
        _keep(state, submission, request, finished.kv, now)
        _go_on_with_cut(state, request, now)
        return
    if move is None or move.phase is not MigrationPhase.HANDING_OFF:
        _keep(state, submission, request, finished.kv, now)
        return
    submission.request, request.submission = None, None
    # From here on the source does not own the request: the target does, or nobody until it is placed again.
    target = move.target
    if target is None:
        abandon(state, move, "target_lost", now)
        state.metrics.count("recoveries", "target_lost")
        request.num_recoveries += 1
        dispatch.enqueue(state.requests, request, now)
        return
    _submit(state, move, target, finished.kv, now)


def _go_on_with_cut(state: RouterState, request: LiveRequest, now: float) -> None:
    """Lets the target go on with a prompt whose first part has ended; without a grant yet, it is kept."""
    move, kept = request.migration, request.kept_kv
    assert kept is not None
    if move is None or move.phase is MigrationPhase.GRANT_ASKED:
        return
    if move.target is None:
        abandon(state, move, "target_lost", now)
    elif move.grant_id not in move.target.pulled_offers:  # else with the part that is under way
        kv_copies.give_up(move)
        submit_kept(state, move, kept, move.target, now)


def _submit(state: RouterState, move: Migration, target: ConnectedEngine, kv: engine_pb2.KvHandle, now: float) -> None:
    """Makes the target of a migration the owner of the request, which nobody owns."""
    request = move.request
    move.phase, move.submitted_s = MigrationPhase.SUBMITTED, now
    target.grants.pop(move.grant_id, None)
    if move.is_cut:
        target.brought[move.grant_id] = move
    _note_move(request, move.cause)
    dispatch.submit(state, request, target, now, kv=kv, grant_id=move.grant_id)
    state.decision_log.record(
        now,
        request.request_id,
        "handed_off",
        move.source.engine.engine_id,
        target.engine_id,
        move.cause.value,
        request.fence,
        len(request.output_token_ids),
    )


def submit_kept(state: RouterState, move: Migration, kept: KeptKv, target: ConnectedEngine, now: float) -> None:
    """Lets the target of a migration go on with what waits for it."""
    move.request.kept_kv = None
    del state.requests.kept[move.request.request_id]
    _submit(state, move, target, kept.kv, now)


def _keep(
    state: RouterState, submission: Submission, request: LiveRequest, kv: engine_pb2.KvHandle, now: float
) -> None:
    """Lets a finished prefill, which its engine has handed off by itself, wait for an engine with room."""
    num_output = len(request.output_token_ids)
    if num_output != 1 and not request.split_prompt_tokens:
        raise EngineProtocolError(
            f"slot {submission.slot} was handed off after {num_output} tokens, and nobody had asked for it"
        )
    submission.request, request.submission = None, None
    longest_s = DEFAULT_GRANT_WAIT_S if state.active.policy is None else state.active.policy.get_grant_wait_s()
    request.kept_kv = KeptKv(source=submission, kv=kv, until_s=now + longest_s)
    state.requests.kept[request.request_id] = request
    state.decision_log.record(now, request.request_id, "kept", submission.engine.engine_id, longest_s)


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
    if move.num_parts:
        state.metrics.count("kv_copies", "used")
    request.num_hand_offs += 1
    if move.is_cut:
        state.metrics.count("cut_prompts", "moved")
    _close(state.outbox, move)


def abandon(state: RouterState, move: Migration, reason: str, now: float) -> None:
    """Ends a migration that does not complete; the request goes on with its owner, or has ended.

    Args:
        state: The router's state.
        move: The migration.
        reason: Why, for metrics and explanations.
        now: The router's clock, in seconds.
    """
    target = move.target
    if target is not None and target.grants.pop(move.grant_id, None) is not None:
        state.outbox.message_to(target).released_grant_ids.append(move.grant_id)
        state.engines.table.record_grant_answer(target.engine_id, move.grant_id)
    if move.phase is MigrationPhase.GRANT_ASKED:
        record_blocked(state, move.source, move.cause, reason, now)
    else:
        source_id = move.source.engine.engine_id
        state.decision_log.record(now, move.request.request_id, "abandoned", source_id, move.cause.value, reason)
    state.metrics.count("moves", move.cause.value, reason)
    if move.num_parts:
        state.metrics.count("kv_copies", "abandoned")
    kv_copies.give_up(move)
    _close(state.outbox, move)


def drop_target(state: RouterState, move: Migration, now: float) -> None:
    """Handles the loss of a target that did not own the request yet."""
    target = move.target
    assert target is not None
    if move.phase in {MigrationPhase.GRANT_ASKED, MigrationPhase.COPYING}:
        abandon(state, move, "target_lost", now)
        return
    # The source is handing off and answers for the request; it is recomputed elsewhere once the hand-off is complete.
    target.migrations_in -= 1
    target.grants.pop(move.grant_id, None)
    move.target = None


def expire_grants(state: RouterState, engine: ConnectedEngine, now: float) -> None:
    """Gives up grant requests that the engine does not answer, and copies that take too long."""
    for move in list(engine.grants.values()):
        if move.phase is MigrationPhase.GRANT_ASKED and now - move.started_s > state.limits[GRANT_TIMEOUT_S]:
            abandon(state, move, "grant_timeout", now)
        elif move.phase is MigrationPhase.COPYING and kv_copies.is_late(state.limits, move, now):
            abandon(state, move, "copy_timeout", now)


def is_pull_late(limits: Limits, move: Migration, now: float) -> bool:
    """Whether the target, which owns the request, has taken too long to get its KV and make the next token."""
    return now - move.submitted_s > limits[PULL_TIMEOUT_S]


def start_manual(state: RouterState, request_id: str, engine_id: EngineId, now: float) -> str:
    """Begins a manual migration.

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


def _ask_for_grant(
    state: RouterState,
    request: LiveRequest,
    submission: Submission,
    target: ConnectedEngine,
    *,
    cause: MoveCause,
    now: float,
) -> None:
    target.num_grants += 1
    grant_id, num_tokens = target.num_grants, request.num_tokens + 1
    if cause is MoveCause.SPLIT:
        # What it will have where its part is planned to end.
        num_tokens = max(num_tokens, len(request.new.prompt_token_ids) + request.split_output_tokens + 1)
    move = Migration(
        request=request,
        cause=cause,
        source=submission,
        target=target,
        grant_id=grant_id,
        started_s=now,
        is_cut=request.split_prompt_tokens > 0,
    )
    if request.kept_kv is None and not move.is_cut and kv_copies.can_copy(move):
        num_tokens += kv_copies.GROWTH_BLOCKS * target.spec.block_size_tokens
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
    """Ends the part that was planned. Backflow resets the length by which the longest decodes are chosen.

    Source: TaiChi, section 3.3, Algorithm 1.
    """
    request.route = ()
    request.moved_at_tokens = len(request.output_token_ids)
    if cause is MoveCause.BACKFLOW:
        request.reset_at_tokens = request.moved_at_tokens


def make_whole(request: LiveRequest) -> None:
    """Ends the plan of a prompt that was cut, for good."""
    request.route, request.is_whole = (), True


def _close(outbox: RouterOutbox, move: Migration) -> None:
    """Takes a migration out of the counts, and releases the KV if the source has handed off."""
    move.request.migration = None
    move.source.engine.migrations_out -= 1
    if move.target is not None:
        move.target.migrations_in -= 1
        move.target.brought.pop(move.grant_id, None)
    if move.request.kept_kv is None:  # else it asks another engine for room
        dispatch.release(outbox, move.source)
