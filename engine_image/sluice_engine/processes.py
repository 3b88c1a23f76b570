"""The life of an engine's processes: how they are told to stop, and that none outlives another.

An engine is two processes. The serving process (this module's home) owns the EngineCore process:

- SIGTERM and SIGINT are heard from the first line of the program on. Before the engine serves they end it at once;
  afterwards they start a drain.
- The EngineCore dies with its parent, whatever kills the parent: the kernel sends it SIGKILL (``launch.become_core``).
- The serving process ends when its EngineCore does (``server.py`` hears of it).

This module imports nothing heavy, because the first signal may come during the heavy imports.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

# Seconds that a killed EngineCore may take to be gone before this process leaves anyway.
KILL_TIMEOUT_S = 10.0
# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1


def kill_children() -> None:
    """Kills the processes that this one started through multiprocessing, and waits until they are gone."""
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(KILL_TIMEOUT_S)


def leave(status: int) -> NoReturn:
    """Ends this process without the interpreter's tear-down, after its children.

    vLLM's own shutdown takes seconds in which nothing useful happens; requests are gone or drained by now.
    """
    kill_children()
    os._exit(status)


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that started it ends, in whatever way.

    An EngineCore does not notice the death of its front-end: it would go on forever, holding its ports and memory.

    Raises:
        OSError: The kernel refused.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        # It ended before the call above.
        os.kill(os.getpid(), signal.SIGKILL)


class StopSignal:
    """SIGTERM and SIGINT, from the first line of the program to its end.

    Args:
        leave: Ends the process; called when a signal comes before there is anything to drain, or a second SIGINT after.
    """

    def __init__(self, leave: Callable[[int], object] = leave) -> None:
        self._leave = leave
        self._event: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> None:
        """Starts to listen."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._event is None or self._loop is None or (number == signal.SIGINT and self._event.is_set()):
            self._leave(0)
        else:
            self._loop.call_soon_threadsafe(self._event.set)

    def bind(self, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """From now on a signal sets the event, so that the engine drains first."""
        self._loop, self._event = loop, asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, self._handle, signal.SIGTERM, None)
        loop.add_signal_handler(signal.SIGINT, self._handle, signal.SIGINT, None)
        return self._event
