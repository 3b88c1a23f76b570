"""The processes that an engine's serving process starts: how they are ended, and that none outlives it.

The serving process owns the EngineCore process. It ends when its EngineCore does (``lifecycle``). This module imports
nothing heavy, because the first signal may come during the heavy imports.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from typing import NoReturn

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
    """Has the kernel kill this process with SIGKILL when the one that started it ends, in whatever way.

    vLLM's EngineCore does not notice the death of its front-end: it would run on for ever, with its ports and memory.

    Raises:
        OSError: The kernel refused.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        # The parent ended before the call above.
        os.kill(os.getpid(), signal.SIGKILL)
