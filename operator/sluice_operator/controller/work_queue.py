"""The work queue: each key is in it once, and is processed by one worker at a time.

``Schedule`` decides and has no clock of its own; ``WorkQueue`` waits. A key that is added while it is processed comes
up again afterwards. Failures back off exponentially, with jitter so that clusters do not come in step.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

MIN_BACKOFF_S = 0.5
# An API server that has recovered is noticed within this time. Five hundred failing clusters make 22 tries a second.
MAX_BACKOFF_S = 30.0
EVENT_PAUSE_S = 1.0

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class _BackOff:
    """How a key backs off.

    Args:
        num_failures: Tries in a row that failed, of those that count.
        earliest_s: Time before which it does not come up, whatever happens.
        retry_s: Time of its next try, if nothing happens.
    """

    num_failures: int
    earliest_s: float
    retry_s: float


class Schedule(Generic[Key]):
    """Which key is due when. Mutable; times are seconds on the caller's clock.

    Args:
        rng: Jitter.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._due_s: dict[Key, float] = {}
        # An entry whose time is no longer the key's is stale and skipped.
        self._heap: list[tuple[float, int, Key]] = []
        self._counter = itertools.count()
        # When the work on each key began.
        self._processing: dict[Key, float] = {}
        self._back_offs: dict[Key, _BackOff] = {}

    def add(self, key: Key, due_s: float) -> None:
        """Schedules a key for ``due_s`` at the latest, or for as early as its back-off allows."""
        back_off = self._back_offs.get(key)
        due_s = max(due_s, back_off.earliest_s) if back_off else due_s
        if due_s < self._due_s.get(key, float("inf")):
            self._set_due(key, due_s)

    def take(self, now: float) -> Key | None:
        """Takes a key that is due and not at work; None when there is none."""
        held: list[tuple[float, int, Key]] = []
        taken = None
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            due_s, _, key = entry
            if self._due_s.get(key) != due_s:
                continue
            if key in self._processing:
                held.append(entry)
                continue
            del self._due_s[key]
            self._processing[key] = now
            taken = key
            break
        for entry in held:
            heapq.heappush(self._heap, entry)
        return taken

    def finish(self, key: Key) -> None:
        """Ends the work on a key with success."""
        self._processing.pop(key, None)
        self._back_offs.pop(key, None)

    def fail(self, key: Key, now: float, min_pause_s: float = 0.0) -> float:
        """Ends the work on a key with a failure, and schedules the next try.

        Args:
            key: The key.
            now: Now.
            min_pause_s: Least pause, as the server asked for it.

        Returns:
            The pause until that try, in seconds.
        """
        back_off = self._extend_back_off(self._back_offs.get(key), self._processing.pop(key, now), now, min_pause_s)
        self._back_offs[key] = back_off
        # An event during the failed try waits as long as one after it.
        due_s = min(max(self._due_s.get(key, float("inf")), back_off.earliest_s), back_off.retry_s)
        self._set_due(key, due_s)
        return due_s - now

    def _extend_back_off(self, old: _BackOff | None, started_s: float, now: float, min_pause_s: float) -> _BackOff:
        # A try that an event caused before its time says nothing more about the server: it neither counts as a failure
        # nor moves the try that back-off has set.
        if old is not None and started_s < old.retry_s:
            num_failures, retry_s = old.num_failures, max(old.retry_s, now + min_pause_s)
        else:
            num_failures, retry_s = old.num_failures + 1 if old else 1, now
        if retry_s <= now:
            longest_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(num_failures, 20))
            retry_s = now + max(min_pause_s, longest_s * (0.5 + self._rng.random() / 2))
        return _BackOff(
            num_failures=num_failures,
            earliest_s=min(retry_s, now + max(min_pause_s, EVENT_PAUSE_S)),
            retry_s=retry_s,
        )

    def _set_due(self, key: Key, due_s: float) -> None:
        self._due_s[key] = due_s
        heapq.heappush(self._heap, (due_s, next(self._counter), key))

    def is_processing(self, key: Key) -> bool:
        """Whether a key was taken, and its work has not ended."""
        return key in self._processing

    def wait_s(self, now: float) -> float | None:
        """Seconds until a key may be due; None: none is scheduled."""
        due = [due_s for key, due_s in self._due_s.items() if key not in self._processing]
        return max(0.0, min(due) - now) if due else None

    def age_s(self, now: float) -> float:
        """How long the oldest key has been due or in work, in seconds."""
        due = [due_s for key, due_s in self._due_s.items() if key not in self._processing]
        return max(0.0, now - min([*due, *self._processing.values()], default=now))

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
        """Schedules a key in so many seconds at the latest."""
        self._schedule.add(key, self._clock() + after_s)
        self._changed.set()

    def is_processing(self, key: Key) -> bool:
        """Whether a key is being processed."""
        return self._schedule.is_processing(key)

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

    def fail(self, key: Key, min_pause_s: float = 0.0) -> float:
        """Ends the work on a key with a failure; returns the pause until it is tried again, in seconds."""
        pause_s = self._schedule.fail(key, self._clock(), min_pause_s)
        self._changed.set()
        return pause_s

    def age_s(self) -> float:
        """How long the oldest key has been due or in work, in seconds."""
        return self._schedule.age_s(self._clock())

    def __len__(self) -> int:
        return len(self._schedule)
