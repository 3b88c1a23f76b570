"""Turns of the event loop: what comes in bursts has one each, so that the loop looks at its sockets in between.

Tokens of dozens of engines and dozens of new requests may be readable at once, and each costs about a millisecond.
Handled where they are read they would hold up everything else until the last of them is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class FairQueue:
    """One kind of work, of which a turn has room for one piece; first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taken = False

    def run(self, work: Callable[[], None]) -> None:
        """Runs a piece of work: now if this turn is free, else in its own."""
        if self._is_taken:
            self._waiting.append(work)
            return
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._begin)
        work()

    async def wait(self) -> None:
        """Waits for a turn; without giving up control if this one is free."""
        if not self._is_taken:
            self.run(_do_nothing)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(partial(_grant, turn))
        await turn

    def _begin(self) -> None:
        self._is_taken = False
        if self._waiting:
            self.run(self._waiting.popleft())


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # who waits may be cancelled meanwhile
        turn.set_result(None)


def _do_nothing() -> None:
    """Takes a turn for work that its caller does."""
