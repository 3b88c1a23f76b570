"""A real cluster for tests: ``sluice up`` as users run it, in a directory of its own.

The launcher, the routers and the engines are the product's processes; nothing is faked. Tests observe them from
outside: HTTP, gRPC, ``sluice status``, signals to process ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import yaml

from sluice.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_cli.local_cluster.status_reader import read_cluster_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from workload import Request

SLUICE = (sys.executable, "-m", "sluice_cli.main")
PROMPT_DEADLINE_S = 60.0


class NotReachedError(AssertionError):
    """A condition did not become true in time."""


@dataclass(slots=True)
class Cluster:
    """A running ``sluice up``.

    Args:
        directory: Working directory: manifest, state, logs.
        manifest: The present manifest; change it with ``edit``.
        process: The launcher.
    """

    directory: Path
    manifest: dict[str, Any]
    process: subprocess.Popen[bytes]
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.directory / "up.log"

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    # --- read

    def status(self) -> dict[str, Any]:
        """Returns what ``sluice status --json`` prints, without starting a process."""
        directory = ClusterDirectory(self.name, self.directory / ".sluice")
        # In a thread with its own event loop, so that coroutines can call it too.
        with ThreadPoolExecutor(1) as thread:
            view = thread.submit(asyncio.run, read_cluster_status(directory)).result()
        return view.to_dict()

    def processes(self, kind: str) -> dict[str, dict[str, Any]]:
        """Lists the launcher's process records of a kind (``engine``, ``router``) by name."""
        path = self.directory / ".sluice" / "clusters" / self.name / "processes.json"
        return {record["name"]: record for record in json.loads(path.read_text()) if record["kind"] == kind}

    def pid(self, name: str) -> int:
        """Returns the process id of an engine or router."""
        kind = name.split("-", maxsplit=1)[0]
        return int(self.processes(kind)[name]["pid"])

    def wait_replaced(self, name: str, pid: int) -> None:
        """Wait until an engine is another process than ``pid``, whose end is noticed a little later, and all serve."""
        self.wait(f"another process is {name}", lambda _: self.processes("engine").get(name, {}).get("pid", pid) != pid)
        self.wait_ready()

    def wait_router_replaced(self, name: str, pid: int) -> None:
        """Wait until a router is another process than ``pid``, whose end is noticed a little later, and serves."""
        self.wait(f"another process is {name}", lambda _: self.processes("router").get(name, {}).get("pid", pid) != pid)
        self.wait_ready()

    def address(self, router: str = "router-0", port: str = "grpc") -> str:
        """Returns host:port of a router."""
        return f"127.0.0.1:{self.processes('router')[router]['ports'][port]}"

    def url(self, router: str = "router-0") -> str:
        """Returns the root URL of a router's HTTP API."""
        return f"http://{self.address(router, 'http')}"

    # --- act

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Edit the manifest file as an editor does: write another file, then rename it over the first."""
        edited = json.loads(json.dumps(self.manifest))
        change(edited["spec"])
        self.write(edited)

    def edit_plan(
        self,
        change: Callable[[dict[str, Any]], None],
        is_reached: Callable[[dict[str, Any]], bool] = lambda _: True,
        timeout_s: float = 90.0,
    ) -> dict[str, Any]:
        """Edit what the plan says, and wait until every engine has taken it.

        Args:
            change: Changes the spec.
            is_reached: What else holds by then.
            timeout_s: Seconds.

        Returns:
            The status then.
        """
        generation = max(router["generation"] for router in self.status()["routers"])
        self.edit(change)
        return self.wait(
            "the edited plan is in force",
            lambda status: (
                all(router["acknowledged_generation"] > generation for router in status["routers"])
                and is_reached(status)
            ),
            timeout_s,
        )

    def write(self, manifest: dict[str, Any]) -> None:
        path = self.directory / "manifest.yaml"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(yaml.safe_dump(manifest))
        temporary.replace(path)
        self.manifest = manifest

    def kill(self, name: str, number: signal.Signals) -> None:
        """Send a signal to an engine or router by its process id."""
        os.kill(self.pid(name), number)

    def engine_tree(self, name: str) -> list[int]:
        """List the process ids of an engine: its server and its EngineCore."""
        serving = psutil.Process(self.pid(name))
        return [serving.pid, *(child.pid for child in serving.children(recursive=True))]

    @staticmethod
    def signal_all(pids: list[int], number: signal.Signals) -> None:
        """Send a signal to processes; those that have ended are skipped."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, what: str, is_reached: Callable[[dict[str, Any]], bool], timeout_s: float = 90.0) -> dict[str, Any]:
        """Poll ``sluice status`` until a condition on it holds.

        Raises:
            NotReachedError: The condition did not hold in time; the message has the last status.
        """
        deadline = time.monotonic() + timeout_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise NotReachedError(f"`sluice up` ended with {self.process.returncode}:\n{self.tail()}")
            status = self.status()
            if is_reached(status):
                return status
            time.sleep(0.2)
        raise NotReachedError(f"not reached in {timeout_s:g} s: {what}\n{json.dumps(status, indent=1)}\n{self.tail()}")

    def wait_ready(self, timeout_s: float = 400.0) -> dict[str, Any]:
        """Wait until every engine and router of the manifest serves."""
        wanted = self.manifest["spec"]["replicas"]
        return self.wait(
            "every engine and router serves",
            lambda status: bool(status["is_ready"]) and len(status["engines"]) == wanted,
            timeout_s,
        )

    def wait_idle(self, timeout_s: float = 45.0) -> dict[str, Any]:
        """Wait until no request is left, and every engine has all blocks free, none granted and none pinned."""
        return self.wait("every engine idle with all its blocks free", is_idle, timeout_s)

    def tail(self, lines: int = 40) -> str:
        """Read the end of the launcher's output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> int:
        """Press Ctrl-C, as a user would; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    # --- requests

    @contextlib.asynccontextmanager
    async def client(self, router: str = "router-0") -> AsyncIterator[Client]:
        """Open a gRPC client of a router's API and control port."""
        async with (
            grpc.aio.insecure_channel(self.address(router)) as api,
            grpc.aio.insecure_channel(self.address(router, "control")) as control,
        ):
            yield Client(router_pb2_grpc.RouterStub(api), control_pb2_grpc.ControlStub(control))


@dataclass(frozen=True, slots=True)
class Client:
    """gRPC stubs of one router."""

    api: router_pb2_grpc.RouterAsyncStub
    control: control_pb2_grpc.ControlAsyncStub

    async def generate(
        self,
        request: Request,
        *,
        move_at: tuple[int, ...] = (),
        route: tuple[str, ...] = (),
        result: Result | None = None,
        ttft_slo_ms: int = 0,
        tpot_slo_ms: int = 0,
    ) -> Result:
        """Stream one request. Once ``move_at[i]`` tokens have come, request its move to ``route[i]`` until it begins.

        ``result`` grows while tokens come, for callers that watch it. An objective of 0 means that of
        the class.
        """
        result = result or Result(name=request.name)
        call = self.api.Generate(
            router_pb2.GenerateRequest(
                token_ids=router_pb2.TokenIds(values=request.prompt_token_ids),
                sampling=request.to_proto(),
                request_id=request.name,
                ttft_slo_milliseconds=ttft_slo_ms,
                tpot_slo_milliseconds=tpot_slo_ms,
            )
        )
        moves = list(zip(move_at, route, strict=True))
        async for delta in call:
            result.take(delta)
            if moves and len(result.token_ids) >= moves[0][0] and not result.finish_reason:
                asked = control_pb2.MoveRequest(request_id=delta.request_id, engine_id=moves[0][1])
                answer = await self.control.Move(asked)
                if answer.is_started or answer.reason == "same_engine":
                    moves.pop(0)
        return result


@dataclass(slots=True)
class Result:
    """The tokens and the end of a stream, as the client received them."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: int = 0
    num_hand_offs: int = 0
    tpot_ms: float = 0.0

    def take(self, delta: router_pb2.GenerateResponse) -> None:
        """Append a delta; fails at once on a lost, repeated or reordered token."""
        if delta.token_ids:
            assert delta.first_output_index == len(self.token_ids), f"{self.name}: token order"
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(entry.logprob for entry in delta.logprobs)
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        self.num_hand_offs = delta.usage.num_hand_offs
        self.tpot_ms = delta.usage.tpot_ms


async def stream_through_fault(
    cluster: Cluster, requests: Sequence[Request], due_tokens: int, fault: Callable[[], object]
) -> list[Result]:
    """Stream requests, cause a fault once so many tokens of all have come, and return the answers."""
    results = [Result(name=request.name) for request in requests]
    async with cluster.client() as client:
        pairs = zip(requests, results, strict=True)
        tasks = [asyncio.create_task(client.generate(request, result=result)) for request, result in pairs]
        async with asyncio.timeout(60):
            while sum(len(result.token_ids) for result in results) < due_tokens:  # noqa: ASYNC110  streams have no event
                await asyncio.sleep(0.01)
        done = sum(task.done() for task in tasks)
        await asyncio.to_thread(fault)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert done < len(tasks), "the fault came only after the streams had ended"
    return results


def is_idle(status: dict[str, Any]) -> bool:
    """Whether there is no request, and no block used, granted or pinned."""
    return (
        bool(status["is_ready"])
        and all(router["num_requests"] == 0 for router in status["routers"])
        and all(
            engine["kv_blocks_total"] is not None  # it has reported
            and engine["kv_blocks_free"] == engine["kv_blocks_total"]
            and engine["kv_blocks_granted"] == engine["kv_blocks_pinned"] == engine["kv_blocks_used"] == 0
            and engine["running_decodes"] == engine["waiting_requests"] == 0
            for engine in status["engines"]
        )
    )


@contextlib.contextmanager
def run_cluster(directory: Path, manifest: dict[str, Any], *, models: Path, ports: str) -> Iterator[Cluster]:
    """Run ``sluice up`` in the foreground for the length of the block, then stop it; it must leave nothing behind.

    Args:
        directory: Working directory, made if need be.
        manifest: The ServingCluster.
        models: Folder that replaces the claim ``models``.
        ports: LOW-HIGH.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with (directory / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [*SLUICE, "up", str(path), "--volume", f"models={models}", "--port-range", ports],
            cwd=directory,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        cluster = Cluster(directory, manifest, process)
        try:
            yield cluster
        finally:
            pids = [r["pid"] for kind in ("engine", "router") for r in _records(cluster, kind) if r["pid"]]
            cluster.stop()
    left = [pid for pid in pids if _is_alive(pid)]
    assert not left, f"processes left behind: {left}"


def _records(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    try:
        return list(cluster.processes(kind).values())
    except FileNotFoundError:
        return []


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
