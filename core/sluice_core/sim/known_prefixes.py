"""What the simulated router knows of prefix caches: the reports of engines, as late as they arrive."""

from __future__ import annotations

from collections import deque

from sluice_core.records import EngineId
from sluice_core.scheduling.prefix_index import PrefixIndex
from sluice_core.sim.engine.prefix_cache import CacheChanges, list_prompt_keys
from sluice_core.sim.requests import SimRequest


class KnownPrefixes:
    """The router's index, and the reports that are under way to it; mutable.

    Args:
        report_s: Time from the end of an iteration until the router knows what it has changed.
        hash_block_tokens: See ``SimOptions``.
    """

    def __init__(self, report_s: float, hash_block_tokens: int) -> None:
        self._index = PrefixIndex()
        self._report_s = report_s
        self._hash_block_tokens = hash_block_tokens
        self._block_sizes: dict[EngineId, int] = {}
        self._reports: deque[tuple[float, EngineId, CacheChanges]] = deque()
        self._keys: dict[tuple[int, int], list[int]] = {}

    def add(self, engine_id: EngineId, block_size_tokens: int) -> None:
        """Add an engine."""
        self._block_sizes[engine_id] = block_size_tokens

    def remove(self, engine_id: EngineId) -> None:
        """Forget an engine that has died, and its reports under way."""
        self._block_sizes.pop(engine_id, None)
        self._index.forget(engine_id)

    def report(self, engine_id: EngineId, changes: CacheChanges, now: float) -> None:
        """Send what changed in an engine's cache."""
        if changes.stored or changes.removed:
            self._reports.append((now + self._report_s, engine_id, changes))

    def find(self, request: SimRequest, now: float) -> dict[EngineId, int]:
        """Find the tokens of a request that engines are known to hold.

        Args:
            request: The request.
            now: Seconds of the simulated clock.

        Returns:
            Tokens by engine; engines without any are left out.
        """
        self._take_in(now)
        cached: dict[EngineId, int] = {}
        for block_size in set(self._block_sizes.values()):
            keys = self._list_keys(request, block_size)
            found = self._index.match(keys, block_size)
            cached.update((name, tokens) for name, tokens in found.items() if self._block_sizes[name] == block_size)
        return cached

    def drop(self, request: SimRequest) -> None:
        """Forget what was kept of a request that no longer waits."""
        for block_size in set(self._block_sizes.values()):
            self._keys.pop((request.index, block_size), None)

    def _take_in(self, now: float) -> None:
        reports = self._reports
        while reports and reports[0][0] <= now:
            _, engine_id, changes = reports.popleft()
            if engine_id in self._block_sizes:
                self._index.update(engine_id, changes.stored, changes.removed)

    def _list_keys(self, request: SimRequest, block_size: int) -> list[int]:
        """List the keys of the blocks that may be found: all but the one with the last token, which is computed."""
        keys = self._keys.get((request.index, block_size))
        if keys is None:
            num_blocks = (request.prompt_tokens - 1) // block_size
            keys = list_prompt_keys(request.block_hashes, num_blocks, block_size, self._hash_block_tokens)
            self._keys[request.index, block_size] = keys
        return keys
