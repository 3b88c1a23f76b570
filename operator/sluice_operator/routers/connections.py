"""The leader's links to the routers of all clusters: pushes plans, follows statuses, wakes the reconciler."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from sluice_operator.api.names import CONTROL_PORT
from sluice_operator.routers.connection import ControlTls, RouterLink
from sluice_operator.routers.engine_reports import is_worth_a_look

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sluice.certificates import CertificateFolder
    from sluice.v1 import control_pb2, plan_pb2
    from sluice_operator.api.names import ClusterKey

logger = logging.getLogger(__name__)

# A link that fails is not expected to work at once.
RESTART_S = 5.0
NO_NAMES: Mapping[str, str] = MappingProxyType({})


class Routers(Protocol):
    """What the reconciler asks of the links."""

    def follow(self, key: ClusterKey, addresses: Mapping[str, str], server_names: Mapping[str, str] = NO_NAMES) -> None:
        """Sets the routers of a cluster; none ends all links.

        Args:
            key: The cluster.
            addresses: Address of each pod by its name.
            server_names: Name in the certificate of each pod whose control port has one, by the pod's name.
        """

    def offer(self, key: ClusterKey, plan: plan_pb2.Plan) -> None:
        """Sets the newest plan of a cluster; it is pushed to each router until it is in force there."""

    def statuses(self, key: ClusterKey) -> dict[str, control_pb2.GetStatusResponse]:
        """Newest status of each router that answers, by the pod's name."""

    def refusals(self, key: ClusterKey) -> dict[str, str]:
        """Why a router refused the newest plan, by the pod's name."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    address: str
    server_name: str
    link: RouterLink
    task: asyncio.Task[None]
    seen: control_pb2.GetStatusResponse | None = None


@dataclass(slots=True)
class _Cluster:
    plan: plan_pb2.Plan | None = None
    slots: dict[str, _Slot] = field(default_factory=dict)


class RouterLinks:
    """The links.

    Args:
        group: Runs their tasks.
        wake: Called with a cluster whose routers say something to act on.
        measure: Called with every status, for attainment.
        port: Control port of the routers.
        certificates: Our own, for routers that ask for one; somebody else refreshes them.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        *,
        wake: Callable[[ClusterKey], None],
        measure: Callable[[ClusterKey, control_pb2.GetStatusResponse], None],
        port: int = CONTROL_PORT,
        certificates: CertificateFolder | None = None,
    ) -> None:
        self._certificates = certificates
        self._group = group
        self._wake = wake
        self._measure = measure
        self._port = port
        self._clusters: dict[ClusterKey, _Cluster] = {}

    def follow(self, key: ClusterKey, addresses: Mapping[str, str], server_names: Mapping[str, str] = NO_NAMES) -> None:
        """See ``Routers.follow``."""
        cluster = self._clusters.setdefault(key, _Cluster())
        for name, slot in list(cluster.slots.items()):
            if addresses.get(name) != slot.address or server_names.get(name, "") != slot.server_name:
                slot.task.cancel()
                del cluster.slots[name]
        for name, address in addresses.items():
            if name not in cluster.slots:
                cluster.slots[name] = self._start(key, name, address, server_names.get(name, ""))
        if not addresses:
            del self._clusters[key]

    def offer(self, key: ClusterKey, plan: plan_pb2.Plan) -> None:
        """See ``Routers.offer``."""
        cluster = self._clusters.get(key)
        if cluster is None or cluster.plan == plan:
            return
        cluster.plan = plan
        for slot in cluster.slots.values():
            slot.link.offer(plan)

    def statuses(self, key: ClusterKey) -> dict[str, control_pb2.GetStatusResponse]:
        """See ``Routers.statuses``."""
        slots = self._clusters[key].slots if key in self._clusters else {}
        return {name: slot.link.status for name, slot in slots.items() if slot.link.status is not None}

    def refusals(self, key: ClusterKey) -> dict[str, str]:
        """See ``Routers.refusals``."""
        slots = self._clusters[key].slots if key in self._clusters else {}
        return {name: slot.link.refusal for name, slot in slots.items() if slot.link.refusal}

    def count(self) -> int:
        """Links in all."""
        return sum(len(cluster.slots) for cluster in self._clusters.values())

    def _start(self, key: ClusterKey, name: str, address: str, server_name: str) -> _Slot:
        def on_status() -> None:
            slot = self._clusters[key].slots.get(name) if key in self._clusters else None
            if slot is None or slot.link is not link:
                return
            if link.status is not None:
                self._measure(key, link.status)
            old, slot.seen = slot.seen, link.status
            if is_worth_a_look(old, link.status):
                self._wake(key)

        def report(line: str) -> None:
            logger.warning(line, extra={"object": str(key)})
            self._wake(key)

        tls = None
        if server_name and self._certificates:
            tls = ControlTls(certificates=self._certificates, server_name=server_name)
        link = RouterLink(name, f"{address}:{self._port}", report=report, on_status=on_status, tls=tls)
        plan = self._clusters[key].plan
        if plan is not None:
            link.offer(plan)
        task = self._group.create_task(_keep(link), name=f"router {key} {name}")
        return _Slot(address=address, server_name=server_name, link=link, task=task)


async def _keep(link: RouterLink) -> None:
    """Runs a link for ever: one that fails in a way that it does not know must not end the others."""
    while True:
        try:
            await link.run()
        except Exception:  # outermost frame of a link
            logger.exception("the link to %s failed", link.name)
        await asyncio.sleep(RESTART_S)
