"""Stops a cluster's launcher, waits for it, and kills processes that a launcher left (``sluice down``)."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psutil

from sluice_cli.local_cluster.cluster_directory import ClusterDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory


def stop_cluster(directory: ClusterDirectory, *, is_hurried: bool, report: Callable[[str], None]) -> None:
    """Stops a cluster.

    Args:
        directory: The cluster.
        is_hurried: True: do not wait for streams to end.
        report: Takes a line for people.
    """
    launcher = directory.read_launcher()
    process = launcher[0].find() if launcher else None
    if process is None:
        report(f"{directory.name} does not run")
    else:
        report(f"stopping {directory.name}")
        process.send_signal(signal.SIGTERM)
        if is_hurried:
            _send_again(process)
        process.wait()
    for record in directory.read_processes():
        leftover = record.find()
        if leftover:
            report(f"{record.name} still runs (process {leftover.pid}); it is killed")
            leftover.kill()
            leftover.wait()
    report(f"{directory.name} has stopped")


def _send_again(process: psutil.Process) -> None:
    """Sends the second signal, which ends the drain; pending signals merge, so it waits until the first was taken."""
    try:
        process.wait(timeout=0.5)
    except psutil.TimeoutExpired:
        process.send_signal(signal.SIGTERM)


def kill_leftovers(directory: ClusterDirectory, report: Callable[[str], None]) -> None:
    """Kills processes that an earlier launcher left behind, if the kernel has not done so, and forgets them."""
    for record in directory.read_processes():
        process = record.find()
        if process:
            report(f"{record.name} of an earlier launcher still runs (process {process.pid}); it is killed")
            process.kill()
            process.wait()
    directory.write_processes([])
