"""Processes of a test cluster. Each has a log and a pid file, and dies with the program that started it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

from sluice_cli.processes import die_with_parent
from testbed.errors import NotReachedError, TestbedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from testbed.settings import Settings

POLL_S = 0.1


class Processes:
    """Starts and stops programs.

    Args:
        settings: The cluster; pid files and logs are written to its folders.
        path: Folder that comes first in the programs' PATH.
    """

    def __init__(self, settings: Settings, path: Path) -> None:
        self._settings = settings
        # By default Go's garbage collection marks for an eighth of an API server's CPU time. There is memory enough.
        self._environment = {**os.environ, "GOGC": "400", "PATH": f"{path}:{os.environ['PATH']}:/usr/sbin:/sbin"}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Starts a program.

        Args:
            name: Names its log and its pid file.
            command: Program and arguments.
            environment: Additional variables.

        Raises:
            TestbedError: A program of this name runs already.
        """
        if name in self._children and self._children[name].poll() is None:
            raise TestbedError(f"{name} runs already")
        with (self._settings.logs / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                # The wrapper replaces itself by the program, so this pid is the program's.
                [sys.executable, die_with_parent.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, **(environment or {})},
                start_new_session=True,  # Ctrl-C reaches the tests only, which then stop the cluster in order
            )
        self._children[name] = child
        record = {"pid": child.pid, "created": psutil.Process(child.pid).create_time()}
        (self._settings.pids / name).write_text(json.dumps(record))

    def pid(self, name: str) -> int:
        """Returns the process id of a program."""
        return self._children[name].pid

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Stops a program and waits for its end."""
        stop_recorded(self._settings, name, number)
        self._children.pop(name).wait()

    def forget(self) -> None:
        """Forgets all programs, because something else has stopped them."""
        for child in self._children.values():
            child.wait()
        self._children.clear()

    def wait_for(self, what: str, is_reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Polls until a condition holds.

        Raises:
            NotReachedError: The condition did not hold in time, or a program ended meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        while not is_reached():
            ended = [name for name, child in self._children.items() if child.poll() is not None]
            if ended:
                raise NotReachedError(f"{what}: {ended[0]} has ended:\n{self.tail(ended[0])}")
            if time.monotonic() >= deadline:
                raise NotReachedError(f"{what}: not in {timeout_s:g} s; logs are in {self._settings.logs}")
            time.sleep(POLL_S)

    def tail(self, name: str, num_lines: int = 20) -> str:
        """Reads the end of a program's log."""
        lines = (self._settings.logs / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def stop_recorded(settings: Settings, name: str, number: signal.Signals, timeout_s: float = 15.0) -> None:
    """Stops a program by its pid file, whoever started it. A program that ignores the signal is killed.

    Args:
        settings: The cluster.
        name: The program.
        number: First signal.
        timeout_s: Longest time it may take to end.
    """
    path = settings.pids / name
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, psutil.NoSuchProcess):
        record = json.loads(path.read_text())
        process = psutil.Process(record["pid"])
        # Another process may have this pid by now: it must not get the signal.
        if process.create_time() == record["created"]:
            process.send_signal(number)
            if not _has_ended(process, timeout_s):
                process.kill()
                _has_ended(process, timeout_s)
    path.unlink(missing_ok=True)


def _has_ended(process: psutil.Process, timeout_s: float) -> bool:
    """Waits for the end of a process. A zombie counts as ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
