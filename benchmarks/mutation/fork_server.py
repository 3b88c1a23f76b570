"""Runs tests against changed functions: pytest imports and collects once, then every run gets a fork of that process.

In the fork, functions that have the original code get the changed code. No file is written, and decorators, coroutines,
generators, slots and frozen records need no help. The process that forks runs no test itself: it has no threads or
event loops, which forks would not survive.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

import coverage
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType

# A test may take this many times the CPU time that it takes without a mutant, and this much more.
CPU_FACTOR = 10.0
CPU_ALLOWANCE_S = 5.0
# It is stuck if it neither runs nor wants to for this many times its usual time, and this much more.
IDLE_FACTOR = 5.0
IDLE_ALLOWANCE_S = 15.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class TestRun:
    """What a test did without a mutant.

    Args:
        wall_s: Its time, set-up and tear-down included.
        cpu_s: Its CPU time.
        is_usable: It passes, and it is not skipped.
        lines: The lines that it runs, by file.
    """

    wall_s: float
    cpu_s: float
    is_usable: bool
    lines: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How tests ended.

    Args:
        killer: The first test that failed or did not end; None if all passed.
        has_timed_out: It did not end.
    """

    killer: str | None
    has_timed_out: bool = False


class ForkServer:
    """The pytest plugin that hands the collected tests to ``work`` in place of running them.

    Args:
        work: Called once, after collection.
    """

    def __init__(self, work: Callable[[ForkServer], None]) -> None:
        self._work = work
        self.items: dict[str, pytest.Item] = {}
        self._has_failed = False
        self._is_skipped = False

    def pytest_configure(self) -> None:
        """Has hypothesis try the same examples each time."""
        from hypothesis import Phase, settings  # noqa: PLC0415  (pytest rewrites its assertions first)

        # A failing example is enough: to shrink it would take most of the time.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", phases=phases, derandomize=True, database=None, deadline=None)
        settings.load_profile("mutation")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes how the test that runs in this fork ends."""
        self._has_failed |= report.failed
        self._is_skipped |= report.skipped

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Works in place of pytest's own loop."""
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} files of tests cannot be collected")
        self.items = {item.nodeid: item for item in session.items}
        self._work(self)
        return True

    def measure(self, nodeids: list[str], files: list[Path], into: Path) -> dict[str, TestRun]:
        """Runs tests without a mutant, one after the other in one fork.

        Args:
            nodeids: The tests.
            files: Whose lines are recorded.
            into: A file that carries what was measured.

        Raises:
            RuntimeError: The process ended before the last test did.
        """
        into.unlink(missing_ok=True)
        pid = self._fork(lambda: self._measure_here(nodeids, files, into))
        os.waitpid(pid, 0)
        _kill_group(pid)
        if not into.exists():
            raise RuntimeError(f"the process that measured {len(nodeids)} tests ended early: see {into}.log")
        return {nodeid: TestRun(**run) for nodeid, run in json.loads(into.read_text()).items()}

    def run(
        self, nodeids: list[str], runs: dict[str, TestRun], changed: Iterable[tuple[FunctionType, CodeType]]
    ) -> Verdict:
        """Runs tests in a fork in which functions have other code, until one fails.

        Args:
            nodeids: The tests, in their order.
            runs: What they take without a mutant.
            changed: The functions, with their code.
        """
        reading, writing = os.pipe()
        pid = self._fork(lambda: self._run_here(nodeids, writing, changed))
        os.close(writing)
        try:
            return _watch(pid, reading, nodeids, runs)
        finally:
            os.close(reading)
            _kill_group(pid)
            os.waitpid(pid, 0)

    def _fork(self, run: Callable[[], None]) -> int:
        if pid := os.fork():
            return pid
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            run()
        finally:
            os._exit(0)

    def _run_test(self, nodeid: str, next_nodeid: str | None) -> None:
        item = self.items[nodeid]
        following = self.items[next_nodeid] if next_nodeid is not None else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _run_here(self, nodeids: list[str], writing: int, changed: Iterable[tuple[FunctionType, CodeType]]) -> None:
        for function, code in changed:
            function.__code__ = code
        for nodeid, following in zip(nodeids, [*nodeids[1:], None], strict=True):
            os.write(writing, b"t")
            self._has_failed = False
            self._run_test(nodeid, following)
            if self._has_failed:
                os.write(writing, b"f")
                return
        os.write(writing, b"p")

    def _measure_here(self, nodeids: list[str], files: list[Path], into: Path) -> None:
        measuring = coverage.Coverage(data_file=None, config_file=False, include=[str(file) for file in files])
        runs: dict[str, TestRun] = {}
        measuring.start()
        for nodeid, following in zip(nodeids, [*nodeids[1:], None], strict=True):
            self._has_failed = self._is_skipped = False
            measuring.switch_context(nodeid)
            wall_s, cpu_s = time.monotonic(), time.process_time()
            self._run_test(nodeid, following)
            is_usable = not (self._has_failed or self._is_skipped)
            runs[nodeid] = TestRun(time.monotonic() - wall_s, time.process_time() - cpu_s, is_usable)
        measuring.stop()
        data = measuring.get_data()
        for file in data.measured_files():
            lines = defaultdict(list)
            for line, contexts in data.contexts_by_lineno(file).items():
                for nodeid in contexts:
                    lines[nodeid].append(line)
            for nodeid, found in lines.items():
                if nodeid in runs:
                    runs[nodeid].lines[file] = found
        new = into.with_suffix(".new")
        new.write_text(json.dumps({nodeid: asdict(run) for nodeid, run in runs.items()}))
        new.replace(into)


def _watch(pid: int, reading: int, nodeids: list[str], runs: dict[str, TestRun]) -> Verdict:
    """Follows a fork: it sends ``t`` when a test begins, ``f`` if it fails, ``p`` when all have passed."""
    current = nodeids[0]
    begun = 0
    since_s, (since_run_s, since_wait_s) = time.monotonic(), _get_activity(pid)
    while True:
        if select.select([reading], [], [], POLL_S)[0]:
            sent = os.read(reading, 4096)
            if sent.endswith(b"p"):
                return Verdict(None)
            begun += sent.count(b"t")
            current = nodeids[max(begun - 1, 0)]
            # What ends the process, whatever it is, fails the test.
            if not sent or sent.endswith(b"f"):
                return Verdict(current)
            since_s, (since_run_s, since_wait_s) = time.monotonic(), _get_activity(pid)
            continue
        run_s, wait_s = _get_activity(pid)
        ran_s = run_s - since_run_s
        idle_s = time.monotonic() - since_s - ran_s - (wait_s - since_wait_s)
        usual = runs[current]
        if ran_s > usual.cpu_s * CPU_FACTOR + CPU_ALLOWANCE_S or idle_s > usual.wall_s * IDLE_FACTOR + IDLE_ALLOWANCE_S:
            return Verdict(current, has_timed_out=True)


def _get_activity(pid: int) -> tuple[float, float]:
    """Gets for how long a process has run, and for how long it has waited for a core, in seconds."""
    run_ns = wait_ns = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            ran, waited, _ = (task / "schedstat").read_text().split()
            run_ns += int(ran)
            wait_ns += int(waited)
    return run_ns / 1e9, wait_ns / 1e9


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def find_functions(files: Iterable[Path]) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Finds the functions of files that are imported, by file, qualified name and first line."""
    names = {str(file) for file in files}
    found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in names:
            code = each.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(each)
    # Forks share what nobody moves.
    gc.freeze()
    return found
