"""Keeps one process running: crash, back-off, restart, until it is stopped."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from pathlib import Path

    from sluice_cli.processes.child_processes import ChildProcess, LaunchSpec, Spawner

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# A program that ran this long was healthy: the next crash counts as the first.
STABLE_S = 60.0
# How an engine's log begins the line that says why it ends, and how much of the log is searched for it.
LAST_WORDS = "sluice_engine: "
MAX_LAST_WORDS_BYTES = 65_536


def backoff_s(num_failures: int) -> float:
    """Wait before the next start, in seconds, after ``num_failures`` crashes in a row (at least one)."""
    return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 30))


def describe_exit(code: int) -> str:
    """Says in words how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def read_last_words(log: Path) -> str:
    """The last line in which an engine says why it ends; empty: there is none."""
    try:
        lines = log.read_bytes()[-MAX_LAST_WORDS_BYTES:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.removeprefix(LAST_WORDS) for line in lines if line.startswith(LAST_WORDS)]
    return said[-1] if said else ""


class SupervisedProcess:
    """A program that is started again when it ends.

    Args:
        name: For people.
        launch: What to run; may be replaced between starts.
        spawner: Starts it.
        report: Takes a line for people.
        on_change: Called after each start and each end.
        refusals: Exit codes after which another try would end the same.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.
    """

    def __init__(
        self,
        name: str,
        launch: LaunchSpec,
        *,
        spawner: Spawner,
        report: Callable[[str], None],
        on_change: Callable[[], None],
        refusals: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = name
        self.launch = launch
        self.num_starts = 0
        self.started_s = 0.0
        # Why the program cannot start; empty: it can, as far as is known.
        self.refusal = ""
        self._refusals = refusals
        self._spawner = spawner
        self._report = report
        self._on_change = on_change
        self._clock = clock
        self._sleep = sleep
        self._child: ChildProcess | None = None
        self._is_stopping = False
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id, while it runs."""
        return self._child.pid if self._child else None

    async def run(self) -> None:
        """Runs the program again and again until ``stop``."""
        num_failures = 0
        try:
            while not self._is_stopping:
                code = await self._run_once()
                if self._is_stopping:
                    break
                if code in self._refusals:
                    await self._rest(code)
                    break
                num_failures = 1 if self._clock() - self.started_s > STABLE_S else num_failures + 1
                delay_s = backoff_s(num_failures)
                self._report(
                    f"{self.name} ended ({describe_exit(code)});"
                    f" it starts again in {delay_s:g} s; see {self.launch.log}"
                )
                await self._pause(delay_s)
        finally:
            self._ended.set()

    async def _rest(self, code: int) -> None:
        """Says why the program cannot start, and waits until it is stopped, as for an edit that replaces it."""
        self.refusal = read_last_words(self.launch.log) or describe_exit(code)
        self._report(f"{self.name} refuses to start: {self.refusal}; it is tried again when the manifest changes it")
        self._on_change()
        await self._stop.wait()

    async def stop(self, grace_s: float) -> None:
        """Ends the program: SIGTERM, then SIGKILL to its group when the grace is over.

        Args:
            grace_s: Longest wait between the two, in seconds.
        """
        self._is_stopping = True
        self._stop.set()
        if self._child:
            self._child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            self._report(f"{self.name} did not end within {grace_s:g} s; it is killed")
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """Kills the present process and all it started; it is restarted unless ``stop`` was called."""
        if self._child:
            self._child.kill_group()

    async def _run_once(self) -> int:
        self._child = child = await self._spawner(self.launch)
        self.num_starts += 1
        self.started_s = self._clock()
        if self._is_stopping:  # stop() came during the start and found no child to signal
            child.send_signal(signal.SIGTERM)
        self._on_change()
        try:
            return await child.wait()
        finally:
            child.kill_group()
            self._child = None
            self._on_change()

    async def _pause(self, delay_s: float) -> None:
        waits = [asyncio.ensure_future(self._sleep(delay_s)), asyncio.ensure_future(self._stop.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
