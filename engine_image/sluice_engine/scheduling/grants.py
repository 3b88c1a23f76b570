"""Grants to requests that are about to arrive: whether the engine has room for one, and how its blocks reach it.

Without grants, two full engines that hand requests over to each other stop for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice_engine.core_messages import GrantAnswer

if TYPE_CHECKING:
    from sluice_core.kv_blocks import KvBlocks
    from sluice_engine.core_messages import GrantCommand
    from sluice_engine.kv_transfer.grant_table import GrantTable
    from sluice_engine.scheduling.kv_usage import KvUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoom:
    """What decides on a grant.

    Args:
        is_draining: The engine drains.
        share: Share of its KV blocks that it fills for such a move.
        has_seat: The batch has a place that is neither taken nor promised.
        kv: KV blocks now.
        num_prefill_blocks: Blocks that prefills under way still need.
        is_recompute_waiting: A preempted request waits for blocks.
    """

    is_draining: bool
    share: float
    has_seat: bool
    kv: KvBlocks
    num_prefill_blocks: int
    is_recompute_waiting: bool


def answer_grant(
    command: GrantCommand, num_blocks: int, room: EngineRoom, table: GrantTable, now_s: float
) -> GrantAnswer:
    """Reserves blocks for a grant if there is room.

    Args:
        command: The key, the reason for the move and the time to live.
        num_blocks: Blocks that the request will hold.
        room: What the engine has.
        table: Where the blocks are reserved.
        now_s: Monotonic time.
    """
    reason = find_refusal(num_blocks, room)
    if not reason and not table.reserve(command.key, num_blocks, now_s + command.ttl_s, command.ttl_s):
        reason = "kv"
    return GrantAnswer(key=command.key, is_granted=not reason, reason=reason, ttl_s=0.0 if reason else command.ttl_s)


def find_refusal(num_blocks: int, room: EngineRoom) -> str:
    """Why a grant is refused: ``draining``, ``seqs``, ``watermark``, ``kv``; empty when it is not."""
    if room.is_draining:
        return "draining"
    if not room.has_seat:
        return "seqs"
    kv = room.kv
    if room.share < 1.0 and kv.used + kv.granted + num_blocks > room.share * kv.total:
        return "watermark"
    # Prefills under way need their rest, and whoever waits for room to recompute goes first.
    needed = num_blocks + room.num_prefill_blocks
    return "kv" if needed > kv.available or room.is_recompute_waiting else ""


class GrantAllocator:
    """Stands in for vLLM's ``allocate_slots``: a granted request finds its own blocks free, and nobody else does.

    Args:
        manager: vLLM's KV cache manager; its ``allocate_slots`` is replaced.
        table: The engine's grants.
        kv_usage: Counts a request's blocks.
    """

    __slots__ = ("_allocate_slots", "_claims", "_kv_usage", "_table")

    def __init__(self, manager: Any, table: GrantTable, kv_usage: KvUsage) -> None:
        self._allocate_slots = manager.allocate_slots
        self._table = table
        self._claims = table.key_of_request
        self._kv_usage = kv_usage
        manager.allocate_slots = self.allocate_slots

    def allocate_slots(self, request: Any, num_new_tokens: int, **options: Any) -> Any:
        """See vLLM's ``KVCacheManager.allocate_slots``."""
        request_id = request.request_id
        # Every request of every iteration comes through here, so that the common case costs no call.
        if request_id not in self._claims:
            return self._allocate_slots(request, num_new_tokens, **options)
        self._table.lift(request_id)
        # The grant has reserved the room already: vLLM's own reserve for others must not refuse it.
        options |= {"reserved_blocks": 0, "has_scheduled_reqs": False}
        blocks = self._allocate_slots(request, num_new_tokens, **options)
        is_pulling = options.get("delay_cache_blocks")
        if blocks is not None and not is_pulling:
            self._table.close(request_id)
        else:
            # Out of blocks, or the pull begins: the token after the pulled ones still needs its room.
            self._table.lower(request_id, self._kv_usage.count_blocks_of(request_id))
        return blocks
