"""Runs a step of CI within a limit of its own, and counts the tests of a run. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

# Time for a process to print where it stood.
DUMP_S = 5.0
# Of a failed test's message, in characters.
MESSAGE_LENGTH = 400
# Names the file in which conftest.py keeps the tests that have begun and not ended.
RUNNING_TESTS = "SLUICE_RUNNING_TESTS"
_processes: set[subprocess.Popen[bytes]] = set()
_is_ending = threading.Event()


@dataclass(kw_only=True)
class Counts:
    """Tests of a run, or of several."""

    passed: int = 0
    failed: int = 0
    skips: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Adds another run."""
        self.passed += other.passed
        self.failed += other.failed
        self.skips += other.skips
        self.failures += other.failures

    def print_with_reasons(self, prefix: str = "") -> None:
        """Prints the last lines of a run: why tests were skipped, what failed, and the counts."""
        lines = [f"skipped  {skip}" for skip in self.skips] + [f"failed  {failure}" for failure in self.failures]
        print(*lines, f"{prefix}{self}", sep="\n")

    def __str__(self) -> str:
        """The counts."""
        return f"{self.passed} passed, {self.failed} failed, {len(self.skips)} skipped"


def run_limited(command: Sequence[Any], *, limit_s: float, environment: dict[str, str], **options: Any) -> int:
    """Runs a command in a process group of its own, and ends the whole group at the limit.

    At the limit every Python process of the group prints the stacks of its threads to its standard error.

    Args:
        command: Program and arguments.
        limit_s: Seconds.
        environment: Its environment variables.
        options: Further arguments of ``subprocess.Popen``.

    Returns:
        The exit status; that of a signal if the command was ended.

    Raises:
        SystemExit: This process is ending.
    """
    if _is_ending.is_set():
        # A step that ran beside was ended: what comes after it must not begin meanwhile.
        raise SystemExit("ended by SIGTERM")
    environment = {**environment, "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    _processes.add(process)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"STOPPED at its limit of {limit_s:g} s: {' '.join(map(str, command))}", flush=True)
        _end(process)
        return process.wait()
    except BaseException:
        _end(process)
        raise
    finally:
        _processes.discard(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a group: one process after another prints its stacks, so that they do not mingle; then what is left ends."""
    with contextlib.suppress(ProcessLookupError):
        # The rest stands still meanwhile: it would go on, or end without a word, because another one ended.
        os.killpg(process.pid, signal.SIGSTOP)
        for member in _list_group(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGABRT)
                os.kill(member, signal.SIGCONT)
            deadline_s = time.monotonic() + DUMP_S
            while member in _list_group(process.pid) and time.monotonic() < deadline_s:
                time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)


def _list_group(group: int) -> list[int]:
    """The processes of a group that have not ended, oldest number first."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # After the program's name in parentheses, which may hold any character: state, parent, group.
            state, _parent, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                members.append(int(stat.parent.name))
    return sorted(members)


def end_steps_with_this_process() -> None:
    """Makes SIGTERM end the running steps, where they stand, before this process; no further one begins."""

    def end(_number: int, _frame: FrameType | None) -> None:
        _is_ending.set()
        for process in list(_processes):
            _end(process)
        sys.exit("ended by SIGTERM")

    signal.signal(signal.SIGTERM, end)


def run_pytest(
    arguments: Sequence[str],
    *,
    limit_s: float,
    folder: Path,
    environment: dict[str, str] | None = None,
    name: str = "",
    python: str | Path = sys.executable,
) -> Counts:
    """Runs tests and shows their progress; at the limit it says which of them ran, and counts a failure.

    Args:
        arguments: Of pytest.
        limit_s: Seconds.
        folder: Where it runs.
        environment: Further environment variables.
        name: Where steps run side by side: what it prints appears at its end, under this name.
        python: The interpreter.
    """
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "output").open("w+b") as output:
        report, running = Path(scratch) / "report.xml", Path(scratch) / "running"
        started_s = time.monotonic()
        status = run_limited(
            [python, "-m", "pytest", "-q", f"--junitxml={report}", *arguments],
            limit_s=limit_s,
            environment={**os.environ, **(environment or {}), RUNNING_TESTS: str(running)},
            cwd=folder,
            stdout=output if name else None,
        )
        counts = read_report(report)
        text = ""
        if name:
            output.seek(0)
            text = f"{output.read().decode(errors='replace')}ended   {name} ({time.monotonic() - started_s:.0f} s)\n"
        if status != 0 and running.is_file() and (tests := running.read_text()):
            text += f"tests that had begun and not ended:\n{tests}\n"
        # One call, since the lines of other steps must not come between.
        print(text, end="", flush=True)
    # A run that ends before it reports (an import error, a signal) has failed too, and so has one without a test.
    if status != 0 or not counts.passed:
        counts.failed = max(1, counts.failed)
    return counts


def run_side_by_side(*lanes: Sequence[Callable[[], Counts]]) -> Counts:
    """Runs all lanes at once, the steps of each one after the other, and adds their counts."""

    def run_lane(steps: Sequence[Callable[[], Counts]]) -> list[Counts]:
        return [step() for step in steps]

    total = Counts()
    with ThreadPoolExecutor(len(lanes)) as threads:
        for lane in threads.map(run_lane, lanes):
            for counts in lane:
                total.add(counts)
    return total


def read_report(report: Path) -> Counts:
    """Counts the tests of a JUnit report; none if there is no report."""
    counts = Counts()
    cases = ET.parse(report).getroot().iter("testcase") if report.is_file() else ()
    for case in cases:
        skip, failure = case.find("skipped"), case.find("failure")
        name = f"{case.get('classname')}.{case.get('name')}"
        if failure is None:
            failure = case.find("error")
        if failure is not None:
            counts.failed += 1
            # The report's text ends with where it failed.
            where = (failure.text or "").rstrip().rpartition("\n")[2]
            message = " ".join((failure.get("message") or "").split())[:MESSAGE_LENGTH]
            counts.failures.append(f"{name}: {message} ({where})")
        elif skip is not None:
            counts.skips.append(f"{name}: {skip.get('message')}")
        else:
            counts.passed += 1
    return counts
