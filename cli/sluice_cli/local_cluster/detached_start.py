"""Starts a launcher in the background, and follows its output until the cluster serves or never will."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory

POLL_S = 0.1


def start_detached(directory: ClusterDirectory, arguments: Sequence[str], report: Callable[[str], None]) -> int:
    """Starts ``sluice up`` in a session of its own, and waits until it serves or ends.

    A launcher with an engine that refuses to start waits for an edit of the manifest. Nobody is there to make one, so
    it is stopped.

    Args:
        directory: The cluster; its launcher writes there.
        arguments: Arguments of ``sluice up``, without ``--detach``.
        report: Takes each line that the launcher prints.

    Returns:
        0 once the cluster serves; 1 when an engine refuses to start; the launcher's exit code when it ended before.
    """
    log = directory.log_path("launcher")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        launcher = subprocess.Popen(  # noqa: S603 - our own program with the user's own arguments
            [sys.executable, "-m", "sluice_cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _follow(directory, launcher, log, report)
    except KeyboardInterrupt:
        launcher.terminate()
        launcher.wait()
        raise


def _follow(
    directory: ClusterDirectory, launcher: subprocess.Popen[bytes], log: Path, report: Callable[[str], None]
) -> int:
    position = 0
    while True:
        has_ended = launcher.poll() is not None
        is_ready = _is_ready(directory, launcher.pid)
        position = _print_new_lines(log, position, report)
        if is_ready:
            return 0
        if refusal := _find_refusal(directory, launcher.pid):
            launcher.terminate()
            launcher.wait()
            _print_new_lines(log, position, report)
            report(f"{directory.name} cannot serve and is stopped: {refusal}")
            return 1
        if has_ended:
            return launcher.returncode or 1
        time.sleep(POLL_S)


def _is_ready(directory: ClusterDirectory, pid: int) -> bool:
    return _read_phase(directory, pid) == "ready"


def _find_refusal(directory: ClusterDirectory, pid: int) -> str:
    """Why an engine cannot start; empty: all can, as far as is known."""
    if _read_phase(directory, pid) != "starting":
        return ""
    refused = [f"{process.name}: {process.refusal}" for process in directory.read_processes() if process.refusal]
    return refused[0] if refused else ""


def _read_phase(directory: ClusterDirectory, pid: int) -> str:
    """The phase that a launcher has written; empty: none yet."""
    launcher = directory.read_launcher()
    return str(launcher[1]["phase"]) if launcher is not None and launcher[0].pid == pid else ""


def _print_new_lines(log: Path, position: int, report: Callable[[str], None]) -> int:
    """Prints the whole lines after ``position``; returns where the next ones begin."""
    content = log.read_bytes()
    end = content.rfind(b"\n", position) + 1
    if end <= position:
        return position
    for line in content[position:end].decode(errors="replace").splitlines():
        report(line)
    return end
