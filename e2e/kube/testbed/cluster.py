"""Starts the test cluster, and makes sure that nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.certificates import make_certificates
from testbed.cleanup import clean, start_reaper
from testbed.client import Client
from testbed.control_plane import ControlPlane
from testbed.errors import TestbedError
from testbed.fake_nodes import start_fake_nodes
from testbed.kubernetes_choice import build_chosen
from testbed.node import Node
from testbed.packages import install_packages
from testbed.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.settings import Settings

# A machine has one bridge, one packet filter table and one cgroup of each name.
NODE_LOCK = Path("/run/lock/sluice-kube-node")


class Testbed:
    """A running cluster.

    Args:
        settings: The cluster.
        path: Folder of the binaries.
    """

    __test__ = False  # pytest takes the name for a test's

    def __init__(self, settings: Settings, path: Path) -> None:
        self.settings = settings
        self.path = path
        self.processes = Processes(settings, path)
        self.client = Client(settings, path)
        self.control_plane = ControlPlane(settings, self.processes, self.client)
        self.node = Node(settings, self.processes, self.client, path)

    def start(self) -> None:
        """Starts everything and waits until it is ready."""
        self.control_plane.start()
        if self.settings.num_fake_nodes:
            start_fake_nodes(self.settings, self.processes, self.client, self.path)
        if self.settings.has_real_node:
            self.node.start()


@contextlib.contextmanager
def run_testbed(settings: Settings) -> Iterator[Testbed]:
    """Runs a cluster as long as the block lasts.

    Raises:
        MissingError: The machine lacks something.
        TestbedError: Another cluster runs, or this one does not come up.
    """
    if settings.has_real_node:
        install_packages()
    path = build_chosen()
    settings.logs.mkdir(parents=True, exist_ok=True)
    with _locked(settings) as locks:
        clean(settings)
        for log in settings.logs.glob("*.log"):
            log.unlink()
        settings.pids.mkdir()
        reaper = start_reaper(settings, locks)
        testbed: Testbed | None = None
        try:
            make_certificates(settings)
            testbed = Testbed(settings, path)
            testbed.start()
            yield testbed
        finally:
            reaper.communicate()  # closes its standard input, which is what the reaper waits for
            if testbed:
                testbed.processes.forget()


@contextlib.contextmanager
def _locked(settings: Settings) -> Iterator[list[int]]:
    """Locks the folder, and the machine too if it becomes a node; yields the locks' descriptors."""
    paths = [settings.logs / "lock", *([NODE_LOCK] if settings.has_real_node else [])]
    with contextlib.ExitStack() as stack:
        NODE_LOCK.parent.mkdir(parents=True, exist_ok=True)
        locks = [stack.enter_context(path.open("w")) for path in paths]
        for path, lock in zip(paths, locks, strict=True):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TestbedError(f"another test cluster holds {path}; stop it, or wait until it is gone") from error
        yield [lock.fileno() for lock in locks]
