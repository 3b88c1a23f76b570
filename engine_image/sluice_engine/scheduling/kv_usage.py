"""KV blocks of the engine: in use, granted, pinned for readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_core.kv_blocks import KvBlocks

if TYPE_CHECKING:
    from sluice_engine.kv_transfer.grants import GrantTable
    from sluice_engine.kv_transfer.outgoing_hand_offs import OutgoingHandOffs


class KvUsage:
    """Counts KV blocks.

    Args:
        manager: vLLM's KV cache manager.
        grants: Blocks out of the pool for grants.
        hand_offs: Blocks that wait for readers.
    """

    def __init__(self, manager: Any, grants: GrantTable, hand_offs: OutgoingHandOffs) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._grants = grants
        self._hand_offs = hand_offs

    def measure(self) -> KvBlocks:
        """Counts all blocks."""
        total = self._pool.num_gpu_blocks - 1  # without the null block
        granted = self._grants.num_blocks
        used = total - self._pool.get_num_free_blocks() - granted
        # Handed-off requests may share blocks of a common prefix, which are then pinned twice.
        pinned = min(used, self._hand_offs.num_pinned_blocks)
        return KvBlocks(total=total, used=used, granted=granted, pinned=pinned)

    def count_blocks_of(self, request_id: str) -> int:
        """Blocks of one request."""
        return len(self._manager.get_block_ids(request_id)[0])
