"""The cluster of ``sluice demo``: started from a copy of a manifest, and stopped at the end."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import TYPE_CHECKING

from sluice_cli.demo.scenario import DemoError, DemoScenario
from sluice_cli.local_cluster.cluster_directory import SLUICE_HOME, ClusterDirectory
from sluice_cli.local_cluster.detached_start import start_detached
from sluice_cli.local_cluster.launcher import UpOptions, read_manifest
from sluice_cli.local_cluster.shutdown import stop_cluster
from sluice_cli.processes.ports import PortAllocator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

DEMO_DIRECTORY = SLUICE_HOME / "demo"
NAME = "demo"
PREFERRED_HTTP_PORT = 8000


def run_demo(manifest: Path, ports: range, console: Console, report: Callable[[str], None], *, is_kept: bool) -> None:
    """Starts the cluster, shows the scenario and stops the cluster.

    Args:
        manifest: ServingCluster to show.
        ports: Ports to choose from.
        console: Where the scenario shows.
        report: Takes a line for people.
        is_kept: True: the cluster runs on.

    Raises:
        CommandError: The cluster cannot be started or shown, or a step did not happen.
        ManifestError: The manifest cannot be used.
    """
    # SIGTERM must stop the cluster too, on the way out through `finally`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = UpOptions(manifest=copy_manifest(manifest), http_port=_choose_http_port(ports), volumes={}, ports=ports)
    directory = ClusterDirectory(NAME)
    try:
        model = check_manifest_is_open(options)
        if directory.is_running():
            stop_cluster(directory, is_hurried=True, report=report)
        if start_detached(directory, options.as_arguments(), report):
            raise DemoError(f"the cluster did not start; see {directory.log_path('launcher')}")
        asyncio.run(DemoScenario(directory, options.manifest, model, console).run())
    finally:
        if is_kept:
            report(f"the cluster still runs; `sluice down --cluster {NAME}` stops it")
        elif directory.is_running():
            stop_cluster(directory, is_hurried=True, report=report)


def copy_manifest(manifest: Path) -> Path:
    """Copies a manifest under the demo's name, for the demo to edit."""
    DEMO_DIRECTORY.mkdir(parents=True, exist_ok=True)
    copy = DEMO_DIRECTORY / f"{NAME}.yaml"
    copy.write_text(re.sub(r"(?m)^  name: \S+$", f"  name: {NAME}", manifest.read_text(), count=1))
    return copy


def check_manifest_is_open(options: UpOptions) -> str:
    """Checks that the demo may send requests as they are; returns the model's name.

    Raises:
        DemoError: The routers ask for keys or certificates.
        ManifestError: The manifest cannot be used.
    """
    manifest = read_manifest(options)
    router = manifest.spec.router
    if router.auth.mode != "None" or router.tls.mode != "Disabled":
        raise DemoError("the demo sends no API key and uses no TLS; remove spec.router.auth and spec.router.tls")
    return manifest.served_name


def _choose_http_port(ports: range) -> int:
    """Finds a free port, and leaves it to the launcher to claim it."""
    allocator = PortAllocator(ports)
    port = allocator.choose([PREFERRED_HTTP_PORT])
    allocator.release(port)
    return port
