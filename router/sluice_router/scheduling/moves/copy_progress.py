"""What follows each step of a copy: offers of blocks, and parts that have come; see ``kv_copies`` for the messages.

A decode hands off when its copy is close. A prompt that is cut ends its first part by itself, and each iteration of its
engine adds to what can be copied.
"""

from __future__ import annotations

from sluice.v1 import engine_pb2
from sluice_router.scheduling.entities import ConnectedEngine, Migration, MigrationPhase
from sluice_router.scheduling.moves import kv_copies, migration
from sluice_router.scheduling.state import RouterState


def handle_offer(state: RouterState, engine: ConnectedEngine, offer: engine_pb2.KvOffer) -> None:
    """Takes a source's answer to a request for its blocks: the target pulls them; without any, the source hands off."""
    move = kv_copies.take_offer(state.outbox, engine, offer)
    if move is None:
        return
    if offer.reason and move.is_cut:
        engine.copies_due.append(move)
    elif offer.reason:
        migration.hand_off(state, move)  # which the source refuses, if the request does not run there
    else:
        kv_copies.pull(state.outbox, move, offer)


def copy_on(state: RouterState, engine: ConnectedEngine) -> None:
    """Asks for what an iteration has added to the first parts of prompts."""
    due, engine.copies_due = engine.copies_due, []
    for move in due:
        if move.request.migration is move and move.phase is MigrationPhase.COPYING:
            kv_copies.ask_for_offer(state.outbox, move)


def handle_part_pulled(state: RouterState, engine: ConnectedEngine, part: engine_pb2.PartPulled, now: float) -> None:
    """Takes a target's answer to a part pull: the next part follows, or the hand-off."""
    kv_copies.take_answer(state.outbox, engine, part.grant_id)
    brought = engine.brought.get(part.grant_id)
    if brought is not None:
        _end_cut(state, brought, part.reason, now)
        return
    move = engine.grants.get(part.grant_id)
    if move is None or move.phase is not MigrationPhase.COPYING:
        return
    if part.reason:
        migration.abandon(state, move, f"part_{part.reason}", now)
        return
    has_progressed = part.num_tokens > move.num_copied_tokens
    move.num_copied_tokens, move.copied_s = part.num_tokens, now
    kept = move.request.kept_kv
    if kept is not None:  # its part has ended meanwhile
        migration.submit_kept(state, move, kept, engine, now)
        return
    if has_progressed and not kv_copies.is_close(move):
        kv_copies.ask_for_offer(state.outbox, move)
        return
    state.decision_log.record(
        now,
        move.request.request_id,
        "copied",
        move.source.engine.engine_id,
        engine.engine_id,
        move.cause.value,
        move.num_copied_tokens,
        move.num_parts,
    )
    migration.hand_off(state, move)


def _end_cut(state: RouterState, move: Migration, reason: str, now: float) -> None:
    """The target has the KV of a prompt's first part, or does without it."""
    if reason:
        migration.abandon(state, move, f"part_{reason}", now)
    else:
        migration.complete(state, move, now)
