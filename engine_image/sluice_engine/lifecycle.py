"""The life of an engine's processes: how they are told to stop, and that none outlives another.

An engine is two processes. The serving process (this module's home) owns the EngineCore process:

- SIGTERM and SIGINT are heard from the first line of the program on. Before the engine serves they end it at once;
  afterwards they start a drain.
- The EngineCore dies with its parent, whatever kills the parent: the kernel sends it SIGKILL (``die_with_parent``).
- The serving process ends when its EngineCore does (``server.py`` hears of it).

This module imports nothing heavy, because the first signal may come during the heavy imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

# prctl(2): the signal that a process gets when its parent's thread ends.
PR_SET_PDEATHSIG = 1
# Seconds that a killed EngineCore may take to be gone before this process leaves anyway.
KILL_TIMEOUT_S = 10.0


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies, and keeps the terminal's Ctrl-C away from it.

    Called in the EngineCore, which neither notices a dead parent nor may end before its parent has drained it.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request was in force
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(OSError):  # a session leader keeps its group
        os.setpgid(0, 0)


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
        os.register_at_fork(after_in_child=_reset_in_child)

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


def _reset_in_child() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
