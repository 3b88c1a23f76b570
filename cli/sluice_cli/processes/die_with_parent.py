"""Runs a program that dies with its parent: ``die_with_parent.py PARENT_PID PROGRAM ARGUMENT...``.

The launcher spawns this small program, which then becomes the real one. It runs at each start of each process, so it
imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends; ends it now if that has happened already.

    Args:
        parent_pid: The process that must be the parent.

    Raises:
        OSError: The kernel refused.
    """
    # A launcher that is killed outright cleans up nothing, so the kernel does; the setting is kept across exec. It
    # cannot be set between the launcher's own fork and exec, where its threads make code unsafe.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> None:
    """Runs the command line."""
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - becoming that program is the point; there is no shell


if __name__ == "__main__":
    main()
