"""SIGTERM and SIGINT of an engine: at once before it serves, with a drain afterwards.

This module imports nothing heavy, because the first signal may come during the heavy imports.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from sluice_engine.child_processes import leave

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class StopSignal:
    """SIGTERM and SIGINT, from the first line of the program to its end.

    Before the engine serves they end it at once; afterwards they start a drain.

    Args:
        leave: Ends the process; called when a signal comes before there is anything to drain, or a second SIGINT after.
    """

    def __init__(self, leave: Callable[[int], object] = leave) -> None:
        self._leave = leave
        self._status = 0
        self._event: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> None:
        """Installs the handlers."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def end_with(self, status: int) -> None:
        """From now on a signal that ends the engine at once does so with this exit status."""
        self._status = status

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._event is None or self._loop is None or (number == signal.SIGINT and self._event.is_set()):
            self._leave(self._status)
        else:
            self._loop.call_soon_threadsafe(self._event.set)

    def bind(self, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """From now on a signal sets the event, so that the engine drains first."""
        self._loop, self._event = loop, asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, self._handle, signal.SIGTERM, None)
        loop.add_signal_handler(signal.SIGINT, self._handle, signal.SIGINT, None)
        return self._event
