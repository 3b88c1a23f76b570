"""A local cluster that is played: no process, no network, and time that jumps to what is due next.

Programs are records that a play kills or lets misbehave; links to routers say what the play has them know. All that the
cluster does is written down, line by line, with the second in which it did it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import signal
from typing import TYPE_CHECKING, Any

from sluice.v1 import control_pb2, plan_pb2
from sluice_cli.local_cluster import process_factory
from sluice_cli.local_cluster.cluster import LocalCluster
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_cli.local_cluster.manifest_watch import apply_edit
from sluice_cli.processes.ports import PortAllocator
from sluice_operator.api.manifest import parse_manifest
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune.search_messages import SearchResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from sluice_cli.processes.child_processes import LaunchSpec
    from sluice_operator.autotune.search_messages import SearchRequest

ROUTER_START_S, ENGINE_START_S, PLAN_S, DRAIN_S = 1.0, 2.0, 0.3, 0.6
PLAY_INTERVAL_S = 0.1
STOP_MARGIN_S = 0.5
PORT_STEP = 5
# No process has such an id.
FIRST_PID = 5_000_000
ROLES = {plan_pb2.ROLE_PREFILL_HEAVY: "P", plan_pb2.ROLE_DECODE_HEAVY: "D"}


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing else is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        select = self._selector.select

        def jump(timeout: float | None) -> Any:
            found = select(0)
            if not found and timeout is None:
                raise RuntimeError("nothing is due any more")
            if not found and timeout:
                self.now_s += timeout
            return found

        self._selector.select = jump

    def time(self) -> float:
        return self.now_s


class CountingRandom(random.Random):
    """Has ports chosen in an order, so that none is chosen twice."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()

    def randrange(self, start: int, *_: Any) -> int:
        return PORT_STEP * next(self._numbers) % start


class PlayedChild:
    """A program that runs."""

    def __init__(self, play: Play, name: str, pid: int) -> None:
        self._play, self.name, self.pid = play, name, pid
        self.started_s = play.loop.time()
        self._ended: asyncio.Future[int] = play.loop.create_future()

    @property
    def is_running(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def end(self, code: int) -> None:
        if self.is_running:
            self._ended.set_result(code)

    def send_signal(self, number: int) -> None:
        self._play.note(f"{self.name} gets {signal.Signals(number).name}")
        if self.name not in self._play.deaf:
            self.end(0)

    def kill_group(self) -> None:
        if self.is_running:
            self._play.note(f"{self.name} is killed")
        self.end(-signal.SIGKILL)


class PlayedLink:
    """The launcher's link to a router: it knows a plan some time after it was sent."""

    play: Play

    def __init__(
        self, name: str, address: str, *, log: Callable[[str], None], on_status: Callable[[], None], tls
    ) -> None:
        self.name, self.on_status, self.tls = name, on_status, tls
        self.status: control_pb2.GetStatusResponse | None = None
        self.plans: list[tuple[float, plan_pb2.Plan]] = []
        # Since when each engine has drained.
        self.draining_s: dict[str, float] = {}
        self.play.links[name] = self
        self.play.note(f"a link to {name} at {address}, {'TLS' if tls else 'plain'}")

    def set_plan(self, plan: plan_pb2.Plan) -> None:
        now = self.play.loop.time()
        self.plans.append((now, plan))
        draining = [part.engine_id for part in plan.engines if part.is_draining]
        self.draining_s = {engine: self.draining_s.get(engine, now) for engine in draining}
        parts = " ".join(
            f"{part.engine_id}={ROLES[part.role]}{part.chunk_size_tokens}{'-draining' * part.is_draining}"
            for part in plan.engines
        )
        slo = [(item.name, item.ttft_milliseconds, item.tpot_milliseconds) for item in plan.slo_classes]
        self.play.note(f"plan {plan.generation} to {self.name}: {plan.strategy} {parts} {slo}")

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if self.play.links[self.name] is self:
                del self.play.links[self.name]
            self.play.note(f"the link to {self.name} ends")


class Play:
    """A cluster and what happens to it.

    Args:
        home: A folder for its files.
        text: Its manifest.
        ports: It may use these.
        monkeypatch: Puts the links in their place.
        http_port: The option of ``sluice up``.

    Attributes:
        deaf: Programs that ignore SIGTERM.
        mute: Engines that never connect.
        clingy: Engines that never drain.
        loads: Decodes by engine.
        exit_codes: With which a program ends as soon as it has started.
    """

    def __init__(
        self, home: Path, text: str, ports: range, monkeypatch: pytest.MonkeyPatch, http_port: int | None = None
    ) -> None:
        self.loop = JumpingLoop()
        self.story: list[str] = []
        self.home, self.text, self.path = home, text, home / "test.yaml"
        self.children: dict[str, PlayedChild] = {}
        self.links: dict[str, PlayedLink] = {}
        self.deaf: set[str] = set()
        self.mute: set[str] = set()
        self.clingy: set[str] = set()
        self.loads: dict[str, int] = {}
        self.exit_codes: dict[str, int] = {}
        self.counters: list[control_pb2.ClassCounters] = []
        self.samples: list[control_pb2.RequestSample] = []
        self.last_words = ""
        self._pids = itertools.count(FIRST_PID)
        self._files: dict[str, str] = {}
        self._ports_file = home / "ports"
        self._chosen: dict[int, int] = {}
        self._names = [(str(home), "HOME")]
        monkeypatch.setattr(process_factory, "RouterConnection", type("Link", (PlayedLink,), {"play": self}))
        self.directory = ClusterDirectory("test", home)
        self.directory.path.mkdir(parents=True)
        self.ports = ports
        self.http_port = http_port
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.cluster: LocalCluster

    def tell(self, play: Callable[[Play], Any]) -> str:
        """Plays a coroutine function against the cluster; returns the story."""
        try:
            self.loop.run_until_complete(self._tell(play))
        finally:
            for task in (left := asyncio.all_tasks(self.loop)):
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left))
            self.loop.close()
        return "\n".join(self.story) + "\n"

    async def _tell(self, play: Callable[[Play], Any]) -> None:
        self.cluster = LocalCluster(
            parse_manifest(self.text),
            self.directory,
            manifest_path=self.path,
            ports=PortAllocator(self.ports, directory=self._ports_file, rng=CountingRandom()),
            spawn_engine=self.spawn_engine,
            spawn_router=self.spawn_router,
            find_model=lambda manifest: self.home / manifest.spec.model.name,
            find_secret=lambda name: self.home / name,
            http_port=self.http_port,
            report=lambda line: self.note(f"says: {line}"),
            clock=self.loop.time,
            ask=self.answer,
            stop_margin_s=STOP_MARGIN_S,
        )
        running = self.loop.create_task(self.cluster.run(self.stop, self.hurry))
        following = self.loop.create_task(self._follow())
        playing = self.loop.create_task(self._play_engines())
        await play(self)
        self.note("the cluster stops")
        self.stop.set()
        await running
        self.show()
        following.cancel()
        playing.cancel()
        assert not [child for child in self.children.values() if child.is_running]

    # What is written down

    def note(self, line: str) -> None:
        for text, name in self._names:
            line = line.replace(text, name)
        line = re.sub(r"by process \d+ \([^)]*\)", "by this process", line)
        # Which ports there are is chance; that they stay the same is not.
        line = re.sub(r"\b(\d{5})\b", lambda found: self._name_port(int(found[0])), line)
        self.story.append(f"{self.loop.time():7.2f} {line}")

    def _name_port(self, number: int) -> str:
        if number in self.ports:
            return f"port-{self._chosen.setdefault(number, len(self._chosen) + 1)}"
        return f"port+{number - self.ports[-1]}" if 0 < number - self.ports[-1] < 1000 else str(number)

    def show(self) -> None:
        """Writes the status and the files of the cluster down, as far as they are news."""
        view = self.cluster.status().to_dict()
        parts = {f"status {key}": str(value) for key, value in view.items() if key not in ("engines", "routers")}
        parts |= {
            f"status {row.get('engine_id') or row['name']}": str(row) for row in view["engines"] + view["routers"]
        }
        for name in ("engines.json", "processes.json", "autotune.json"):
            file = self.directory.path / name
            parts[name] = json.dumps(json.loads(file.read_text())) if file.exists() else "none"
        for key in sorted({*parts, *self._files}):
            if parts.get(key) != self._files.get(key):
                self.note(f"  {key}: {parts.get(key, 'gone')}")
        self._files = parts

    async def _follow(self) -> None:
        """Writes down when the cluster is ready and which phase it is in, whenever it says that something changed."""
        seen = None
        while True:
            now = self.cluster.phase, self.cluster.status().is_ready
            if now != seen:
                seen = now
                self.note(f"phase {now[0]}, {'ready' if now[1] else 'not ready'}")
            await self.cluster.wait_for_change()

    # Programs

    async def spawn_engine(self, launch: LaunchSpec) -> PlayedChild:
        return self._spawn(launch, "an engine")

    async def spawn_router(self, launch: LaunchSpec) -> PlayedChild:
        return self._spawn(launch, "a router")

    def _spawn(self, launch: LaunchSpec, kind: str) -> PlayedChild:
        name, pid = launch.log.stem, next(self._pids)
        self.note(f"{name} starts as {kind}: {' '.join(launch.command)} {dict(launch.environment)} > {launch.log}")
        child = self.children[name] = PlayedChild(self, name, pid)
        if name in self.exit_codes:
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            launch.log.write_text(self.last_words)
            child.end(self.exit_codes[name])
        return child

    async def _play_engines(self) -> None:
        while True:
            await asyncio.sleep(PLAY_INTERVAL_S)
            for name, link in list(self.links.items()):
                status = self._make_status(name, link)
                if status != link.status:
                    link.status = status
                    link.on_status()

    def _make_status(self, name: str, link: PlayedLink) -> control_pb2.GetStatusResponse | None:
        child, now = self.children.get(name), self.loop.time()
        if child is None or not child.is_running or now - child.started_s < ROUTER_START_S:
            return None
        plan = next((plan for sent_s, plan in reversed(link.plans) if now - sent_s >= PLAN_S), None)
        engines = [
            self._make_engine_status(engine, plan, now - link.draining_s.get(engine, now))
            for engine, record in sorted(self.children.items())
            if engine.startswith("engine") and record.is_running and engine not in self.mute
        ]
        return control_pb2.GetStatusResponse(
            router_id=name,
            cluster_uid=plan.cluster_uid if plan else "",
            generation=plan.generation if plan else 0,
            acknowledged_generation=plan.generation if plan else 0,
            engines=[engine for engine in engines if engine is not None],
            is_ready=plan is not None and any(engines),
            classes=self.counters,
            samples=self.samples,
            num_requests=3,
            num_waiting=1,
        )

    def _make_engine_status(
        self, name: str, plan: plan_pb2.Plan | None, drained_s: float
    ) -> control_pb2.EngineStatus | None:
        child = self.children[name]
        if self.loop.time() - child.started_s < ENGINE_START_S:
            return None
        part = next((item for item in plan.engines if item.engine_id == name), None) if plan else None
        state = control_pb2.ENGINE_STATE_READY
        if part is not None and part.is_draining:
            is_drained = drained_s >= PLAN_S + DRAIN_S and name not in self.clingy
            state = control_pb2.ENGINE_STATE_DRAINED if is_drained else control_pb2.ENGINE_STATE_DRAINING
        return control_pb2.EngineStatus(
            engine_id=name,
            epoch=child.pid,
            state=state,
            role=part.role if part else plan_pb2.ROLE_UNSPECIFIED,
            chunk_size_tokens=part.chunk_size_tokens if part else 0,
            acknowledged_generation=plan.generation if plan else 0,
            running_decodes=self.loads.get(name, 0),
            kv_blocks_total=64,
            kv_blocks_used=5,
            kv_blocks_granted=2,
            kv_blocks_pinned=1,
            block_size_tokens=16,
            max_num_seqs=256,
            num_fitted_iterations=1000,
            num_moved_in=4,
            num_moved_out=6,
            transport="tcp",
            latency=control_pb2.LatencyCoefficients(base_s=0.02, per_token_s=9e-5),
        )

    # What a play does

    async def answer(self, request: SearchRequest) -> SearchResult:
        self.note(f"a search: {request.workload.rows[:1]} in force {request.in_force}")
        return SearchResult(
            sliders=Sliders(num_prefill_heavy=2, prefill_heavy_tokens=1024, decode_heavy_tokens=128),
            goodput_rps=3.0,
            attainment=0.97,
            in_force_goodput_rps=2.0,
            in_force_attainment=0.8,
            least_gain=0.4,
        )

    def edit(self, old: str, new: str) -> None:
        assert old in self.text
        self.note(f"edit: {old.strip()} -> {new.strip()}")
        text = self.text.replace(old, new)
        if apply_edit(text, self.path, self.cluster, lambda manifest: [], lambda line: self.note(f"says: {line}")):
            self.text = text

    def finish(self, count: int, share: float = 1.0) -> None:
        """Has routers count so many more requests."""
        finished = sum(item.num_finished for item in self.counters) + count
        met = sum(item.num_met_both for item in self.counters) + round(count * share)
        self.counters = [control_pb2.ClassCounters(num_finished=finished, num_met_both=met)]
        self.samples = [control_pb2.RequestSample(gap_s=0.5, prompt_tokens=1000, output_tokens=50)] * 100

    async def until(self, is_reached: Callable[[], bool], limit_s: float = 120.0) -> None:
        end_s = self.loop.time() + limit_s
        while not is_reached():
            assert self.loop.time() < end_s, "\n".join(self.story[-20:])
            await asyncio.sleep(PLAY_INTERVAL_S / 2)

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def is_settled(self, num_engines: int, num_routers: int = 1) -> bool:
        """Whether the cluster is ready with so many programs."""
        status = self.cluster.status()
        return status.is_ready and (len(status.engines), len(status.routers)) == (num_engines, num_routers)
