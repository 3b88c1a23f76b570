"""Removes everything that a test cluster left on this machine, however it ended.

A *reaper* process waits for the end of the program that started the cluster: its standard input closes then, whatever
happened. It calls ``clean``, and so does the next start, in case the reaper was killed too. ``clean`` works from pid
files and fixed names, and may run any number of times.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from testbed import control_plane, node
from testbed.processes import stop_recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from testbed.settings import Settings

CGROUPS = Path("/sys/fs/cgroup")
LOG_LINKS = Path("/var/log/containers")


def clean(settings: Settings) -> None:
    """Stops the cluster and removes all of it but the logs."""
    if settings.node.is_dir():
        _clean_node(settings)
    # SIGKILL: nothing of the cluster is needed again, so no program need save its state.
    for name in ("kwok", *reversed(control_plane.PROGRAMS)):
        stop_recorded(settings, name, signal.SIGKILL)
    for path in (*settings.folder.glob("*"), settings.node):
        if path.is_dir() and path != settings.logs:
            shutil.rmtree(path, ignore_errors=True)  # another reaper may remove it at the same time
        elif path.is_file():
            path.unlink(missing_ok=True)


def find_leftovers(settings: Settings) -> list[str]:
    """Lists what of a cluster is left on this machine, each item with its kind."""
    state = _runtime_folder(settings)
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    found = [
        f"process {command}"
        for command in commands
        if any(str(path) in command for path in (settings.folder, settings.node, state))
    ]
    found += [f"mount {point}" for point in _mounts_below(settings.node, state)]
    found += [
        f"folder {path}"
        for path in (*settings.folder.glob("*"), settings.node, state)
        if path.exists() and path != settings.logs
    ]
    found += [f"link {node.BRIDGE}" for path in [Path("/sys/class/net") / node.BRIDGE] if path.exists()]
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=False).stdout.splitlines()
    return found + [table for table in tables if table.split()[-1] in ("kube-proxy", node.MASQUERADE_TABLE)]


def start_reaper(settings: Settings, locks: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts the process that cleans up once its standard input is closed.

    Args:
        settings: The cluster.
        locks: Descriptors of locks that the reaper holds until everything is gone, even if the caller ends first.
    """
    command = [sys.executable, "-m", "testbed", "reap", str(settings.folder), str(settings.ports.api)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=locks, start_new_session=True)


def _clean_node(settings: Settings) -> None:
    for name in ("kubelet", "kube-proxy", "coredns"):
        stop_recorded(settings, name, signal.SIGTERM)
    if (settings.pids / "containerd").exists():
        _remove_containers(settings)
    stop_recorded(settings, "containerd", signal.SIGTERM)
    _kill_shims(settings)
    state = _runtime_folder(settings)
    for point in sorted(_mounts_below(settings.node, state), reverse=True):
        _run("umount", "-l", point)
    shutil.rmtree(state, ignore_errors=True)
    for namespace in node.list_pod_namespaces() - node.read_foreign_namespaces(settings):
        _run("ip", "netns", "del", namespace)
    _run("ip", "link", "del", node.BRIDGE)
    for family, table in (("ip", "kube-proxy"), ("ip6", "kube-proxy"), ("ip", node.MASQUERADE_TABLE)):
        _run("nft", "delete", "table", family, table)
    before = settings.node / node.FORWARDING.name
    if before.is_file():
        node.FORWARDING.write_text(before.read_text())
    for link in LOG_LINKS.glob("*.log"):
        if str(link.readlink()).startswith(f"{settings.node}/"):
            link.unlink()
    _remove_cgroups()


def _remove_containers(settings: Settings) -> None:
    def names(kind: str) -> list[str]:
        return node.run_ctr(settings, "-n", "k8s.io", kind, "ls", "-q").stdout.split()

    for name in names("tasks"):
        node.run_ctr(settings, "-n", "k8s.io", "tasks", "kill", "-s", "KILL", "-a", name)
    for name in names("tasks"):
        node.run_ctr(settings, "-n", "k8s.io", "tasks", "delete", "-f", name)


def _kill_shims(settings: Settings) -> None:
    """Kills containerd's shims, which outlive both containerd and their containers."""
    socket = str(settings.node / "containerd.sock")
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command and Path(command[0]).name.startswith("containerd-shim") and socket in command:
            with contextlib.suppress(psutil.NoSuchProcess):
                # Containers first: without their shim, nothing names them as its children.
                for child in process.children(recursive=True):
                    child.kill()
                process.kill()


def _mounts_below(*folders: Path) -> list[str]:
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if any(point.startswith(f"{folder}/") for folder in folders)]


def _runtime_folder(settings: Settings) -> Path:
    return Path(node.RUNTIME_FOLDER.format(port=settings.ports.api))


def _remove_cgroups() -> None:
    for root in [CGROUPS / "kubepods", *CGROUPS.glob("*/kubepods")]:
        # The kernel's files in a cgroup cannot be removed, and need not be. Innermost groups go first.
        for folder, _, _ in os.walk(root, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _run(*command: str) -> None:
    """Runs a command that may find nothing to do."""
    subprocess.run(command, capture_output=True, check=False)
