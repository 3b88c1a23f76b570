"""Runs a manifest's cluster in the foreground until SIGINT or SIGTERM (``sluice up``)."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sluice_cli.local_cluster.cluster import LocalCluster
from sluice_cli.local_cluster.cluster_directory import SLUICE_HOME, ClusterDirectory
from sluice_cli.local_cluster.local_manifest import check_local, find_model, find_secret
from sluice_cli.local_cluster.manifest_watch import follow_manifest
from sluice_cli.local_cluster.shutdown import kill_leftovers
from sluice_cli.processes.ports import DEFAULT_RANGE, PortAllocator
from sluice_cli.processes.spawners import make_engine_spawner, make_router_spawner
from sluice_operator.api.manifest import ManifestError, parse_manifest, read_manifest_text

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from pathlib import Path

    from sluice_operator.api.serving_cluster import ServingCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of ``sluice up``.

    Args:
        manifest: The manifest's file.
        http_port: Port of the first router instead of the manifest's.
        volumes: Directories of claims that do not lie in Sluice's own.
        secrets: Directories of Secrets that do not lie in Sluice's own.
        ports: Ports to choose from.
        home: Sluice's directory.
    """

    manifest: Path
    http_port: int | None
    volumes: Mapping[str, Path]
    secrets: Mapping[str, Path] = field(default_factory=dict)
    ports: range = DEFAULT_RANGE
    home: Path = SLUICE_HOME

    def as_arguments(self) -> list[str]:
        """Arguments of ``sluice up`` that say the same."""
        arguments = [str(self.manifest), "--port-range", f"{self.ports[0]}-{self.ports[-1]}"]
        if self.http_port:
            arguments += ["--http-port", str(self.http_port)]
        for name, path in self.volumes.items():
            arguments += ["--volume", f"{name}={path}"]
        for name, path in self.secrets.items():
            arguments += ["--secret", f"{name}={path}"]
        return arguments


def read_manifest(options: UpOptions, text: str | None = None) -> ServingCluster:
    """Reads the manifest and checks that this machine can do what it asks for.

    Args:
        options: Where it is.
        text: Its text, if it has been read already.

    Raises:
        ManifestError: It is wrong, or asks for what only Kubernetes can do.
    """
    manifest = parse_manifest(read_manifest_text(options.manifest) if text is None else text)
    problems = check_local(manifest, options.home, options.volumes, options.secrets)
    if problems:
        raise ManifestError(problems)
    return manifest


async def run_launcher(
    options: UpOptions,
    report: Callable[[str], None],
    show: Callable[[LocalCluster], Coroutine[None, None, None]],
) -> None:
    """Runs the cluster until SIGINT or SIGTERM.

    Args:
        options: What to run.
        report: Takes a line for people.
        show: Shows the cluster until cancelled.

    Raises:
        ManifestError: The manifest cannot be used.
        AlreadyRunningError: The cluster has a launcher.
        ExceptionGroup: Holds a PortError when a port that the manifest names is in use.
    """
    text = read_manifest_text(options.manifest)
    manifest = read_manifest(options, text)
    directory = ClusterDirectory(manifest.metadata.name, options.home)
    directory.lock()
    # From the phase on, others take the processes for this launcher's.
    kill_leftovers(directory, report)
    directory.write_launcher("starting", manifest=str(options.manifest.absolute()), model=manifest.served_name)
    cluster = _make_cluster(manifest, directory, options, report)
    last_phase = "failed"
    try:
        check = partial(check_local, home=options.home, volumes=options.volumes, secrets=options.secrets)
        followers = (
            follow_manifest(options.manifest, text, cluster, check, report),
            show(cluster),
            _record_phase(cluster, directory),
        )
        await _run(cluster, followers, report)
        last_phase = "stopped"
    finally:
        directory.write_launcher(last_phase)


def _make_cluster(
    manifest: ServingCluster, directory: ClusterDirectory, options: UpOptions, report: Callable[[str], None]
) -> LocalCluster:
    return LocalCluster(
        manifest,
        directory,
        manifest_path=options.manifest,
        ports=PortAllocator(options.ports),
        spawn_engine=make_engine_spawner(directory.log_path("forkserver"), report),
        spawn_router=make_router_spawner(),
        find_model=partial(find_model, home=options.home, volumes=options.volumes),
        find_secret=partial(find_secret, home=options.home, secrets=options.secrets),
        http_port=options.http_port,
        report=report,
    )


async def _run(
    cluster: LocalCluster, followers: Iterable[Coroutine[None, None, None]], report: Callable[[str], None]
) -> None:
    """Runs the cluster and, until it has ended, what follows it."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    _handle_signals(stop, hurry, report)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(follower) for follower in followers]
        await cluster.run(stop, hurry)
        for task in tasks:
            task.cancel()


def _handle_signals(stop: asyncio.Event, hurry: asyncio.Event, report: Callable[[str], None]) -> None:
    def on_signal() -> None:
        if stop.is_set():
            report("stopping at once")
            hurry.set()
        else:
            report("stopping once streams have ended; again to stop at once")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


async def _record_phase(cluster: LocalCluster, directory: ClusterDirectory) -> None:
    recorded = ("starting", "")
    while True:
        found = cluster.phase, cluster.rollout
        if found != recorded:
            recorded = found
            directory.write_launcher(cluster.phase, rollout=cluster.rollout)
        await cluster.wait_for_change()
