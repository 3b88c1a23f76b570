"""Copies of KV in parts, while the request goes on where it is: the messages between source and target.

    source: offer asked ──► offered (blocks pinned) ─────────────────────► released
    target:                          └──► part pulled into the grant ──────┘ answered

A part is read before its offer is released, so that its blocks stay what they are. An offer whose reader was lost ends
with its lease. ``migration`` decides when to copy on and when to hand off; a prefill that still computes can be copied
by the same functions.
"""

from __future__ import annotations

from itertools import islice

from sluice.v1 import engine_pb2
from sluice_core.kv_copy_rules import is_copy_close
from sluice_core.records import MoveCause
from sluice_router.limit_type import Limit, Limits
from sluice_router.scheduling.entities import ConnectedEngine, Migration
from sluice_router.scheduling.state import RouterOutbox

# Blocks that a grant reserves beyond the request's present tokens: it grows while it is copied.
GROWTH_BLOCKS = 1
COPY_TIMEOUT_S = Limit(
    "copy_timeout_s", 5.0, "longest time that KV is copied while its request goes on where it is", above=0
)


def can_copy(move: Migration) -> bool:
    """Whether both engines copy in parts, there is a full block to begin with, and no end is planned ahead."""
    target, source = move.target, move.source.engine
    num_tokens = move.request.split_prompt_tokens if move.is_cut else move.request.num_tokens
    return (
        # The source must know the end of a decode's part before it comes there.
        (move.cause is not MoveCause.SPLIT or move.is_cut)
        and target is not None
        and target.pulls_parts
        and source.pulls_parts
        and num_tokens > source.spec.block_size_tokens
    )


def is_close(move: Migration) -> bool:
    """Whether what the target lacks is short enough to stop the stream for it, or copying on is of no use."""
    block_size_tokens = move.source.engine.spec.block_size_tokens
    if move.is_cut:  # nothing is stopped for it: all full blocks are copied
        return move.num_copied_tokens + block_size_tokens > move.request.split_prompt_tokens
    return is_copy_close(move.request.num_tokens, move.num_copied_tokens, move.num_parts, block_size_tokens)


def is_late(limits: Limits, move: Migration, now: float) -> bool:
    """Whether copying has taken too long; that of a prompt lasts for as long as its first part makes progress."""
    return now - (move.copied_s if move.is_cut else move.started_s) > limits[COPY_TIMEOUT_S]


def ask_for_offer(outbox: RouterOutbox, move: Migration) -> None:
    """Asks the source for the full blocks that the target does not have."""
    source = move.source.engine
    source.num_offers += 1
    move.offer_id = source.num_offers
    source.offers[move.offer_id] = move
    outbox.message_to(source).kv_offer_requests.add(
        offer_id=move.offer_id,
        slot=move.source.slot,
        fence=move.request.fence,
        first_token=move.num_copied_tokens,
    )


def take_offer(outbox: RouterOutbox, engine: ConnectedEngine, offer: engine_pb2.KvOffer) -> Migration | None:
    """Takes the answer to a request for an offer.

    Returns:
        The migration that waits for it; None: nobody does, and the engine gets its blocks back.
    """
    move = engine.offers.pop(offer.offer_id, None)
    if move is None and not offer.reason:
        outbox.message_to(engine).released_offer_ids.append(offer.offer_id)
    return move


def pull(outbox: RouterOutbox, move: Migration, offer: engine_pb2.KvOffer) -> None:
    """Lets the target pull what was offered; the tokens say what it is."""
    target, request = move.target, move.request
    assert target is not None
    part = outbox.message_to(target).part_pulls.add(
        grant_id=move.grant_id, kv=offer.kv, cache_salt=request.new.cache_salt
    )
    begin, end, num_prompt = move.num_sent_tokens, offer.kv.num_tokens, len(request.new.prompt_token_ids)
    part.token_ids.extend(islice(request.new.prompt_token_ids, begin, min(end, num_prompt)))
    part.token_ids.extend(request.output_token_ids[max(0, begin - num_prompt) : max(0, end - num_prompt)])
    move.num_sent_tokens, move.offer_id = end, 0
    move.num_parts += 1
    target.pulled_offers[move.grant_id] = (move.source.engine, offer.offer_id)


def take_answer(outbox: RouterOutbox, engine: ConnectedEngine, grant_id: int) -> None:
    """A target reads a part no more: the source gets its blocks back."""
    source, offer_id = engine.pulled_offers.pop(grant_id, (None, 0))
    if source is not None:
        outbox.message_to(source).released_offer_ids.append(offer_id)


def give_up(move: Migration) -> None:
    """Forgets an offer that was asked for; what is pulled meanwhile ends with its answer."""
    move.source.engine.offers.pop(move.offer_id, None)
