"""Starts a program pinned to a core with a log file, waits for it, and stops it by its process id."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

POLL_S = 0.05
STOP_TIMEOUT_S = 10.0


class ProgramStartError(RuntimeError):
    """A program did not start; the message has the end of its log."""


class StartedProgram:
    """A running program and the end of its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_until(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Waits until it is ready.

        Raises:
            ProgramStartError: The program ended, or the time is up.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_ready():
            if self._process.poll() is not None:
                raise ProgramStartError(f"{self._log.stem} ended with {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise ProgramStartError(f"{self._log.stem} is not ready after {timeout_s:g} s:\n{self.tail()}")
            time.sleep(POLL_S)

    def has_printed(self, line: str) -> bool:
        """Whether a line is in its log."""
        return line in self._log.read_text(errors="replace").splitlines()

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def tail(self, num_lines: int = 20) -> str:
        """Reads the end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-num_lines:])

    def stop(self) -> None:
        """Ends the program and its children; with SIGTERM first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                # The program has a process group (start_new_session), so its children get the signal too.
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self._process.wait()


@contextmanager
def run_program(
    command: Sequence[str | Path], *, core: int | str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[StartedProgram]:
    """Starts a program and stops it at the end.

    Args:
        command: The program and its arguments.
        core: Core that it is pinned to, or several as taskset writes them.
        log: File for its output. The name without suffix stands for the program in messages.
        environment: Variables added to this process's.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    program = StartedProgram(process, log)
    try:
        yield program
    finally:
        program.stop()


def answers(port: int, path: str) -> bool:
    """Whether a GET on 127.0.0.1 returns 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
