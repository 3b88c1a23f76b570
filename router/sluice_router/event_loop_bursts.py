"""Spreads work that comes in bursts over iterations of the event loop, one piece each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial


class BurstQueue:
    """One kind of work, of which an iteration of the event loop does one piece; first come, first served.

    Tokens of dozens of engines and dozens of new requests may be readable at once, and each costs about a millisecond.
    Done where they are read, they would delay everything else until the last of them is done.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taken = False

    def run(self, work: Callable[[], None]) -> None:
        """Runs a piece of work: now if this iteration has done none yet, else in an iteration of its own."""
        if self._is_taken:
            self._waiting.append(work)
            return
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._begin)
        work()

    async def wait(self) -> None:
        """Waits for an iteration that has room; without giving up control if this one has."""
        if not self._is_taken:
            self.run(_do_nothing)
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append(partial(_admit, admitted))
        await admitted

    def _begin(self) -> None:
        self._is_taken = False
        if self._waiting:
            self.run(self._waiting.popleft())


def _admit(admitted: asyncio.Future[None]) -> None:
    # Who waits may be cancelled meanwhile.
    if not admitted.done():
        admitted.set_result(None)


def _do_nothing() -> None:
    """Stands for work that the caller of ``wait`` does."""
