"""A local cluster of stand-ins for engines and routers: its manifest, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from worker_ports import CLUSTER_PORTS, NAMED_PORTS

from sluice_cli.local_cluster.cluster import LocalCluster
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_cli.local_cluster.manifest_watch import apply_edit
from sluice_cli.processes.child_processes import spawn
from sluice_cli.processes.ports import PortAllocator
from sluice_operator.api.manifest import parse_manifest
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune.search_messages import SearchResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sluice_cli.processes.child_processes import ChildProcess, LaunchSpec
    from sluice_operator.autotune.search_messages import SearchRequest


PROGRAMS = Path(__file__).parent / "programs"


PORT, OTHER_PORT, THIRD_PORT = NAMED_PORTS[0], NAMED_PORTS[10], NAMED_PORTS[20]


ROUTER = f"  router: {{replicas: 1, service: {{port: {PORT}}}}}\n"


MANIFEST = (
    """
apiVersion: sluice.dev/v1alpha1
kind: ServingCluster
metadata: {name: test}
spec:
  replicas: 3
  prefillHeavy: 1
  chunkSizes: {prefillHeavy: 512, decodeHeavy: 64}
  strategy: TaiChi
  slo: {ttftMilliseconds: 500, tpotMilliseconds: 50}
  model: {name: tiny, source: {persistentVolumeClaim: {claimName: models}}}
  engine: {drainTimeoutSeconds: 5}
"""
    + ROUTER
)


async def spawn_stand_in(launch: LaunchSpec) -> ChildProcess:
    """Runs the container's command with the program replaced by its stand-in."""
    stand_ins = {"sluice_engine": "fake_engine.py", "sluice_router": "fake_router.py"}
    python, _, module, *arguments = launch.command
    return await spawn(replace(launch, command=(python, str(PROGRAMS / stand_ins[module]), *arguments)))


class Running:
    """A running cluster, and what it said."""

    def __init__(self, home: Path, text: str = MANIFEST) -> None:
        self.lines: list[str] = []
        self.text = text
        self.offset_s = 0.0
        self.path = home / "test.yaml"
        self.directory = ClusterDirectory("test", home)
        self.directory.path.mkdir(parents=True)
        self.ports = PortAllocator(CLUSTER_PORTS, directory=home / "ports")
        self.cluster = LocalCluster(
            parse_manifest(self.text),
            self.directory,
            manifest_path=self.path,
            ports=self.ports,
            spawn_engine=spawn_stand_in,
            spawn_router=spawn_stand_in,
            find_model=lambda manifest: home,
            find_secret=lambda name: home / name,
            report=self.report,
            clock=lambda: time.monotonic() + self.offset_s,
            ask=self.answer,
            stop_margin_s=0.5,
        )
        # What searches for sliders are asked, and what they answer.
        self.asked: list[SearchRequest] = []
        self.sliders = Sliders(num_prefill_heavy=2, prefill_heavy_tokens=1024, decode_heavy_tokens=128)
        self.num_finished = self.num_met = 0
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()

    def report(self, line: str) -> None:
        self.lines.append(line)
        self.cluster._notify()

    async def answer(self, request: SearchRequest) -> SearchResult:
        self.asked.append(request)
        return SearchResult(
            sliders=self.sliders,
            goodput_rps=3.0,
            attainment=0.97,
            in_force_goodput_rps=2.0,
            in_force_attainment=0.8,
            least_gain=0.4,
        )

    def finish(self, count: int, share: float = 1.0, prompt_tokens: int = 1000) -> None:
        """Has the router say that so many more requests finished, of so many tokens."""
        self.num_finished += count
        self.num_met += round(count * share)
        file = self.directory.engines_file.with_name("requests.json")
        requests = {"num_finished": self.num_finished, "num_met": self.num_met, "prompt_tokens": prompt_tokens}
        file.with_suffix(".new").write_text(json.dumps(requests))
        file.with_suffix(".new").replace(file)

    def misreport(self, **views: dict[str, int] | None) -> None:
        """Has the router say of engines what is not so."""
        file = self.directory.engines_file.with_name("views.json")
        file.with_suffix(".new").write_text(json.dumps({name.replace("_", "-"): view for name, view in views.items()}))
        file.with_suffix(".new").replace(file)

    async def serve_until(self, is_reached: Callable[[], bool], share: float = 1.0, prompt_tokens: int = 1000) -> None:
        """Has requests finish until something is the case."""
        async with asyncio.timeout(30):
            while not is_reached():
                self.finish(10, share, prompt_tokens)
                await asyncio.sleep(0.1)

    def edit(self, old: str, new: str) -> bool:
        assert old in self.text
        text = self.text.replace(old, new)
        is_taken = apply_edit(text, self.path, self.cluster, lambda manifest: [], self.report)
        self.text = text if is_taken else self.text
        return is_taken

    async def until(self, is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_reached():
                await self.cluster.wait_for_change()

    def engines(self) -> dict[str, tuple[str, int]]:
        return {e.engine_id: (e.role, e.chunk_size_tokens or 0) for e in self.cluster.status().engines}

    def pids(self) -> dict[str, int | None]:
        view = self.cluster.status()
        return {e.engine_id: e.pid for e in view.engines} | {r.name: r.pid for r in view.routers}

    def is_ready(self) -> bool:
        return self.cluster.status().is_ready


@contextlib.asynccontextmanager
async def run_cluster(home: Path, text: str = MANIFEST) -> AsyncIterator[Running]:
    """Runs a cluster until its end, and makes sure that it leaves no process."""
    running = Running(home, text)
    task = asyncio.create_task(running.cluster.run(running.stop, running.hurry))
    await running.until(running.is_ready)
    await running.until(lambda: len(running.engines()) == running.cluster.manifest.spec.replicas)
    try:
        yield running
    finally:
        pids = [pid for pid in running.pids().values() if pid]
        running.stop.set()
        try:
            async with asyncio.timeout(30):
                await task
        except TimeoutError:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            raise
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        # A stand-in that raises would be started again, as if nothing had happened.
        for log in running.directory.log_path("x").parent.iterdir():
            assert not TRACEBACK.search(log.read_text()), log.read_text()


# gRPC prints one for each call that is cancelled.
TRACEBACK = re.compile(r"^Traceback .*\n( .*\n)+(?!asyncio.exceptions.CancelledError)", re.MULTILINE)


P, D = ("P-heavy", 512), ("D-heavy", 64)
