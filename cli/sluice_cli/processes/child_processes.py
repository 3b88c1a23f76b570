"""Child processes: started in a session of their own, dying with the launcher, awaited through pidfds."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sluice_cli.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """A program to run.

    Args:
        command: A container's command line; ``python`` is the Python that runs the launcher.
        environment: Variables beside the launcher's own.
        log: File that its output is appended to.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path


class ChildProcess(Protocol):
    """A running child process."""

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its process group."""

    async def wait(self) -> int:
        """Waits for its end; returns its exit code, negative for a signal."""

    def send_signal(self, number: int) -> None:
        """Sends a signal to it, if it still runs."""

    def kill_group(self) -> None:
        """Kills it and whatever it has started, if anything still runs."""


class Spawner(Protocol):
    """Starts children."""

    async def __call__(self, launch: LaunchSpec) -> ChildProcess:
        """Starts a program."""


class PidfdChild:
    """A child of this very process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self._ended.set_result(os.waitstatus_to_exitcode(status))

    async def wait(self) -> int:
        """Waits for its end; returns its exit code, negative for a signal."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Sends a signal to it, if it still runs."""
        if not self._ended.done():
            signal.pidfd_send_signal(self._descriptor, number)

    def kill_group(self) -> None:
        """Kills it and whatever it has started, if anything still runs."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def full_environment(launch: LaunchSpec) -> dict[str, str]:
    """The environment of a child: ours, the launch's, and a PATH on which ``python`` is our own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PYTHONUNBUFFERED": "1", **launch.environment, "PATH": path}


async def spawn(launch: LaunchSpec) -> ChildProcess:
    """Starts a program as a child that dies with this process."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    wrapped = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *launch.command]
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    pid = os.posix_spawn(  # noqa: ASYNC221 - returns at once: it starts a process and waits for nothing
        sys.executable,
        wrapped,
        full_environment(launch),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(launch.log), append & ~os.O_CLOEXEC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        # A session of its own keeps the terminal's Ctrl-C from the child, which the launcher drains instead. Its
        # process group is its own too, so that what it leaves behind is killed with it.
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP],
    )
    return PidfdChild(pid)
