"""Makes the managed engines and routers of a local cluster: their ports, commands, supervisors and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_cli.local_cluster.endpoints import HOST, EndpointAllocator
from sluice_cli.local_cluster.local_manifest import describe_local_security
from sluice_cli.local_cluster.managed_processes import ManagedEngine, ManagedRouter, keep_link, make_control_tls
from sluice_cli.local_cluster.reconcile.router_names import is_first_replica
from sluice_cli.processes.child_processes import LaunchSpec
from sluice_cli.processes.supervisor import SupervisedProcess
from sluice_operator.api import names
from sluice_operator.resources import command_lines
from sluice_operator.resources.pods.pod_failures import ENGINE_REFUSAL_EXIT_CODES
from sluice_operator.routers.router_connection import RouterConnection

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from pathlib import Path

    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
    from sluice_cli.processes.child_processes import Spawner
    from sluice_core.records import EngineId
    from sluice_operator.api.serving_cluster import ServingCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFactory:
    """Makes processes and starts them.

    Args:
        directory: The cluster's files.
        endpoints: Ports to use.
        spawn_engine: Starts engines.
        spawn_router: Starts routers.
        find_model: Directory of a manifest's model.
        find_secret: Directory of a Secret.
        report: Takes a line for people.
        on_process_change: Called after each start and each end of a process.
        on_status: Called after each status of a router.
        clock: Monotonic seconds.
    """

    directory: ClusterDirectory
    endpoints: EndpointAllocator
    spawn_engine: Spawner
    spawn_router: Spawner
    find_model: Callable[[ServingCluster], Path]
    find_secret: Callable[[str], Path]
    report: Callable[[str], None]
    on_process_change: Callable[[], None]
    on_status: Callable[[], None]
    clock: Callable[[], float]

    def start_engine(
        self, manifest: ServingCluster, engine_id: EngineId, spec_hash: str, group: asyncio.TaskGroup
    ) -> ManagedEngine:
        """Starts a new engine.

        Args:
            manifest: What its command comes from.
            engine_id: Its name.
            spec_hash: Of its command and environment.
            group: Runs its supervisor.

        Raises:
            PortError: No port is free.
        """
        site = self.endpoints.make_engine(engine_id, self.find_model(manifest))
        process = self._supervise_engine(manifest, site)
        group.create_task(process.run(), name=engine_id)
        return ManagedEngine(site=site, process=process, spec_hash=spec_hash)

    def replace_engine(
        self, manifest: ServingCluster, engine: ManagedEngine, spec_hash: str, group: asyncio.TaskGroup
    ) -> None:
        """Starts an engine that has been stopped with another command, at the same ports."""
        engine.process = self._supervise_engine(manifest, engine.site)
        engine.spec_hash = spec_hash
        group.create_task(engine.process.run(), name=engine.site.engine_id)

    def start_router(
        self,
        manifest: ServingCluster,
        name: str,
        spec_hash: str,
        group: asyncio.TaskGroup,
        *,
        shares_with: command_lines.RouterSite | None = None,
    ) -> ManagedRouter:
        """Starts a new router, and the link to it.

        Args:
            manifest: What its command comes from.
            name: The workers of ``router-0`` get the manifest's port, others any.
            spec_hash: Of its command.
            group: Runs its supervisor and its link.
            shares_with: A worker of the same replica, whose ports of the client APIs it listens on too.

        Raises:
            PortError: The manifest's port is in use, or none is free.
        """
        model, spec = self.find_model(manifest), manifest.spec.router
        if shares_with is not None:
            site = self.endpoints.make_worker(shares_with)
        elif is_first_replica(name):
            site = self.endpoints.make_first_router(spec.service.port, model, shares_ports=spec.shares_ports)
        else:
            site = self.endpoints.make_further_router(model, shares_ports=spec.shares_ports)
        security = self.describe_security(manifest, names.ROUTER)
        process = self._supervise(name, self._make_router_launch(manifest, name, site), "router")
        tls = make_control_tls(security)
        address = f"{HOST}:{site.control_port}"
        link = RouterConnection(name, address, log=self.report, on_status=self.on_status, tls=tls)
        group.create_task(process.run(), name=name)
        return ManagedRouter(
            site=site,
            process=process,
            spec_hash=spec_hash,
            link=link,
            link_task=group.create_task(keep_link(link, tls), name=f"link to {name}"),
            security=security,
            drain_timeout_s=manifest.spec.router.drain_timeout_seconds,
        )

    def is_current_router(self, manifest: ServingCluster, name: str, router: ManagedRouter) -> bool:
        """Whether a router runs as the manifest says, at the ports that it has."""
        launch = self._make_router_launch(manifest, name, router.site)
        return router.site.shares_ports == manifest.spec.router.shares_ports and router.process.launch == launch

    def describe_security(self, manifest: ServingCluster, component: str) -> command_lines.Security:
        """Says where a component finds its keys and certificates."""
        return describe_local_security(manifest, component, self.find_secret)

    def _make_router_launch(self, manifest: ServingCluster, name: str, site: command_lines.RouterSite) -> LaunchSpec:
        security = self.describe_security(manifest, names.ROUTER)
        return LaunchSpec(
            command=tuple(command_lines.render_router_command(manifest.spec, site, security)),
            environment=command_lines.render_values(manifest.spec.router),
            log=self.directory.log_path(name),
        )

    def _supervise_engine(self, manifest: ServingCluster, site: command_lines.EngineSite) -> SupervisedProcess:
        security = self.describe_security(manifest, names.ENGINE)
        launch = LaunchSpec(
            command=tuple(command_lines.render_engine_command(manifest.spec, site, security)),
            environment=command_lines.render_engine_environment(manifest.spec),
            log=self.directory.log_path(site.engine_id),
        )
        return self._supervise(site.engine_id, launch, "engine")

    def _supervise(self, name: str, launch: LaunchSpec, kind: str) -> SupervisedProcess:
        return SupervisedProcess(
            name,
            launch,
            spawner=self.spawn_engine if kind == "engine" else self.spawn_router,
            report=self.report,
            on_change=self.on_process_change,
            refusals=ENGINE_REFUSAL_EXIT_CODES if kind == "engine" else (),
            clock=self.clock,
        )
