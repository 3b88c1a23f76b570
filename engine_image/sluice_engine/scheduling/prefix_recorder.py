"""What enters and leaves vLLM's prefix cache, from its own KV cache events.

vLLM reports each block that it caches or evicts, and may hold the same content in several blocks. Routers need to know
whether a prompt's beginning is here at all, so a content counts from its first block to its last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, NullEventPublisher

from sluice_engine.core_messages import PrefixChanges

if TYPE_CHECKING:
    from vllm.distributed.kv_events import EventBatch


class PrefixRecorder(NullEventPublisher):  # type: ignore[misc]
    """Stands in the place of vLLM's publisher of KV cache events; holds as much as the cache has blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._num_copies: dict[int, int] = {}
        self._stored: set[int] = set()
        self._removed: set[int] = set()

    @property
    def has_changes(self) -> bool:
        """True while there is something to take."""
        return bool(self._stored or self._removed)

    def publish(self, events: EventBatch) -> None:
        """Takes an iteration's events, in their order."""
        for event in events.events:
            if isinstance(event, BlockStored):
                for block_hash in event.block_hashes:
                    self._store(block_hash)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._remove(block_hash)
            elif isinstance(event, AllBlocksCleared):
                for block_hash in list(self._num_copies):
                    self._num_copies[block_hash] = 1
                    self._remove(block_hash)

    def take(self) -> PrefixChanges | None:
        """Returns what has changed since the last call; None: nothing."""
        if not self.has_changes:
            return None
        changes = PrefixChanges(stored=list(self._stored), removed=list(self._removed))
        self._stored, self._removed = set(), set()
        return changes

    def _store(self, block_hash: int) -> None:
        num_copies = self._num_copies.get(block_hash, 0)
        self._num_copies[block_hash] = num_copies + 1
        if num_copies:
            return
        if block_hash in self._removed:
            self._removed.remove(block_hash)
        else:
            self._stored.add(block_hash)

    def _remove(self, block_hash: int) -> None:
        num_copies = self._num_copies.pop(block_hash, 0)
        if num_copies > 1:
            self._num_copies[block_hash] = num_copies - 1
        elif num_copies and block_hash in self._stored:
            self._stored.remove(block_hash)
        elif num_copies:
            self._removed.add(block_hash)
