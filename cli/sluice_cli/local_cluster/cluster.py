"""A cluster of local processes that follows its manifest.

One class owns the state; it changes only in synchronous methods. Around it run: one task per program (restarts it),
one per router link (pushes the plan, follows the status), one that watches start deadlines, and one that converges:
it decides the next step (``steps.next_step``), carries it out to its end, and decides again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from sluice.v1 import control_pb2
from sluice_cli.local_cluster import rollout_steps
from sluice_cli.local_cluster.endpoints import HOST, Sites
from sluice_cli.local_cluster.local_autotune import LocalTuning
from sluice_cli.local_cluster.local_manifest import describe_local_security
from sluice_cli.local_cluster.local_plan import Planner
from sluice_cli.local_cluster.process_slots import EngineSlot, RouterSlot, keep_link, list_processes, make_control_tls
from sluice_cli.output.cluster_view import ClusterView, make_view, pick_engine
from sluice_cli.processes.child_processes import Launch
from sluice_cli.processes.ports import PortError
from sluice_cli.processes.supervisor import Program
from sluice_core.records import EngineId
from sluice_operator.api import names
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.autotune.tuner import TunerInputs
from sluice_operator.resources import commands
from sluice_operator.routers.connection import RouterConnection
from sluice_operator.routers.engine_reports import has_acknowledged, merge_reports

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory, ProcessRecord
    from sluice_cli.processes.child_processes import Spawner
    from sluice_cli.processes.ports import PortBook
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.autotune.search_process import RunSearch

# Between SIGTERM and SIGKILL, beyond the drain itself: interpreters take seconds to shut down under load.
STOP_MARGIN_S = 15.0
SERVING = (control_pb2.ENGINE_STATE_READY, control_pb2.ENGINE_STATE_DRAINING)


class LocalCluster:
    """The processes of one cluster.

    Args:
        manifest: What is wanted.
        directory: Its files.
        ports: Ports to use.
        spawn_engine: Starts engines.
        spawn_router: Starts routers.
        find_model: Directory of a manifest's model.
        find_secret: Directory of a Secret.
        http_port: Port of the first router instead of the manifest's.
        report: Takes a line for people.
        clock: Monotonic seconds.
        ask: Answers searches for sliders; None: in processes of their own.
    """

    def __init__(
        self,
        manifest: ServingCluster,
        directory: ClusterDirectory,
        *,
        manifest_path: Path,
        ports: PortBook,
        spawn_engine: Spawner,
        spawn_router: Spawner,
        find_model: Callable[[ServingCluster], Path],
        find_secret: Callable[[str], Path],
        http_port: int | None = None,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        ask: RunSearch | None = None,
    ) -> None:
        self.manifest = manifest
        # As if its user had asked for the sliders that are in force.
        self._effective = manifest
        self.phase = "starting"
        self._directory = directory
        self._manifest_path = manifest_path
        self._sites = Sites(ports, directory, http_port)
        self._planner = Planner(directory)
        self._spawn_engine = spawn_engine
        self._spawn_router = spawn_router
        self._find_model = find_model
        self._find_secret = find_secret
        self._report = report
        self._clock = clock
        self._engines: dict[EngineId, EngineSlot] = {}
        self._routers: dict[str, RouterSlot] = {}
        self._plan_s = 0.0
        self._announced_generation = 0
        self._world = self._wanted().world
        self._changed = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._tuning = LocalTuning(directory, report=report, wake=self._retune, clock=clock, ask=ask)

    # What the outside asks for.

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Runs the cluster until ``stop``, then drains and stops all of it.

        Args:
            stop: Set when the cluster shall end.
            hurry: Set when it shall end without draining.

        Raises:
            PortError: A port that the manifest names is in use.
        """
        async with self._group:
            converge = self._group.create_task(self._converge(), name="converge")
            watch = self._group.create_task(self._watch_starts(), name="watch starts")
            await stop.wait()
            self.phase = "stopping"
            for task in (converge, watch):
                task.cancel()
            self._tuning.stop()
            await self._stop_all(hurry)

    def apply(self, manifest: ServingCluster) -> None:
        """Makes another manifest the wanted one; live fields are in force at once, the rest follows step by step."""
        self.manifest = manifest
        self._publish()
        self._pulse()

    def view(self) -> ClusterView:
        """The cluster at this moment."""
        return make_view(
            name=self._directory.name,
            phase=self.phase,
            manifest=str(self._manifest_path),
            model=self.manifest.served_name,
            processes=self._list_processes(),
            statuses={name: slot.link.status for name, slot in self._routers.items()},
            autotune=self._tuning.view,
        )

    async def wait_for_change(self) -> None:
        """Waits until something has changed that ``view`` shows."""
        await self._changed.wait()

    # Converging: observe, decide, act.

    async def _converge(self) -> None:
        while True:
            changed = self._changed
            wanted = self._wanted()
            step = rollout_steps.next_step(self._running(), wanted)
            if step is None:
                await changed.wait()
            else:
                await self._do(step, wanted)

    def _wanted(self) -> rollout_steps.Wanted:
        spec = self.manifest.spec
        nowhere = commands.EngineSite(
            engine_id=EngineId(""), host="", port=0, metrics_port=0, kv_host="", kv_port=0, model_directory=""
        )
        return rollout_steps.Wanted(
            # What speaks in the open and what does not cannot speak with one another.
            world=spec.model.model_dump_json() + spec.network.tls.model_dump_json(),
            engine=_digest(commands.render_engine_command(spec, nowhere), commands.render_engine_environment(spec)),
            router=_digest(
                self._sites.choose_http_port(spec.router.service.port), asdict(self._security(names.ROUTER))
            ),
            num_engines=spec.replicas,
            num_routers=spec.router.replicas,
            num_prefill_heavy=resolve_sliders(self._effective.spec).num_prefill_heavy,
        )

    def _running(self) -> rollout_steps.Running:
        return rollout_steps.Running(
            world=self._world,
            engines={engine_id: slot.identity for engine_id, slot in self._engines.items()},
            routers={name: slot.identity for name, slot in self._routers.items()},
            roles=self._planner.roles,
            loads=self._loads(),
        )

    async def _do(self, step: rollout_steps.Step, wanted: rollout_steps.Wanted) -> None:
        match step:
            case rollout_steps.AddRouters(count):
                for _ in range(count):
                    self._add_router(wanted)
                self._publish()
            case rollout_steps.AddEngines(count):
                for _ in range(count):
                    self._add_engine(wanted)
                self._publish()
            case rollout_steps.RemoveEngines(engine_ids):
                await self._remove_engines(engine_ids)
            case rollout_steps.RemoveRouter(name):
                self._report(f"{name} stops once its streams have ended")
                await self._remove_router(name)
            case rollout_steps.RollEngine(engine_id):
                await self._roll_engine(engine_id, wanted)
            case rollout_steps.RollRouter(name):
                await self._roll_router(name, wanted)
            case rollout_steps.Recreate():
                self._report("the model changes: every router and engine stops, then all start anew")
                await self._stop_all(asyncio.Event())
                self._world = wanted.world

    # Steps.

    def _add_engine(self, wanted: rollout_steps.Wanted) -> None:
        index = next(i for i in range(len(self._engines) + 1) if f"engine-{i}" not in self._engines)
        engine_id = EngineId(f"engine-{index}")
        site = self._sites.make_engine(engine_id, self._find_model(self.manifest))
        slot = EngineSlot(site=site, program=self._make_program(engine_id, self._spawn_engine), identity=wanted.engine)
        slot.program.launch = self._engine_launch(site)
        self._engines[engine_id] = slot
        self._group.create_task(slot.program.run(), name=engine_id)

    def _engine_launch(self, site: commands.EngineSite) -> Launch:
        return Launch(
            command=tuple(commands.render_engine_command(self.manifest.spec, site, self._security(names.ENGINE))),
            environment=commands.render_engine_environment(self.manifest.spec),
            log=self._directory.log_path(site.engine_id),
        )

    async def _remove_engines(self, engine_ids: tuple[EngineId, ...]) -> None:
        self._report(f"{', '.join(engine_ids)}: handing requests over, then stopping")
        await self._drain(engine_ids, is_leaving=True)
        await asyncio.gather(*(self._stop_program(self._engines[engine_id].program) for engine_id in engine_ids))
        for engine_id in engine_ids:
            self._forget_engine(engine_id)
        self._publish()

    async def _roll_engine(self, engine_id: EngineId, wanted: rollout_steps.Wanted) -> None:
        slot = self._engines[engine_id]
        self._report(f"{engine_id}: handing requests over, then restarting with its new settings")
        await self._drain((engine_id,), is_leaving=False)
        await self._stop_program(slot.program)
        slot.program = self._make_program(engine_id, self._spawn_engine)
        slot.program.launch = self._engine_launch(slot.site)
        slot.identity = wanted.engine
        self._planner.resume(engine_id)
        self._group.create_task(slot.program.run(), name=engine_id)
        self._publish()
        # One engine at a time: the next is not touched before this one serves. An edit ends the wait.
        await self._until(lambda: self._is_serving(engine_id) or self._wanted() != wanted)
        if self._is_serving(engine_id):
            self._report(f"{engine_id} serves again")

    async def _drain(self, engine_ids: tuple[EngineId, ...], *, is_leaving: bool) -> None:
        self._planner.drain(engine_ids, is_leaving=is_leaving)
        self._publish()
        timeout_s = float(self.manifest.spec.engine.drain_timeout_seconds)
        if not await self._until(lambda: all(map(self._is_drained, engine_ids)), timeout_s):
            names = ", ".join(engine_id for engine_id in engine_ids if not self._is_drained(engine_id))
            self._report(f"{names} did not drain within {timeout_s:g} s; its requests are recovered elsewhere")

    def _add_router(self, wanted: rollout_steps.Wanted) -> None:
        index = next(i for i in range(len(self._routers) + 1) if f"router-{i}" not in self._routers)
        name = f"router-{index}"
        model, port = self._find_model(self.manifest), self.manifest.spec.router.service.port
        site = self._sites.make_first_router(port, model) if index == 0 else self._sites.make_further_router(model)
        self._write_engines()
        program = self._make_program(name, self._spawn_router)
        security = self._security(names.ROUTER)
        command = commands.render_router_command(self.manifest.spec, site, security)
        program.launch = Launch(command=tuple(command), log=self._directory.log_path(name))
        tls = make_control_tls(security)
        address = f"{HOST}:{site.control_port}"
        link = RouterConnection(name, address, log=self._report, on_status=self._on_status, tls=tls)
        self._routers[name] = RouterSlot(
            site=site,
            program=program,
            identity=wanted.router,
            link=link,
            link_task=self._group.create_task(keep_link(link, tls), name=f"link to {name}"),
            security=security,
        )
        if self._planner.plan:
            link.set_plan(self._planner.plan)
        self._group.create_task(program.run(), name=name)

    async def _remove_router(self, name: str) -> None:
        # It stays in the table until it has ended: a stop of the whole cluster meanwhile must find it.
        await self._stop_program(self._routers[name].program)
        self._forget_router(name)
        self._publish()

    def _forget_router(self, name: str) -> None:
        slot = self._routers.pop(name)
        slot.link_task.cancel()
        self._sites.release(slot.site)
        self._on_process_change()

    def _forget_engine(self, engine_id: EngineId) -> None:
        self._sites.release(self._engines.pop(engine_id).site)
        self._planner.forget(engine_id)
        self._on_process_change()

    async def _roll_router(self, name: str, wanted: rollout_steps.Wanted) -> None:
        slot, port = self._routers[name], self.manifest.spec.router.service.port
        # Only the first router's port is in the manifest.
        is_moving = name == "router-0" and self._sites.choose_http_port(port) != slot.site.http_port
        if is_moving:
            try:
                self._sites.check_http_port(port)
            except PortError as error:
                self._report(f"{name} stays at its port, and as it is: {error}")
                slot.identity = wanted.router
                return
        if not is_moving and slot.security == self._security(names.ROUTER):
            slot.identity = wanted.router
            return
        where = f" on port {port}" if is_moving else ""
        self._report(f"{name} stops once its streams have ended, then starts anew{where}")
        await self._remove_router(name)

    def _security(self, component: str) -> commands.Security:
        return describe_local_security(self.manifest, component, self._find_secret)

    def _make_program(self, name: str, spawner: Spawner) -> Program:
        empty = Launch(command=(), log=self._directory.log_path(name))
        return Program(
            name, empty, spawner=spawner, report=self._report, on_change=self._on_process_change, clock=self._clock
        )

    async def _stop_program(self, program: Program, hurry: asyncio.Event | None = None) -> None:
        drain_s = self.manifest.spec.engine.drain_timeout_seconds
        stopping = asyncio.create_task(program.stop(drain_s + STOP_MARGIN_S))
        hurrying = asyncio.create_task((hurry or asyncio.Event()).wait())
        await asyncio.wait({stopping, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            program.kill()
        hurrying.cancel()
        await stopping

    async def _stop_all(self, hurry: asyncio.Event) -> None:
        """Stops routers, which finish their streams, and then the engines that served them."""
        await asyncio.gather(*(self._stop_program(slot.program, hurry) for slot in self._routers.values()))
        for name in list(self._routers):
            self._forget_router(name)
        await asyncio.gather(*(self._stop_program(slot.program, hurry) for slot in self._engines.values()))
        for engine_id in list(self._engines):
            self._forget_engine(engine_id)
        self._pulse()

    # The plan.

    def _publish(self) -> None:
        """Makes the plan of what is wanted and runs; stores and pushes it if it differs from the last one."""
        self._write_engines()
        if self.phase != "stopping":
            self._effective = self._tuning.look(self._circumstances())
        plan = self._planner.make_plan(self._effective, self._engines, self._loads())
        if plan is None:
            return
        self._plan_s = self._clock()
        for slot in self._routers.values():
            slot.link.set_plan(plan)
        self._pulse()

    def _retune(self) -> None:
        """Decides about the sliders anew; the plan and whoever shows the cluster follow."""
        if self.phase != "stopping":
            self._publish()
            self._pulse()

    def _write_engines(self) -> None:
        self._directory.write_engines([f"{slot.site.host}:{slot.site.port}" for slot in self._engines.values()])

    # What is the case.

    def _statuses(self) -> list[control_pb2.GetStatusResponse]:
        return [slot.link.status for slot in self._routers.values() if slot.link.status]

    def _circumstances(self) -> TunerInputs:
        return TunerInputs(
            cluster=self.manifest,
            statuses=self._statuses(),
            counts=self._tuning.counts,
            is_settled=self._is_settled(),
        )

    def _is_settled(self) -> bool:
        """Whether every engine serves with the newest plan, and none comes or goes."""
        plan, statuses = self._planner.plan, self._statuses()
        return (
            plan is not None
            and len(self._engines) == self.manifest.spec.replicas
            and all(map(self._is_serving, self._engines))
            and len(statuses) == len(self._routers)
            and has_acknowledged(plan, merge_reports(statuses), statuses)
        )

    def _loads(self) -> dict[EngineId, int]:
        loads = {}
        for engine_id in self._engines:
            status = self._engine_status(engine_id)
            if status:
                loads[engine_id] = status.running_decodes + status.waiting_requests
        return loads

    def _engine_status(self, engine_id: EngineId) -> control_pb2.EngineStatus | None:
        return pick_engine(self._statuses(), engine_id)

    def _is_serving(self, engine_id: EngineId) -> bool:
        slot, status = self._engines[engine_id], self._engine_status(engine_id)
        has_process = slot.program.pid is not None
        return has_process and status is not None and status.state in SERVING and status.epoch != slot.stale_epoch

    def _is_drained(self, engine_id: EngineId) -> bool:
        plan = self._planner.plan
        for slot in self._routers.values():
            status = slot.link.status
            if status is None or plan is None:
                continue
            if status.generation < plan.generation:
                return False
            if any(engine.engine_id == engine_id and engine.state in SERVING for engine in status.engines):
                return False
        return True

    def _list_processes(self) -> list[ProcessRecord]:
        return list_processes(self._routers, self._engines)

    # Events.

    def _on_process_change(self) -> None:
        for engine_id, slot in self._engines.items():
            status = self._engine_status(engine_id)
            if slot.program.pid is None and status:
                slot.stale_epoch = status.epoch
        self._directory.write_processes(self._list_processes())
        self._pulse()

    def _on_status(self) -> None:
        statuses = [slot.link.status for slot in self._routers.values()]
        plan = self._planner.plan
        is_acknowledged = plan is not None and all(
            status and status.acknowledged_generation >= plan.generation for status in statuses
        )
        if plan and is_acknowledged and plan.generation > self._announced_generation and self.view().is_ready:
            self._announced_generation = plan.generation
            self._report(f"plan {plan.generation} is in force on all engines ({self._clock() - self._plan_s:.2f} s)")
        if self.phase == "starting" and self.view().is_ready:
            self.phase = "ready"
        self._tuning.take(self._statuses())
        if self.phase != "stopping" and self._tuning.is_due(self._circumstances):
            self._publish()
        self._pulse()

    async def _watch_starts(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            limit_s = self.manifest.spec.engine.startup_timeout_seconds
            for engine_id, slot in self._engines.items():
                is_late = slot.program.pid is not None and self._clock() - slot.program.started_s > limit_s
                if is_late and not self._has_served(slot, engine_id):
                    self._report(
                        f"{engine_id} did not serve within {limit_s} s (spec.engine.startupTimeoutSeconds);"
                        f" it is killed and started again; see {slot.program.launch.log}"
                    )
                    slot.program.kill()

    def _has_served(self, slot: EngineSlot, engine_id: EngineId) -> bool:
        status = self._engine_status(engine_id)
        return status is not None and status.epoch not in (0, slot.stale_epoch)

    def _pulse(self) -> None:
        """Wakes whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, is_reached: Callable[[], bool], timeout_s: float | None = None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not is_reached():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


def _digest(*content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
