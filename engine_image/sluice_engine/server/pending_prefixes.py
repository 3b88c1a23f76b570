"""Changes of the prefix cache on their way to one router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.v1 import engine_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Iterable

# Of one message; those of a whole cache are spread over some, so that none is large (512 KiB).
MAX_HASHES = 65536


class PendingPrefixes:
    """What a router has not been told yet; at most what is in the cache and what the router believes to be there.

    Args:
        blocks: What is in the cache at the start of the stream.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self._stored = set(blocks)
        self._removed: set[int] = set()
        self._sequence = 0

    def add(self, stored: Iterable[int], removed: Iterable[int]) -> None:
        """Adds what entered the cache and what left it."""
        for block_hash in stored:
            if block_hash in self._removed:
                self._removed.remove(block_hash)
            else:
                self._stored.add(block_hash)
        for block_hash in removed:
            if block_hash in self._stored:
                self._stored.remove(block_hash)
            else:
                self._removed.add(block_hash)

    def take(self) -> wire.PrefixChanges | None:
        """Takes as much as goes into a message; None when there is nothing, but for a stream's first one."""
        if self._sequence and not self._stored and not self._removed:
            return None
        self._sequence += 1
        # What left the cache first: a router that believes in too much is worse off than one that knows too little.
        removed = _take_some(self._removed, MAX_HASHES)
        stored = _take_some(self._stored, MAX_HASHES - len(removed))
        return wire.PrefixChanges(sequence=self._sequence, is_reset=self._sequence == 1, stored=stored, removed=removed)


def _take_some(hashes: set[int], number: int) -> list[int]:
    if len(hashes) <= number:
        taken = list(hashes)
        hashes.clear()
        return taken
    return [hashes.pop() for _ in range(number)]
