"""The queue of clusters to look at: each key is in it once, and at work once.

``Schedule`` decides, without a clock of its own; ``WorkQueue`` waits. A key that is added while it is at work comes up
again afterwards. Failures back off exponentially with jitter, so that clusters do not come in step.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 300.0

Key = TypeVar("Key")


class Schedule(Generic[Key]):
    """Which key is due when. Mutable; times are seconds on the caller's clock.

    Args:
        rng: Jitter.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._due_s: dict[Key, float] = {}
        # Entries whose time is not the key's own any more are skipped.
        self._heap: list[tuple[float, int, Key]] = []
        self._counter = itertools.count()
        self._at_work: set[Key] = set()
        self._num_failures: dict[Key, int] = {}

    def add(self, key: Key, due_s: float) -> None:
        """Has a key looked at no later than ``due_s``."""
        if due_s < self._due_s.get(key, float("inf")):
            self._due_s[key] = due_s
            heapq.heappush(self._heap, (due_s, next(self._counter), key))

    def take(self, now: float) -> Key | None:
        """Takes a key that is due and not at work; None when there is none."""
        held: list[tuple[float, int, Key]] = []
        taken = None
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            due_s, _, key = entry
            if self._due_s.get(key) != due_s:
                continue
            if key in self._at_work:
                held.append(entry)
                continue
            del self._due_s[key]
            self._at_work.add(key)
            taken = key
            break
        for entry in held:
            heapq.heappush(self._heap, entry)
        return taken

    def finish(self, key: Key) -> None:
        """Ends the work on a key with success."""
        self._at_work.discard(key)
        self._num_failures.pop(key, None)

    def fail(self, key: Key, now: float, least_s: float = 0.0) -> float:
        """Ends the work on a key with a failure, and schedules the next try.

        Args:
            key: The key.
            now: Now.
            least_s: Least pause, as the server asked for it.

        Returns:
            The pause, in seconds.
        """
        self._at_work.discard(key)
        failures = self._num_failures.get(key, 0)
        self._num_failures[key] = failures + 1
        longest_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(failures + 1, 20))
        pause_s = max(least_s, longest_s * (0.5 + self._rng.random() / 2))
        self.add(key, now + pause_s)
        return pause_s

    def wait_s(self, now: float) -> float | None:
        """Seconds until a key may be due; None: none is scheduled."""
        due = [due_s for key, due_s in self._due_s.items() if key not in self._at_work]
        return max(0.0, min(due) - now) if due else None

    def age_s(self, now: float) -> float:
        """How long the key that is due longest has waited, in seconds."""
        due = [due_s for key, due_s in self._due_s.items() if key not in self._at_work]
        return max(0.0, now - min(due)) if due else 0.0

    def __len__(self) -> int:
        return len(self._due_s)


class WorkQueue(Generic[Key]):
    """The queue, for one event loop.

    Args:
        rng: Jitter.
        clock: Monotonic seconds.
    """

    def __init__(self, rng: random.Random, clock: Callable[[], float]) -> None:
        self._schedule: Schedule[Key] = Schedule(rng)
        self._clock = clock
        self._changed = asyncio.Event()

    def add(self, key: Key, after_s: float = 0.0) -> None:
        """Has a key looked at after at most so many seconds."""
        self._schedule.add(key, self._clock() + after_s)
        self._changed.set()

    async def get(self) -> Key:
        """Waits for a key that is due; end its work with ``finish`` or ``fail``."""
        while True:
            key = self._schedule.take(self._clock())
            if key is not None:
                return key
            self._changed.clear()
            wait_s = self._schedule.wait_s(self._clock())
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def finish(self, key: Key) -> None:
        """Ends the work on a key with success."""
        self._schedule.finish(key)
        self._changed.set()

    def fail(self, key: Key, least_s: float = 0.0) -> float:
        """Ends the work on a key with a failure; returns the pause until it is tried again, in seconds."""
        pause_s = self._schedule.fail(key, self._clock(), least_s)
        self._changed.set()
        return pause_s

    def age_s(self) -> float:
        """How long the key that is due longest has waited, in seconds."""
        return self._schedule.age_s(self._clock())

    def __len__(self) -> int:
        return len(self._schedule)
