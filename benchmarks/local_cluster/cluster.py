"""A real cluster for a benchmark: ``sluice up`` as a user runs it, seen and driven from outside.

The launcher works in a directory of its own; whatever it started has ended when the block ends. Plans, roles and chunk
sizes are changed as a user changes them, by editing the manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import yaml
from benchmarks.local_cluster.client import BenchmarkClient, StreamFailedError, list_errors
from examples import tiny_model

from sluice.v1 import control_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny-cpu.yaml"
MODELS = ROOT / ".sluice" / "volumes" / "models"
POLL_S = 0.25
STOP_TIMEOUT_S = 90.0
NUM_LOG_LINES = 40


class ClusterError(RuntimeError):
    """The cluster did not come to where the benchmark needs it; with the end of the launcher's output."""


@dataclass(slots=True)
class BenchmarkCluster:
    """A running ``sluice up``; mutable, because the manifest changes.

    Args:
        directory: Working directory of the launcher: manifest, state, logs.
        manifest: The manifest in force; change it with ``edit``.
        process: The launcher.
    """

    directory: Path
    manifest: dict[str, Any]
    process: subprocess.Popen[bytes]

    @property
    def served_name(self) -> str:
        """Name that clients use for the model."""
        return str(self.manifest["spec"]["model"]["servedName"])

    def read_processes(self, kind: str) -> dict[str, dict[str, Any]]:
        """Reads the launcher's records of its processes by name; none before it has written them.

        Args:
            kind: ``engine`` or ``router``.
        """
        path = self.directory / ".sluice" / "clusters" / self.manifest["metadata"]["name"] / "processes.json"
        try:
            records = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return {record["name"]: record for record in records if record["kind"] == kind and record["pid"]}

    def find_processes(self, kind: str) -> list[psutil.Process]:
        """Finds all running processes of a kind, their children included."""
        found = []
        for record in self.read_processes(kind).values():
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(record["pid"])
                found += [root, *root.children(recursive=True)]
        return found

    def find_affinity(self) -> dict[str, list[int]]:
        """Finds the cores that each engine's EngineCore may run on; the serving process computes nothing."""
        affinity = {}
        for name, record in self.read_processes("engine").items():
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(record["pid"])
                cores = {core for child in root.children(recursive=True) for core in child.cpu_affinity() or ()}
                affinity[name] = sorted(cores)
        return affinity

    def read_tail(self) -> str:
        """Reads the end of the launcher's output."""
        lines = (self.directory / "up.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-NUM_LOG_LINES:])

    def write(self, manifest: dict[str, Any]) -> None:
        """Writes the manifest as an editor does: another file, renamed over the first."""
        path = self.directory / "manifest.yaml"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(yaml.safe_dump(manifest))
        temporary.replace(path)
        self.manifest = manifest

    @contextlib.asynccontextmanager
    async def connect(self, timeout_s: float) -> AsyncIterator[BenchmarkClient]:
        """Connects to the first router once the whole cluster serves.

        Args:
            timeout_s: Longest wait.

        Raises:
            ClusterError: It does not serve in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (records := self.read_processes("router")):
            self._check(deadline_s, "a router runs")
            await asyncio.sleep(POLL_S)
        ports = records["router-0"]["ports"]
        async with BenchmarkClient.open(
            grpc_port=ports["grpc"], control_port=ports["control"], http_port=ports["http"]
        ) as client:
            await self._wait_in_force(client, 0, deadline_s)
            yield client

    async def edit(
        self, client: BenchmarkClient, change: Callable[[dict[str, Any]], None], timeout_s: float = 120.0
    ) -> None:
        """Edits the spec, and waits until every engine has acknowledged the plan that comes of it.

        Args:
            client: Of the router.
            change: Changes the spec that it is given.
            timeout_s: Longest wait.

        Raises:
            ClusterError: The plan is not in force in time.
        """
        edited = copy.deepcopy(self.manifest)
        change(edited["spec"])
        if edited == self.manifest:
            return
        before = await client.read_status()
        self.write(edited)
        await self._wait_in_force(client, before.generation, time.monotonic() + timeout_s)

    async def _wait_in_force(self, client: BenchmarkClient, generation: int, deadline_s: float) -> None:
        """Waits for a plan above ``generation`` that every wanted engine, and no other, has acknowledged."""
        wanted = self.manifest["spec"]["replicas"]
        status = control_pb2.GetStatusResponse()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await client.read_status()
                states = [engine.state for engine in status.engines]
                if (
                    status.is_ready
                    and states == [control_pb2.ENGINE_STATE_READY] * wanted
                    and status.acknowledged_generation == status.generation > generation
                ):
                    return
            self._check(deadline_s, f"{wanted} engines serve and have acknowledged a plan above {generation}", status)
            await asyncio.sleep(POLL_S)

    def _check(self, deadline_s: float, what: str, status: control_pb2.GetStatusResponse | None = None) -> None:
        if self.process.poll() is not None:
            raise ClusterError(f"`sluice up` ended with {self.process.returncode}:\n{self.read_tail()}")
        if time.monotonic() > deadline_s:
            raise ClusterError(f"not reached in time: {what}\n{status or ''}\n{self.read_tail()}")


def make_manifest(name: str, *, http_port: int, replicas: int) -> dict[str, Any]:
    """Makes a manifest from the example: one router, the tiny model, a cluster name of its own.

    Args:
        name: Name of the cluster.
        http_port: Port of the router's HTTP API.
        replicas: Engines.
    """
    manifest: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["name"] = name
    spec = manifest["spec"]
    spec["replicas"] = replicas
    spec["slo"].pop("classes", None)
    spec["router"] = {"replicas": 1, "service": {"port": http_port}}
    return manifest


@contextlib.contextmanager
def run_cluster(
    directory: Path, manifest: dict[str, Any], *, ports: range, models: Path = MODELS
) -> Iterator[BenchmarkCluster]:
    """Runs ``sluice up`` until the block ends; then Ctrl-C.

    Args:
        directory: Working directory, made if need be.
        manifest: The ServingCluster.
        ports: Ports that the launcher may choose.
        models: Its claim ``models``; the repository's own, with the tiny model, by default.
    """
    # A killed benchmark would leave the cluster behind; this way the block ends as it does with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    directory.mkdir(parents=True, exist_ok=True)
    tiny_model.make_tiny_model(MODELS / "tiny")
    path = directory / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest))
    command = [sys.executable, "-m", "sluice_cli.main", "up", str(path), "--volume", f"models={models}"]
    with (directory / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port-range", f"{ports[0]}-{ports[-1]}"],
            cwd=directory,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield BenchmarkCluster(directory, manifest, process)
        finally:
            _stop(process)


def run_to_status(run: Callable[[], None], *failures: type[Exception]) -> int:
    """Runs a benchmark; failures of the cluster, of a request, and of ``failures`` are printed without a traceback.

    Args:
        run: The benchmark.
        failures: Further errors that say what is wrong by themselves.

    Returns:
        The exit status.
    """
    status = 0
    known: tuple[type[Exception], ...] = (ClusterError, StreamFailedError, *failures)
    try:
        run()
    except* known as group:
        for error in list_errors(group):
            print(f"FAILED: {error}", file=sys.stderr)
        status = 1
    return status


def read_cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Reads the CPU time of processes, in seconds; those that have ended are left out."""
    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher and, if it leaves any, what it started."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(tree, timeout=1.0)
    for left in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
