"""Where the processes of a local cluster listen: ports claimed for engines and routers, and released."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sluice_operator.resources.command_lines import EngineSite, RouterSite

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
    from sluice_cli.processes.ports import PortAllocator
    from sluice_core.records import EngineId

HOST = "127.0.0.1"


class EndpointAllocator:
    """Claims and releases the ports of engines and routers.

    Args:
        ports: Ports to use.
        directory: The cluster's files, which routers read.
        http_port: Port of the first router instead of the manifest's.
    """

    def __init__(self, ports: PortAllocator, directory: ClusterDirectory, http_port: int | None) -> None:
        self._ports = ports
        self._directory = directory
        self._http_port = http_port

    def choose_http_port(self, from_manifest: int) -> int:
        """Port of the first router's OpenAI API."""
        return self._http_port or from_manifest

    def check_http_port(self, from_manifest: int) -> None:
        """Makes sure that the first router can have its port.

        Raises:
            PortError: It is in use.
        """
        self._ports.release(self._take_http_port(from_manifest))

    def make_engine(self, engine_id: EngineId, model: Path) -> EngineSite:
        """Claims ports for an engine.

        Raises:
            PortError: None is free.
        """
        return EngineSite(
            engine_id=engine_id,
            host=HOST,
            port=self._ports.choose(),
            metrics_port=self._ports.choose(),
            kv_host=HOST,
            kv_port=self._ports.choose(),
            model_directory=str(model),
        )

    def make_first_router(self, from_manifest: int, model: Path, *, shares_ports: bool = False) -> RouterSite:
        """Claims ports for the router at the cluster's address; gRPC and control follow it: 8000, 8001, 8002.

        Raises:
            PortError: The address is in use.
        """
        http_port = self._take_http_port(from_manifest)
        return self._make_router(http_port, [http_port + 1], [http_port + 2], model, shares_ports=shares_ports)

    def make_further_router(self, model: Path, *, shares_ports: bool = False) -> RouterSite:
        """Claims ports for another router.

        Raises:
            PortError: None is free.
        """
        return self._make_router(self._ports.choose(), [], [], model, shares_ports=shares_ports)

    def make_worker(self, first: RouterSite) -> RouterSite:
        """Claims ports for a router that shares the client APIs' ports of another one.

        Raises:
            PortError: None is free.
        """
        return replace(first, control_port=self._ports.choose(), metrics_port=self._ports.choose())

    def _make_router(
        self, http_port: int, grpc: list[int], control: list[int], model: Path, *, shares_ports: bool
    ) -> RouterSite:
        return RouterSite(
            host=HOST,
            http_port=http_port,
            grpc_port=self._ports.choose(grpc),
            control_port=self._ports.choose(control),
            shares_ports=shares_ports,
            metrics_port=self._ports.choose(),
            model_directory=str(model),
            engines=f"file:{self._directory.engines_file}",
            plan_file=str(self._directory.plan_file),
        )

    def _take_http_port(self, from_manifest: int) -> int:
        if self._http_port:
            return self._ports.take(self._http_port, "--http-port", "choose another, or stop what uses it")
        remedy = "stop what uses it, change the manifest, or pass --http-port"
        return self._ports.take(from_manifest, "spec.router.service.port", remedy)

    def release(self, site: EngineSite | RouterSite, others: Iterable[RouterSite] = ()) -> None:
        """Releases the ports of a site that no other one shares."""
        shared = {port for other in others for port in list_ports(other).values()}
        for port in set(list_ports(site).values()) - shared:
            self._ports.release(port)


def list_ports(site: EngineSite | RouterSite) -> dict[str, int]:
    """Ports of a site by purpose."""
    if isinstance(site, EngineSite):
        return {"grpc": site.port, "metrics": site.metrics_port, "kv": site.kv_port}
    return {
        "http": site.http_port,
        "grpc": site.grpc_port,
        "control": site.control_port,
        "metrics": site.metrics_port,
    }
