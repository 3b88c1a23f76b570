"""Offers of KV: full blocks of requests that run on, pinned for a reader.

A full block never changes, so another engine may read it while its request decodes or prefills on. The pin is a
reference of its own: the blocks stay when the request ends, moves or is preempted. The router ends an offer when its
reader has answered; no offer outlives its lease.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sluice_engine.core_messages import FIRST_TOKEN_KEY, NUM_TOKENS_KEY, OfferAnswer
from sluice_engine.kv_transfer.kv_transfer_timeouts import KV_LEASE_S
from sluice_engine.kv_transfer.outgoing_hand_offs import find_halt

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sluice_engine.core_messages import OfferCommand
    from sluice_engine.kv_transfer.interface import KvConnector

# Ends the name of an offer among the requests that the connector's worker knows.
OFFER_MARK = "@offer"


class KvOffers:
    """Offers of one engine.

    Args:
        connector: The scheduler's connector.
        manager: vLLM's KV cache manager.
        block_size_tokens: Tokens per block.
    """

    def __init__(self, connector: KvConnector, manager: Any, block_size_tokens: int) -> None:
        self._connector = connector
        self._manager = manager
        self._block_size_tokens = block_size_tokens
        self._blocks_of: dict[str, list[Any]] = {}
        # In the order in which they end.
        self._until_s: dict[str, float] = {}

    def offer(self, command: OfferCommand, request: Request | None, now_s: float) -> OfferAnswer:
        """Pins the full blocks that a request has computed.

        Args:
            command: Names the request, and what the reader has.
            request: vLLM's record of it; None when the engine has none.
            now_s: Monotonic time.
        """
        reason = find_halt(request)
        if reason:
            return OfferAnswer(key=command.key, reason=reason)
        assert request is not None, "it would be unknown"
        first = command.first_token // self._block_size_tokens
        # What an iteration under way computes is not there yet.
        num_blocks = max(0, request.num_computed_tokens - request.num_in_flight_tokens) // self._block_size_tokens
        blocks = list(self._manager.get_blocks(request.request_id).blocks[0])[first:num_blocks]
        if not blocks:
            return OfferAnswer(key=command.key, reason="none")
        offer_id = command.key + OFFER_MARK
        self._manager.block_pool.touch(blocks)
        self._blocks_of[offer_id], self._until_s[offer_id] = blocks, now_s + KV_LEASE_S
        params = self._connector.offer(offer_id, [block.block_id for block in blocks])
        num_tokens = num_blocks * self._block_size_tokens
        params |= {NUM_TOKENS_KEY: num_tokens, FIRST_TOKEN_KEY: first * self._block_size_tokens}
        return OfferAnswer(
            key=command.key, num_tokens=num_tokens, transfer_params=json.dumps(params, separators=(",", ":"))
        )

    def release(self, key: str) -> None:
        """Ends an offer that nobody reads any more."""
        self._end(key + OFFER_MARK)

    def expire(self, now_s: float) -> None:
        """Ends the offers whose lease is over."""
        while self._until_s and (first := next(iter(self._until_s.items())))[1] <= now_s:
            self._end(first[0])

    def _end(self, offer_id: str) -> None:
        if offer_id in self._blocks_of:
            self._connector.release(offer_id)
            self._free(offer_id)

    def take_ended(self, finished: set[str] | None) -> set[str] | None:
        """Ends the offers among what the worker reports as sent; returns the rest."""
        ended = {name for name in finished or () if name.endswith(OFFER_MARK)}
        for offer_id in ended:
            self._free(offer_id)
        return finished - ended if finished and ended else finished

    def _free(self, offer_id: str) -> None:
        self._until_s.pop(offer_id, None)
        # The last blocks of a prefix are evicted first, as when its request ends.
        self._manager.block_pool.free_blocks(reversed(self._blocks_of.pop(offer_id, [])))
