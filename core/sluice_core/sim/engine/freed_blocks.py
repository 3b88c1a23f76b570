"""The KV blocks that preempted requests find again where prompts share nothing (``prefix_cache``: where they do).

Source: vLLM 0.32, ``v1/core/block_pool.py``: ``free_blocks``, ``get_new_blocks``.
"""

from __future__ import annotations

from collections import deque


# An engine keeps free blocks in a queue and takes them from its front. Blocks that are full and thus cached are put
# behind all others when they become free, a request's last one first; a block that is not full is put before all
# others. So a preempted request finds its first blocks again, as many as have not been taken meanwhile.
#
# Only preempted requests search for blocks, so the queue is kept while one of them waits, and holds how many blocks lie
# between theirs: it costs what is taken and freed, once each, and nothing where no request was preempted.
class _BlockRun:
    """Neighbours in the queue, of one preempted request or of none; mutable, changed by ``FreedBlocks`` only."""

    __slots__ = ("num_blocks",)

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks


class FreedBlocks:
    """The free blocks of an engine while preempted requests wait.

    Mutable, changed by the engine and its ``PrefillQueue``.

    Args:
        num_free: Free blocks when the first of them is preempted, its own left out; negative: ``num_overdrawn``.
    """

    __slots__ = ("_num_first", "_num_last", "_of_request", "_runs")

    def __init__(self, num_free: int) -> None:
        self._num_first = max(0, num_free)
        self._num_last = min(0, num_free)
        self._runs: deque[_BlockRun] = deque()
        self._of_request: dict[int, _BlockRun] = {}

    @property
    def is_needed(self) -> bool:
        """A preempted request waits."""
        return bool(self._of_request)

    @property
    def num_overdrawn(self) -> int:
        """Blocks that were taken before they were given back here."""
        return max(0, -self._num_last)

    def take(self, num_blocks: int) -> None:
        """Take free blocks; the caller has checked that there are so many.

        Those that became free while an iteration ran are given back here when the next one is scheduled. A transfer may
        be granted them before: they are owed until then.
        """
        if num_blocks <= self._num_first:
            self._num_first -= num_blocks
            return
        num_blocks -= self._num_first
        self._num_first = 0
        while num_blocks and self._runs:
            run = self._runs[0]
            num_taken = min(num_blocks, run.num_blocks)
            run.num_blocks -= num_taken
            num_blocks -= num_taken
            if not run.num_blocks:
                self._runs.popleft()
        self._num_last -= num_blocks

    def free(self, num_blocks: int, num_cached: int) -> None:
        """Free blocks that no request will look for.

        Args:
            num_blocks: Blocks.
            num_cached: Those of them that are full.
        """
        self._num_first += num_blocks - num_cached
        self._num_last += num_cached
        if owed := self.num_overdrawn:
            self._num_last = 0
            self.take(owed)

    def free_preempted(self, index: int, num_blocks: int, num_cached: int) -> None:
        """Free the blocks of a preempted request.

        Args:
            index: Number of the request.
            num_blocks: Blocks that it had.
            num_cached: Those of them that are full.
        """
        assert index not in self._of_request or not self._of_request[index].num_blocks
        self._num_first += num_blocks - num_cached
        if self._num_last > 0:
            self._runs.append(_BlockRun(self._num_last))
            self._num_last = 0
        run = self._of_request[index] = _BlockRun(num_cached)
        self._runs.append(run)

    def expect(self, index: int) -> None:
        """Wait for the blocks of a request that become free later."""
        self._of_request[index] = _BlockRun(0)

    def forget(self, index: int) -> None:
        """Let a request's blocks be as all others: it waits here no more."""
        self._of_request.pop(index, None)

    def reclaim(self, index: int) -> int:
        """Take what is left of a preempted request's blocks, from its first one on.

        Args:
            index: Number of the request, which waits no more.

        Returns:
            Blocks found; 0 for a request that was not preempted here.
        """
        run = self._of_request.pop(index, None)
        if run is None:
            return 0
        num_found, run.num_blocks = run.num_blocks, 0
        return num_found
