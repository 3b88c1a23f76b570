"""What one message of an engine brings: tokens and ends (``token_delivery``), answers, proposals, load."""

from __future__ import annotations

from sluice.v1 import engine_pb2
from sluice_core.records import EngineId, MoveCause
from sluice_core.scheduling.engine_table import EngineTable
from sluice_router.scheduling import plan, prefixes, token_delivery, wire_conversion
from sluice_router.scheduling.entities import ConnectedEngine
from sluice_router.scheduling.moves import copy_progress, drain, migration
from sluice_router.scheduling.resumption import claims
from sluice_router.scheduling.state import RouterState

# Of iterations that only decode, every so many teach the latency model: neighbours say nearly the same.
LEARN_EVERY = 4


def handle_message(state: RouterState, engine: ConnectedEngine, message: engine_pb2.AttachResponse, now: float) -> None:
    """Takes one message of an engine.

    Args:
        state: The router's state.
        engine: Whose message it is; a lost one's changes nothing.
        message: The message; the first one of a stream, with hello, is not for here.
        now: When it was received, in seconds.

    Raises:
        EngineProtocolError: The engine broke the protocol; the caller gives the stream up.
    """
    if engine.is_lost:
        return
    engine.last_heard_s = now
    if message.slots:
        token_delivery.handle_tokens(state, engine, message, now)
    for finished in message.finished:
        token_delivery.handle_finished(state, engine, finished, now)
    _handle_answers(state, engine, message, now)
    if message.HasField("configured"):
        plan.handle_configured(state, engine, message.configured)
    if message.HasField("load"):
        _handle_load(state, engine, message.load, now)
    for usage in message.usage:
        state.usage_sharing.take(usage, now, is_history=message.HasField("hello"))
    if message.HasField("prefixes"):
        prefixes.take_changes(state.engines, engine, message.prefixes)
    for proposal in message.proposals:
        _handle_proposal(state, engine, proposal, now)
    if message.fault:
        engine.last_fault = message.fault
        state.status.mark_changed()


def _handle_answers(
    state: RouterState, engine: ConnectedEngine, message: engine_pb2.AttachResponse, now: float
) -> None:
    """Takes what an engine answers to claims, grant requests and hand-offs."""
    for answer in message.claim_answers:
        claims.take_answer(state, engine, answer)
    for grant in message.grants:
        migration.handle_grant(state, engine, grant, now)
    for offer in message.kv_offers:
        copy_progress.handle_offer(state, engine, offer)
    for part in message.parts_pulled:
        copy_progress.handle_part_pulled(state, engine, part, now)
    for refused in message.hand_offs_refused:
        # The request may have ended by itself before the hand-off reached the engine.
        submission = token_delivery.look_up(engine, refused.slot)
        if submission is not None:
            migration.handle_hand_off_refused(state, submission, refused.reason, now)


def _handle_proposal(state: RouterState, engine: ConnectedEngine, proposal: engine_pb2.Proposal, now: float) -> None:
    """An engine proposes a move; one about a request that has ended meanwhile changes nothing."""
    submission = token_delivery.look_up(engine, proposal.slot)
    cause = wire_conversion.CAUSES.get(proposal.cause)
    if submission is None or submission.request is None or cause is None:
        return
    # The first part of a prompt has no token, and is proposed when it begins.
    if submission.has_token or (cause is MoveCause.SPLIT and submission.request.split_prompt_tokens):
        migration.propose(state, submission, cause, now)


def _handle_load(state: RouterState, engine: ConnectedEngine, load: engine_pb2.LoadReport, now: float) -> None:
    """Takes a load report, and the iteration that it measured."""
    engine_id = EngineId(engine.engine_id)
    if load.transport != engine.load.transport:
        state.status.mark_changed()
    engine.load = load
    # Iterations for other routers count too; they show in the age alone when their message was not for us.
    engine.progress_s = max(engine.progress_s, now - load.iteration_age_s)
    known = engine_id in state.engines.table
    iteration = load.iteration
    if load.HasField("iteration") and iteration.number > engine.num_iterations:
        engine.num_iterations = iteration.number
        copy_progress.copy_on(state, engine)
        if known and (iteration.num_chunks or iteration.number % LEARN_EVERY == 0):
            state.engines.table.observe_iteration(
                engine_id, wire_conversion.shape_from(iteration), iteration.duration_s
            )
    if load.is_draining and not engine.is_draining:
        plan.begin_drain(state, engine)
    if known:
        state.engines.table.report(
            engine_id, wire_conversion.load_from(load, now, _remaining_s(state.engines.table, engine, load)), now
        )
    drain.note_drained(state.status, engine)


def _remaining_s(table: EngineTable, engine: ConnectedEngine, load: engine_pb2.LoadReport) -> float:
    """Expected rest of the iteration under way; where an engine does not say what it is, it is like the last one.

    A prefill under way counts nowhere else: its tokens are no more queued.
    """
    if load.HasField("under_way"):
        iteration, is_running = load.under_way, load.under_way.prefill_tokens + load.under_way.num_decodes > 0
    else:
        iteration, is_running = load.iteration, load.running_decodes + load.queued_prefill_tokens > 0
        is_running = is_running and load.HasField("iteration")
    if not is_running:
        return 0.0
    estimate_s = table[engine.engine_id].latency.estimate_shape_s(wire_conversion.shape_from(iteration))
    return max(0.0, estimate_s - load.iteration_age_s)
