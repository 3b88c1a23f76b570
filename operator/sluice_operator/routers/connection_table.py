"""The leader's connections to the routers of all clusters: push plans, follow statuses, enqueue reconciles."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sluice_operator.api.ports import CONTROL_PORT
from sluice_operator.routers.engine_reports import needs_reconcile
from sluice_operator.routers.router_connection import ControlTls, RouterConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sluice.certificate_rotation import CertificateFolder
    from sluice.v1 import control_pb2, plan_pb2
    from sluice_operator.api.names import ClusterKey

logger = logging.getLogger(__name__)

# Pause before a connection that failed unexpectedly is opened again.
RESTART_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddress:
    """Where a router's control port is.

    Args:
        host: Address of its pod.
        worker: Its number in the pod, which its port follows from.
        server_name: Name in its certificate; empty: the port is in the open.
    """

    host: str
    worker: int = 0
    server_name: str = ""


class Routers(Protocol):
    """What the reconciler needs of router connections."""

    def set_routers(self, key: ClusterKey, routers: Mapping[str, RouterAddress]) -> None:
        """Sets the routers of a cluster, by their names; none closes all connections."""

    def set_plan(self, key: ClusterKey, plan: plan_pb2.Plan) -> None:
        """Sets the newest plan of a cluster; it is pushed to each router until it is in force there."""

    def statuses(self, key: ClusterKey) -> dict[str, control_pb2.GetStatusResponse]:
        """Newest status of each router that answers, by its name."""

    def refusals(self, key: ClusterKey) -> dict[str, str]:
        """Why a router refused the newest plan, by its name."""


@dataclass(slots=True, kw_only=True)
class _RouterEntry:
    address: RouterAddress
    connection: RouterConnection
    task: asyncio.Task[None]
    last_status: control_pb2.GetStatusResponse | None = None


@dataclass(slots=True)
class _Cluster:
    plan: plan_pb2.Plan | None = None
    routers: dict[str, _RouterEntry] = field(default_factory=dict)


class RouterConnections:
    """The connections.

    Args:
        group: Runs their tasks.
        enqueue: Called with a cluster whose routers report something to act on.
        record_status: Called with every status, for attainment.
        port: Control port of each pod's first router; those of the others follow it.
        certificates: Our own, for routers that require one; a task of the caller refreshes them.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        *,
        enqueue: Callable[[ClusterKey], None],
        record_status: Callable[[ClusterKey, control_pb2.GetStatusResponse], None],
        port: int = CONTROL_PORT,
        certificates: CertificateFolder | None = None,
    ) -> None:
        self._certificates = certificates
        self._group = group
        self._enqueue = enqueue
        self._record_status = record_status
        self._port = port
        self._clusters: dict[ClusterKey, _Cluster] = {}

    def set_routers(self, key: ClusterKey, routers: Mapping[str, RouterAddress]) -> None:
        """See ``Routers.set_routers``."""
        cluster = self._clusters.setdefault(key, _Cluster())
        for name, entry in list(cluster.routers.items()):
            if routers.get(name) != entry.address:
                entry.task.cancel()
                del cluster.routers[name]
        for name, address in routers.items():
            if name not in cluster.routers:
                cluster.routers[name] = self._start(key, name, address)
        if not routers:
            del self._clusters[key]

    def set_plan(self, key: ClusterKey, plan: plan_pb2.Plan) -> None:
        """See ``Routers.set_plan``."""
        cluster = self._clusters.get(key)
        if cluster is None or cluster.plan == plan:
            return
        cluster.plan = plan
        for entry in cluster.routers.values():
            entry.connection.set_plan(plan)

    def statuses(self, key: ClusterKey) -> dict[str, control_pb2.GetStatusResponse]:
        """See ``Routers.statuses``."""
        routers = self._clusters[key].routers if key in self._clusters else {}
        return {name: entry.connection.status for name, entry in routers.items() if entry.connection.status is not None}

    def refusals(self, key: ClusterKey) -> dict[str, str]:
        """See ``Routers.refusals``."""
        routers = self._clusters[key].routers if key in self._clusters else {}
        return {name: entry.connection.refusal for name, entry in routers.items() if entry.connection.refusal}

    def count(self) -> int:
        """Number of connections."""
        return sum(len(cluster.routers) for cluster in self._clusters.values())

    def _start(self, key: ClusterKey, name: str, address: RouterAddress) -> _RouterEntry:
        def on_status() -> None:
            entry = self._clusters[key].routers.get(name) if key in self._clusters else None
            if entry is None or entry.connection is not connection:
                return
            if connection.status is not None:
                self._record_status(key, connection.status)
            old, entry.last_status = entry.last_status, connection.status
            if needs_reconcile(old, connection.status):
                self._enqueue(key)

        def log(line: str) -> None:
            logger.warning(line, extra={"object": str(key)})
            self._enqueue(key)

        tls = None
        if address.server_name and self._certificates:
            tls = ControlTls(certificates=self._certificates, server_name=address.server_name)
        target = f"{address.host}:{self._port + address.worker}"
        connection = RouterConnection(name, target, log=log, on_status=on_status, tls=tls)
        plan = self._clusters[key].plan
        if plan is not None:
            connection.set_plan(plan)
        task = self._group.create_task(_run_forever(connection), name=f"router {key} {name}")
        return _RouterEntry(address=address, connection=connection, task=task)


async def _run_forever(connection: RouterConnection) -> None:
    """Runs a connection until cancelled."""
    while True:
        try:
            await connection.run()
        except Exception:  # outermost frame of this task: one router's fault must not end the other connections
            logger.exception(
                "the connection to router %s failed; it is opened again in %.0f s", connection.name, RESTART_S
            )
        await asyncio.sleep(RESTART_S)
