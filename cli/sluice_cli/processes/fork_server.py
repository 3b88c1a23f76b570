"""A process that has imported vLLM, and forks engines that run the module and arguments of each request.

``python -m sluice_cli.processes.fork_server LAUNCHER_PID MODULE...`` reads requests and writes answers as JSON lines.
Importing vLLM costs 7 to 9 seconds of CPU per engine, most of the start of four engines on two cores; a fork shares it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from sluice_cli.processes.die_with_parent import die_with_parent

ADOPTION_TIMEOUT_S = 5.0


def main() -> None:
    """Runs the command line."""
    launcher_pid, *modules = sys.argv[1:]
    # Threads of a computation are counted when torch is imported; engines on one machine get one each, as they ask for.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The engine program sets the same default before it imports vLLM, which reads it at import.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    for module in modules:
        importlib.import_module(module)
    # Threads do not survive a fork, but the locks that they hold do.
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads != 1:
        sys.exit(f"the imports started {num_threads - 1} threads, which a fork would lose")
    gc.collect()
    gc.freeze()  # collections in forks then leave the shared pages alone
    _answer({"is_ready": True})
    for line in sys.stdin:
        _answer({"pid": fork_program(json.loads(line), int(launcher_pid))})


def _answer(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def fork_program(request: dict[str, Any], launcher_pid: int) -> int:
    """Forks a program off this process.

    Args:
        request: ``module`` and ``arguments`` to run, ``name`` for ps, ``log`` for its output.
        launcher_pid: The process that becomes its parent.

    Returns:
        Its process id.
    """
    # Forked twice: the first fork ends at once, so that the launcher, a child subreaper, becomes the parent of the
    # second. It awaits the program, the kernel kills the program with it, and the death of this process harms none.
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        second = os.fork()
        if second == 0:
            os.close(reader)
            os.close(writer)
            _become(request, launcher_pid)
        os.write(writer, str(second).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(first, 0)
    with os.fdopen(reader) as answer:
        return int(answer.read())


def _become(request: dict[str, Any], launcher_pid: int) -> None:
    """Becomes the program; never returns."""
    status = 1
    try:
        os.setsid()
        _redirect(request["log"])
        _await_adoption(launcher_pid)
        die_with_parent(launcher_pid)
        Path("/proc/self/comm").write_text(request["name"])  # what ps and top call it
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - the outermost frame of the program: nothing of it may reach the loop above
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _redirect(log: str) -> None:
    source = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(source, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(source)
    os.close(output)


def _await_adoption(launcher_pid: int) -> None:
    deadline_s = time.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != launcher_pid and time.monotonic() < deadline_s:
        time.sleep(0.001)


if __name__ == "__main__":
    main()
