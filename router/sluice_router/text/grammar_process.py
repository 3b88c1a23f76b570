"""Compiles constraints in processes of their own, because the library can be stopped in no other way.

It bounds most of its work by steps, but not all: two dozen patterns that a small schema combines take it minutes. Each
thread that asks has a process, which the kernel ends when one constraint has taken its CPU time or memory.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import signal
import subprocess
import sys
import threading
from typing import Any

from sluice_router.text.grammar_check import GrammarError, check_grammar

# CPU time that one constraint may take.
MAX_CPU_S = 1.0
# Memory of such a process.
MAX_MEMORY_BYTES = 2 << 30
# How long an answer may take on a busy machine.
ANSWER_TIMEOUT_S = 60.0
# Of a reason: an answer is one write, and the library may quote the whole grammar.
MAX_REASON_CHARACTERS = 500
# Run with the module search path as its argument: it need not be in the environment.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from sluice_router.text.grammar_process import serve; serve()"
)

_of_thread = threading.local()


class GrammarProcess:
    """A process that compiles one constraint after the other.

    Attributes:
        pid: Its number.
    """

    def __init__(self) -> None:
        arguments = [sys.executable, "-c", PROGRAM, json.dumps(sys.path)]
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid

    def check(self, kind: str, value: Any) -> str | None:
        """Compiles a constraint.

        Returns:
            Why it cannot be; None: it can.

        Raises:
            BrokenPipeError: The process has ended; ``close`` says why.
        """
        sent, got = self._process.stdin, self._process.stdout
        assert sent is not None
        assert got is not None
        sent.write(json.dumps([kind, value]).encode() + b"\n")
        sent.flush()
        if not select.select([got], [], [], ANSWER_TIMEOUT_S)[0]:
            self._process.send_signal(signal.SIGPROF)
        answer = got.readline()
        if not answer:
            raise BrokenPipeError
        reason: str | None = json.loads(answer)
        return reason

    def close(self) -> int:
        """Ends the process; returns its exit status."""
        for pipe in (self._process.stdin, self._process.stdout):
            # What it has not read any more is written when its pipe is closed.
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        return self._process.wait()


def check_grammar_apart(kind: str, value: Any) -> None:
    """Checks a constraint as ``check_grammar``, and that it takes no more than its time and memory. Blocks meanwhile.

    Raises:
        GrammarError: It cannot be compiled, or takes too much.
    """
    reason, status = None, 0
    # A process may have been ended by somebody else.
    for _ in range(2):
        process = getattr(_of_thread, "process", None) or GrammarProcess()
        _of_thread.process = process
        try:
            reason = process.check(kind, value)
            break
        except BrokenPipeError:
            _of_thread.process = None
            status = process.close()
            if status == -signal.SIGPROF:
                raise GrammarError(f"it takes more than {MAX_CPU_S:g} s of CPU time") from None
    else:
        raise GrammarError(f"it takes too much memory, or more than the library can do (exit status {status})")
    if reason is not None:
        raise GrammarError(reason)


def serve() -> None:
    """Answers constraints on standard input, each a line of JSON, with their reasons; ends with its input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # Ctrl-C in a terminal is for the router.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        kind, value = json.loads(line)
        # Its signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        reason = _find_reason(kind, value)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(reason).encode() + b"\n")
        sys.stdout.buffer.flush()


def _find_reason(kind: str, value: Any) -> str | None:
    try:
        check_grammar(kind, value)
    except GrammarError as error:
        return str(error)[:MAX_REASON_CHARACTERS]
    return None
