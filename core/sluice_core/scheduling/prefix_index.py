"""Which engines hold which KV blocks, by the hashes under which their prefix caches find them.

A hash stands for a block's tokens and all before them. Caches evict the end of a prompt before its start, so that an
engine that holds a block holds those before it: the number of leading blocks of a prompt is found by bisection. Where
an engine breaks that rule the number may be wrong, which costs a worse placement and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sluice_core.records import EngineId

NO_HASH: Final = -1  # stands behind the last block of a prompt; hashes are not negative


class PrefixIndex:
    """The cached blocks of engines as these have reported them; mutable, changed by its own methods only.

    It holds at most what the engines' caches hold: each block of each engine once.
    """

    def __init__(self) -> None:
        self._blocks: dict[EngineId, set[int]] = {}

    def __contains__(self, engine_id: EngineId) -> bool:
        return engine_id in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def holds(self, block_hash: int) -> bool:
        """Say whether any engine holds a block."""
        return any(block_hash in blocks for blocks in self._blocks.values())

    def count_blocks(self, engine_id: EngineId) -> int:
        """Count the blocks of an engine; 0 for an unknown one."""
        blocks = self._blocks.get(engine_id)
        return 0 if blocks is None else len(blocks)

    def update(self, engine_id: EngineId, stored: Iterable[int], removed: Iterable[int]) -> None:
        """Take in what entered an engine's cache and, after that, what left it."""
        blocks = self._blocks.get(engine_id)
        if blocks is None:
            blocks = self._blocks[engine_id] = set()
        blocks.update(stored)
        blocks.difference_update(removed)

    def forget(self, engine_id: EngineId) -> None:
        """Forget an engine's blocks: it is lost, or has cleared its cache."""
        self._blocks.pop(engine_id, None)

    def match(self, hashes: Sequence[int], block_size_tokens: int) -> dict[EngineId, int]:
        """Count the leading tokens of a prompt that each engine holds, in whole blocks.

        Args:
            hashes: Of the prompt's full blocks, from its start.
            block_size_tokens: Tokens of a block.

        Returns:
            Tokens by engine; engines without any are left out.
        """
        found: dict[EngineId, int] = {}
        num_hashes = len(hashes)
        if not num_hashes:
            return found
        first = hashes[0]
        # Engines often share the same part, such as a system prompt: the last two answers are tried first.
        last, before = num_hashes, num_hashes
        last_hash, next_hash, last_tokens = hashes[-1], NO_HASH, num_hashes * block_size_tokens
        for engine_id, blocks in self._blocks.items():
            if last_hash in blocks:
                if next_hash not in blocks:
                    found[engine_id] = last_tokens
                    continue
                low, high = last + 1, num_hashes + 1
            elif first in blocks:
                low, high = 1, last
            else:
                continue
            if low <= before < high and hashes[before - 1] in blocks:
                low = before
                if before == num_hashes or hashes[before] not in blocks:
                    high = before + 1
            while high - low > 1:
                middle = (low + high) // 2
                if hashes[middle - 1] in blocks:
                    low = middle
                else:
                    high = middle
            last, before = low, last
            last_hash, last_tokens = hashes[low - 1], low * block_size_tokens
            next_hash = hashes[low] if low < num_hashes else NO_HASH
            found[engine_id] = last_tokens
        return found
