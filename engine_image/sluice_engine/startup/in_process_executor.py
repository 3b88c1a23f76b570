"""The CPU executor, and the tie between an EngineCore process and the process that started it.

vLLM runs a CPU engine's worker in a process of its own. In the EngineCore process it saves 300 MiB and a second of start,
and lets one process be forked into any number of engines. A class is named because the string "uni" is rewritten to "mp"
on CPUs.
"""

from __future__ import annotations

import ctypes
import os
import signal

from vllm.v1.executor.uniproc_executor import UniProcExecutor

_PR_SET_PDEATHSIG = 1


class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """Runs the model inside the EngineCore process."""


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
