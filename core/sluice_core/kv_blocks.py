"""KV block arithmetic.

Invariants of an engine: ``free + used == total``; pinned blocks are used ones; a grant reserves free blocks, so
``granted <= free`` whenever grants are honoured.
"""

from __future__ import annotations

from dataclasses import dataclass


def blocks_for_tokens(num_tokens: int, block_size_tokens: int) -> int:
    """Count the blocks that hold ``num_tokens`` tokens of one request.

    Args:
        num_tokens: Tokens, at least 0.
        block_size_tokens: Tokens per block, at least 1.

    Returns:
        Blocks, rounded up.

    Raises:
        ValueError: A negative count or a block size under 1.
    """
    if num_tokens < 0 or block_size_tokens < 1:
        raise ValueError(f"no blocks for {num_tokens} tokens in blocks of {block_size_tokens}")
    return -(-num_tokens // block_size_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBlocks:
    """How an engine's KV blocks are divided at one moment.

    Args:
        total: Blocks of the engine.
        used: Blocks that requests hold, pinned ones included.
        granted: Free blocks reserved by grants.
        pinned: Used blocks of handed-off requests that no one has read or released yet.

    Raises:
        ValueError: The counts contradict one another.
    """

    total: int
    used: int
    granted: int = 0
    pinned: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.pinned <= self.used <= self.total and self.granted >= 0):
            raise ValueError(
                f"KV blocks contradict: total {self.total}, used {self.used}, granted {self.granted}, "
                f"pinned {self.pinned}; 0 <= pinned <= used <= total and 0 <= granted must hold"
            )

    @property
    def free(self) -> int:
        """Blocks that no request holds."""
        return self.total - self.used

    @property
    def available(self) -> int:
        """Free blocks that no grant reserves."""
        return max(0, self.total - self.used - self.granted)

    @property
    def is_idle(self) -> bool:
        """True when every block is free and none is reserved."""
        return self.used == 0 and self.granted == 0
