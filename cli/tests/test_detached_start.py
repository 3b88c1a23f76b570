"""A launcher in the background: what it is started with, what of its output is shown, and how the wait for it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from sluice_cli.local_cluster import detached_start
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory, ProcessRecord

if TYPE_CHECKING:
    from pathlib import Path

PID = 4321


class PlayedLauncher:
    """A launcher that writes a piece of its log, or does something else, whenever it is looked at.

    Args:
        log: Its log.
        steps: What it does: text to write, or a number with which it ends.
    """

    def __init__(self, log: Path, steps: list[Any]) -> None:
        self.pid, self.returncode = PID, None
        self.log, self.steps, self.made = log, steps, list[str]()

    def poll(self) -> int | None:
        match self.steps.pop(0) if self.steps else None:
            case str(text):
                with self.log.open("a") as file:
                    file.write(text)
            case int(code):
                self.returncode = code
            case KeyboardInterrupt():
                raise KeyboardInterrupt
            case change if callable(change):
                change()
        return self.returncode

    def terminate(self) -> None:
        self.made.append("terminate")
        with self.log.open("a") as file:
            file.write("stopping\n")

    def wait(self) -> None:
        self.made.append("wait")


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    return ClusterDirectory("a", tmp_path / "home" / ".sluice")


def start(directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, *steps: Any, is_ready_after: int = 99) -> Any:
    """Starts a played launcher; returns the exit code, the lines that were shown, and the launcher."""
    launchers: list[PlayedLauncher] = []
    looks: list[int] = []
    lines: list[str] = []

    def begin(command: list[str], **options: Any) -> PlayedLauncher:
        assert command == [sys.executable, "-m", "sluice_cli", "up", "m.yaml", "--http-port", "1"]
        log = directory.log_path("launcher")
        assert options.pop("stdout").name == str(log)
        assert options == {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
        launchers.append(PlayedLauncher(log, list(steps)))
        return launchers[0]

    def is_ready(_directory: ClusterDirectory, pid: int) -> bool:
        assert pid == PID
        looks.append(pid)
        return len(looks) > is_ready_after

    pauses: list[float] = []
    monkeypatch.setattr(subprocess, "Popen", begin)
    monkeypatch.setattr(detached_start, "_is_ready", is_ready)
    monkeypatch.setattr(time, "sleep", pauses.append)
    code = detached_start.start_detached(directory, ["m.yaml", "--http-port", "1"], lines.append)
    assert pauses == [0.1] * (len(looks) - 1)
    return code, lines, launchers[0]


def test_whole_lines_are_shown_as_they_come_until_the_cluster_serves(directory, monkeypatch) -> None:
    steps = ("one\ntw", "o\n", "", "thr", "ee\nfour\nfi")
    code, lines, launcher = start(directory, monkeypatch, *steps, is_ready_after=4)
    assert (code, lines, launcher.made) == (0, ["one", "two", "three", "four"], [])


def test_a_launcher_that_ends_is_shown_to_its_last_word(directory, monkeypatch) -> None:
    code, lines, _ = start(directory, monkeypatch, "starting\n", "no such model\n", 7)
    assert (code, lines) == (7, ["starting", "no such model"])


def test_a_launcher_that_ends_well_before_it_serves_has_failed_all_the_same(directory, monkeypatch) -> None:
    assert start(directory, monkeypatch, "bye\n", 0)[:2] == (1, ["bye"])


def test_a_launcher_whose_engine_refuses_to_start_is_stopped_and_the_reason_is_the_last_line(
    directory, monkeypatch
) -> None:
    directory.path.mkdir(parents=True)
    records = [
        ProcessRecord(name="router-0", kind="router", pid=1),
        ProcessRecord(name="engine-0", kind="engine", pid=None, refusal="it has a window"),
    ]

    def refuse(pid: int) -> None:
        monkeypatch.setattr(os, "getpid", lambda: pid)
        directory.write_launcher("starting")
        directory.write_processes(records)

    # What another launcher left behind says nothing of this one.
    refuse(PID + 1)
    steps = ("engine-0: starting\n", lambda: refuse(PID), "never read\n")
    code, lines, launcher = start(directory, monkeypatch, *steps)
    assert (code, launcher.made) == (1, ["terminate", "wait"])
    assert lines == ["engine-0: starting", "stopping", "a cannot serve and is stopped: engine-0: it has a window"]


def test_a_cluster_that_serves_is_not_stopped_by_an_engine_that_refuses_a_later_start(directory, monkeypatch) -> None:
    directory.path.mkdir(parents=True)
    monkeypatch.setattr(os, "getpid", lambda: PID)
    directory.write_launcher("ready")
    directory.write_processes([ProcessRecord(name="engine-0", kind="engine", pid=None, refusal="it has a window")])
    assert start(directory, monkeypatch, "", "serves\n", is_ready_after=1)[:2] == (0, ["serves"])


def test_the_log_of_the_launcher_before_is_not_shown(directory, monkeypatch) -> None:
    log = directory.log_path("launcher")
    log.parent.mkdir(parents=True)
    log.write_text("old\n")
    assert start(directory, monkeypatch, "new\n", is_ready_after=1)[1] == ["new"]


def test_bytes_that_are_no_text_are_shown_as_far_as_they_are(directory, monkeypatch) -> None:
    log = directory.log_path("launcher")
    lines: list[str] = []
    log.parent.mkdir(parents=True)
    log.write_bytes(b"a\xffb\nrest")
    assert detached_start._print_new_lines(log, 0, lines.append) == 4
    assert detached_start._print_new_lines(log, 4, lines.append) == 4
    assert lines == ["a\N{REPLACEMENT CHARACTER}b"]


def test_ctrl_c_ends_the_launcher_too(directory, monkeypatch) -> None:
    launchers: list[PlayedLauncher] = []

    def begin(_command: list[str], **_options: Any) -> PlayedLauncher:
        launchers.append(PlayedLauncher(directory.log_path("launcher"), [KeyboardInterrupt()]))
        return launchers[0]

    monkeypatch.setattr(subprocess, "Popen", begin)
    with pytest.raises(KeyboardInterrupt):
        detached_start.start_detached(directory, [], print)
    assert launchers[0].made == ["terminate", "wait"]
