"""Runs a program that dies with its parent: ``leash.py PARENT_PID PROGRAM ARGUMENT...``.

A launcher that is killed outright can clean up nothing; the kernel does it for it (PR_SET_PDEATHSIG, kept across
exec). Setting it needs code between fork and exec, which is unsafe in a process with threads, so it is set here, in a
small program that the launcher spawns and that then becomes the real one. Only the standard library is imported:
this runs at each start of each process.
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
