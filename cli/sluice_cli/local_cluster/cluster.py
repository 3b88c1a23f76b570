"""A cluster of local processes that follows its manifest: observe, decide one step, carry it out, and again.

``LocalCluster`` owns the state, which changes only in synchronous methods. Tasks around it supervise the processes,
follow the routers, watch what is due and reconcile.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING

from sluice_cli.local_cluster import managed_processes
from sluice_cli.local_cluster.cluster_plan import ClusterPlan
from sluice_cli.local_cluster.cluster_status import ClusterStatus, make_cluster_status, pick_engine_status
from sluice_cli.local_cluster.endpoints import EndpointAllocator
from sluice_cli.local_cluster.local_autotune import LocalAutotuner
from sluice_cli.local_cluster.managed_processes import ManagedEngine, ManagedRouter, list_processes
from sluice_cli.local_cluster.process_factory import ProcessFactory
from sluice_cli.local_cluster.reconcile import reconcile_steps
from sluice_cli.local_cluster.reconcile.desired_processes import make_desired_processes
from sluice_cli.local_cluster.reconcile.local_roll import LocalRoll
from sluice_cli.local_cluster.reconcile.router_names import is_first_replica, replica_of
from sluice_cli.processes.ports import PortError
from sluice_core.records import EngineId
from sluice_operator.api import names
from sluice_operator.autotune.tuner import TunerInputs
from sluice_operator.planning.roll_observation import RollingEngine
from sluice_operator.routers.engine_reports import count_loads, has_acknowledged, merge_reports

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sluice.v1 import control_pb2
    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
    from sluice_cli.processes.child_processes import Spawner
    from sluice_cli.processes.ports import PortAllocator
    from sluice_cli.processes.supervisor import SupervisedProcess
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.autotune.search_process import RunSearch
    from sluice_operator.resources import command_lines

# Interpreters take seconds to shut down under load.
STOP_MARGIN_S = 15.0
CHECK_INTERVAL_S = 1.0


class LocalCluster:
    """The processes of one cluster.

    Args:
        manifest: What shall run.
        manifest_path: Its file, for the status.
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
        stop_margin_s: Seconds between SIGTERM and SIGKILL, beyond the drain itself.
    """

    def __init__(
        self,
        manifest: ServingCluster,
        directory: ClusterDirectory,
        *,
        manifest_path: Path,
        ports: PortAllocator,
        spawn_engine: Spawner,
        spawn_router: Spawner,
        find_model: Callable[[ServingCluster], Path],
        find_secret: Callable[[str], Path],
        http_port: int | None = None,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        ask: RunSearch | None = None,
        stop_margin_s: float = STOP_MARGIN_S,
    ) -> None:
        self.manifest = manifest
        # The manifest with the sliders in force, which the tuner may have changed.
        self._effective_manifest = manifest
        self.phase = "starting"
        self._directory = directory
        self._manifest_path = manifest_path
        self._endpoints = EndpointAllocator(ports, directory, http_port)
        self._plan = ClusterPlan(directory)
        self._factory = ProcessFactory(
            directory=directory,
            endpoints=self._endpoints,
            spawn_engine=spawn_engine,
            spawn_router=spawn_router,
            find_model=find_model,
            find_secret=find_secret,
            report=report,
            on_process_change=self._on_process_change,
            on_status=self._on_status,
            clock=clock,
        )
        self._report, self._clock = report, clock
        self._stop_margin_s = stop_margin_s
        self._engines: dict[EngineId, ManagedEngine] = {}
        self._routers: dict[str, ManagedRouter] = {}
        self._plan_s, self._announced_generation = 0.0, 0
        # The engines that the newest plan's roles were counted over.
        self._role_holders: frozenset[EngineId] = frozenset()
        asked_for = self._asked_for()
        self._compatibility_key = asked_for.compatibility_key
        self._roll = LocalRoll(manifest, asked_for.engine_hash, report=report, clock=clock)
        self._changed = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._autotuner = LocalAutotuner(directory, report=report, wake=self._retune, clock=clock, ask=ask)

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Runs the cluster until ``stop``, then drains and stops all of it.

        Args:
            stop: Set when the cluster shall end.
            hurry: Set when it shall end without draining.

        Raises:
            PortError: A port that the manifest names is in use.
        """
        async with self._group:
            reconcile = self._group.create_task(self._reconcile(), name="reconcile")
            watch = self._group.create_task(self._watch_time(), name="watch time")
            await stop.wait()
            self.phase = "stopping"
            for task in (reconcile, watch):
                task.cancel()
            self._autotuner.stop()
            await self._stop_all(hurry)

    def apply(self, manifest: ServingCluster) -> None:
        """Follows another manifest: live fields are in force at once, the rest step by step."""
        self.manifest = manifest
        self._publish()
        self._follow_roll()
        self._notify()

    def status(self) -> ClusterStatus:
        """Makes the status of this moment."""
        return make_cluster_status(
            name=self._directory.name,
            phase=self.phase,
            manifest=str(self._manifest_path),
            model=self.manifest.served_name,
            processes=list_processes(self._routers, self._engines),
            statuses={name: router.link.status for name, router in self._routers.items()},
            autotune=self._autotuner.status,
            rollout=self.rollout,
        )

    @property
    def rollout(self) -> str:
        """What the gate says of a roll; empty: there is none."""
        return self._roll.summary

    async def wait_for_change(self) -> None:
        """Waits until something has changed that ``status`` shows."""
        await self._changed.wait()

    # Reconcile: observe, decide, act.

    async def _reconcile(self) -> None:
        while True:
            changed = self._changed  # taken before the observation, so that no change between them is missed
            self._follow_roll()
            desired = self._desired_state()
            step = reconcile_steps.next_step(self._observe(), desired)
            if step is None:
                await changed.wait()
            else:
                await self._carry_out(step, desired)

    def _desired_state(self) -> reconcile_steps.DesiredProcesses:
        """What shall run: what the manifest asks for, as far as the gate of a roll lets it."""
        return self._roll.restrain(self._asked_for())

    def _asked_for(self) -> reconcile_steps.DesiredProcesses:
        spec = self.manifest.spec
        return make_desired_processes(
            spec,
            self._effective_manifest.spec,
            http_port=self._endpoints.choose_http_port(spec.router.service.port),
            router_security=self._factory.describe_security(self.manifest, names.ROUTER),
        )

    def _observe(self) -> reconcile_steps.ObservedProcesses:
        return reconcile_steps.ObservedProcesses(
            compatibility_key=self._compatibility_key,
            engines={engine_id: engine.spec_hash for engine_id, engine in self._engines.items()},
            routers={name: router.spec_hash for name, router in self._routers.items()},
            roles=self._plan.roles,
            loads=self._count_loads(),
            serving=frozenset(filter(self._is_serving, self._engines)),
        )

    async def _carry_out(self, step: reconcile_steps.RolloutStep, desired: reconcile_steps.DesiredProcesses) -> None:
        match step:
            case reconcile_steps.AddRouters(router_names):
                for name in router_names:
                    self._add_router(name, desired)
                self._publish()
            case reconcile_steps.AddEngines(count):
                for _ in range(count):
                    self._add_engine(desired)
                self._publish()
            case reconcile_steps.RemoveEngines(engine_ids):
                await self._remove_engines(engine_ids)
            case reconcile_steps.RemoveRouter(name):
                self._report(f"{name} stops once its streams have ended")
                await self._remove_router(name)
            case reconcile_steps.RestartEngine(engine_id):
                await self._restart_engine(engine_id, desired)
            case reconcile_steps.RestartRouter(name):
                await self._restart_router(name, desired)
            case reconcile_steps.Recreate():
                self._report("the model or TLS changes: every router and engine stops, then all start again")
                await self._stop_all(asyncio.Event())
                self._compatibility_key = desired.compatibility_key
                self._roll.begin_anew(self.manifest, self._asked_for().engine_hash)

    # Steps.

    def _add_engine(self, desired: reconcile_steps.DesiredProcesses) -> None:
        index = next(i for i in itertools.count() if f"engine-{i}" not in self._engines)
        engine_id = EngineId(f"engine-{index}")
        manifest = self._roll.choose_manifest(self.manifest)
        self._engines[engine_id] = self._factory.start_engine(manifest, engine_id, desired.engine_hash, self._group)

    async def _remove_engines(self, engine_ids: tuple[EngineId, ...]) -> None:
        self._report(f"{', '.join(engine_ids)}: handing requests over, then stopping")
        await self._drain(engine_ids, is_leaving=True)
        await asyncio.gather(*(self._stop_engine(self._engines[engine_id]) for engine_id in engine_ids))
        for engine_id in engine_ids:
            self._forget_engine(engine_id)
        self._publish()

    async def _restart_engine(self, engine_id: EngineId, desired: reconcile_steps.DesiredProcesses) -> None:
        engine = self._engines[engine_id]
        self._report(f"{engine_id}: handing requests over, then restarting with its new settings")
        await self._drain((engine_id,), is_leaving=False)
        await self._stop_engine(engine)
        manifest = self._roll.choose_manifest(self.manifest)
        self._factory.replace_engine(manifest, engine, desired.engine_hash, self._group)
        self._plan.undrain(engine_id)
        self._publish()
        # One engine at a time: the next is not touched before this one serves. An edit ends the wait.
        await self._wait_until(lambda: self._is_serving(engine_id) or self._desired_state() != desired)
        if self._is_serving(engine_id):
            self._report(f"{engine_id} serves again")

    async def _drain(self, engine_ids: tuple[EngineId, ...], *, is_leaving: bool) -> None:
        self._plan.drain(engine_ids, is_leaving=is_leaving)
        self._publish()
        timeout_s = float(self.manifest.spec.engine.drain_timeout_seconds)
        if not await self._wait_until(lambda: all(map(self._is_drained, engine_ids)), timeout_s):
            late = ", ".join(engine_id for engine_id in engine_ids if not self._is_drained(engine_id))
            self._report(f"{late} did not drain within {timeout_s:g} s; its requests are recovered elsewhere")

    def _add_router(self, name: str, desired: reconcile_steps.DesiredProcesses) -> None:
        self._write_engines()
        router = self._factory.start_router(
            self.manifest, name, desired.router_hash, self._group, shares_with=self._find_shared_site(name)
        )
        self._routers[name] = router
        if self._plan.plan:
            router.link.set_plan(self._plan.plan)

    def _find_shared_site(self, name: str) -> command_lines.RouterSite | None:
        """Finds the ports that a router shares with the other workers of its replica, where it is to be."""
        port = self._endpoints.choose_http_port(self.manifest.spec.router.service.port)
        for other, router in self._routers.items():
            is_where_it_shall_be = not is_first_replica(name) or router.site.http_port == port
            if other != name and replica_of(other) == replica_of(name) and is_where_it_shall_be:
                return router.site
        return None

    async def _remove_router(self, name: str) -> None:
        # It stays in the table until it has ended: a stop of the whole cluster meanwhile must find it.
        await self._stop_router(self._routers[name])
        self._forget_router(name)
        self._publish()

    def _forget_router(self, name: str) -> None:
        router = self._routers.pop(name)
        router.link_task.cancel()
        self._endpoints.release(router.site, [other.site for other in self._routers.values()])
        self._on_process_change()

    def _forget_engine(self, engine_id: EngineId) -> None:
        self._endpoints.release(self._engines.pop(engine_id).site)
        self._plan.remove(engine_id)
        self._on_process_change()

    async def _restart_router(self, name: str, desired: reconcile_steps.DesiredProcesses) -> None:
        router, port = self._routers[name], self.manifest.spec.router.service.port
        # Only the first replica's port is in the manifest.
        is_moving = is_first_replica(name) and self._endpoints.choose_http_port(port) != router.site.http_port
        if is_moving and self._find_shared_site(name) is None:
            try:
                self._endpoints.check_http_port(port)
            except PortError as error:
                self._report(f"{name} stays at its port, and as it is: {error}")
                # As if it were up to date: the rest of the manifest is followed, and another edit is tried again.
                router.spec_hash = desired.router_hash
                return
        elif not is_moving and self._factory.is_current_router(self.manifest, name, router):
            # The hash differs by the first replica's port alone, which does not concern this one.
            router.spec_hash = desired.router_hash
            return
        where = f" on port {port}" if is_moving else ""
        self._report(f"{name} stops once its streams have ended, then starts again{where}")
        # It is missing then, so that the next step adds it.
        await self._remove_router(name)

    async def _stop_engine(self, engine: ManagedEngine, hurry: asyncio.Event | None = None) -> None:
        await self._stop_process(engine.process, self.manifest.spec.engine.drain_timeout_seconds, hurry)

    async def _stop_router(self, router: ManagedRouter, hurry: asyncio.Event | None = None) -> None:
        await self._stop_process(router.process, router.drain_timeout_s, hurry)

    async def _stop_process(self, process: SupervisedProcess, drain_s: float, hurry: asyncio.Event | None) -> None:
        stopping = asyncio.create_task(process.stop(drain_s + self._stop_margin_s))
        hurrying = asyncio.create_task((hurry or asyncio.Event()).wait())
        await asyncio.wait({stopping, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            process.kill()
        hurrying.cancel()
        await stopping

    async def _stop_all(self, hurry: asyncio.Event) -> None:
        """Stops routers, which finish their streams, and then the engines that served them."""
        await asyncio.gather(*(self._stop_router(router, hurry) for router in self._routers.values()))
        for name in list(self._routers):
            self._forget_router(name)
        await asyncio.gather(*(self._stop_engine(engine, hurry) for engine in self._engines.values()))
        for engine_id in list(self._engines):
            self._forget_engine(engine_id)
        self._notify()

    # The plan.

    def _publish(self) -> None:
        """Makes the next plan, stores it and sends it to the routers, unless it says what the last one says."""
        self._write_engines()
        if self.phase != "stopping":
            self._effective_manifest = self._autotuner.reconcile(self._circumstances())
        self._role_holders = self._choose_role_holders()
        plan = self._plan.update(self._effective_manifest, self._engines, self._count_loads(), self._role_holders)
        if plan is None:
            return
        self._plan_s = self._clock()
        for router in self._routers.values():
            router.link.set_plan(plan)
        self._notify()

    def _retune(self) -> None:
        """Lets the tuner decide again; the plan and the display follow."""
        if self.phase != "stopping":
            self._publish()
            self._notify()

    def _write_engines(self) -> None:
        self._directory.write_engines([f"{engine.site.host}:{engine.site.port}" for engine in self._engines.values()])

    # Observations.

    def _statuses(self) -> list[control_pb2.GetStatusResponse]:
        return [router.link.status for router in self._routers.values() if router.link.status]

    def _count_loads(self) -> dict[EngineId, int]:
        return count_loads(merge_reports(self._statuses()))

    def _circumstances(self) -> TunerInputs:
        return TunerInputs(
            cluster=self.manifest,
            statuses=self._statuses(),
            counts=self._autotuner.counts,
            is_settled=self._is_settled(),
        )

    def _is_settled(self) -> bool:
        """Whether every engine serves with the newest plan, and none comes or goes."""
        plan, statuses = self._plan.plan, self._statuses()
        return (
            plan is not None
            and len(self._engines) == self.manifest.spec.replicas
            and all(map(self._is_serving, self._engines))
            and len(statuses) == len(self._routers)
            and has_acknowledged(plan, merge_reports(statuses), statuses)
        )

    def _engine_status(self, engine_id: EngineId) -> control_pb2.EngineStatus | None:
        return pick_engine_status(self._statuses(), engine_id)

    def _is_serving(self, engine_id: EngineId) -> bool:
        return managed_processes.is_serving(self._engines[engine_id], self._statuses())

    def _choose_role_holders(self) -> frozenset[EngineId]:
        """Engines over which the mix of roles counts: those that serve, and in a cluster that starts, all of them."""
        return frozenset(
            engine_id
            for engine_id, engine in self._engines.items()
            if self._is_serving(engine_id) or (self.phase == "starting" and managed_processes.is_first_start(engine))
        )

    def _follow_role_holders(self) -> None:
        """Makes a new plan when an engine has joined or failed."""
        if self.phase != "stopping" and self._choose_role_holders() != self._role_holders:
            self._publish()

    def _follow_roll(self) -> None:
        engines = [
            RollingEngine(
                engine_id=engine_id,
                restart_hash=engine.spec_hash,
                is_ready=self._is_serving(engine_id),
                refusal=engine.process.refusal,
            )
            for engine_id, engine in self._engines.items()
        ]
        has_reports = bool(self._statuses())
        if self._roll.follow(self.manifest, self._asked_for().engine_hash, engines, has_reports=has_reports):
            self._notify()

    def _is_drained(self, engine_id: EngineId) -> bool:
        return managed_processes.is_drained(engine_id, self._plan.plan, self._statuses())

    # Events.

    def _on_process_change(self) -> None:
        for engine in self._engines.values():
            if engine.process.pid is None:
                engine.stale_epoch = engine.last_epoch
        self._directory.write_processes(list_processes(self._routers, self._engines))
        self._follow_role_holders()
        self._notify()

    def _on_status(self) -> None:
        for engine_id, engine in self._engines.items():
            if status := self._engine_status(engine_id):
                engine.last_epoch = status.epoch
        statuses = [router.link.status for router in self._routers.values()]
        plan = self._plan.plan
        is_acknowledged = plan is not None and all(
            status and status.acknowledged_generation >= plan.generation for status in statuses
        )
        if plan and is_acknowledged and plan.generation > self._announced_generation and self.status().is_ready:
            self._announced_generation = plan.generation
            self._report(f"plan {plan.generation} is in force on all engines ({self._clock() - self._plan_s:.2f} s)")
        if self.phase == "starting" and self.status().is_ready:
            self.phase = "ready"
        self._autotuner.take(self._statuses())
        self._roll.take(self._statuses())
        if self.phase != "stopping" and self._autotuner.is_due(self._circumstances):
            self._publish()
        self._follow_role_holders()
        self._notify()

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            # A verdict may be due though nothing has changed.
            self._follow_roll()
            limit_s = self.manifest.spec.engine.startup_timeout_seconds
            for engine_id, engine in self._engines.items():
                is_late = engine.process.pid is not None and self._clock() - engine.process.started_s > limit_s
                if is_late and not managed_processes.has_connected(engine, self._statuses()):
                    self._report(
                        f"{engine_id} did not serve within {limit_s} s (spec.engine.startupTimeoutSeconds);"
                        f" it is killed and started again; see {engine.process.launch.log}"
                    )
                    engine.process.kill()

    def _notify(self) -> None:
        """Wakes the tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_until(self, is_reached: Callable[[], bool], timeout_s: float | None = None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not is_reached():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
