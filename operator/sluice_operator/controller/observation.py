"""Observes one cluster in two steps: what a plan is made of, then the rest of its children.

A plan needs the pods, the stored plan and the Deployments; the other lists would only delay it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.labels import CLUSTER_LABEL, COMPONENT_LABEL
from sluice_operator.api.router_workers import name_worker
from sluice_operator.kubernetes.errors import BusyError, KubernetesError
from sluice_operator.kubernetes.kinds import (
    CERTIFICATES,
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    PODS,
    SERVICE_ACCOUNTS,
    SERVICE_MONITORS,
    SERVICES,
)
from sluice_operator.kubernetes.objects import labels_of, name_of, uid_of
from sluice_operator.resources.children import key_of
from sluice_operator.resources.owner_references import is_owned
from sluice_operator.resources.pods.pod_status import read_pod
from sluice_operator.routers.connection_table import RouterAddress
from sluice_operator.routers.engine_reports import merge_reports

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sluice.v1 import control_pb2
    from sluice_core.records import EngineId
    from sluice_operator.api.names import ClusterKey
    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.kubernetes.kinds import Kind
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.resources.children import ChildKey
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.routers.connection_table import Routers
    from sluice_operator.routers.engine_reports import EngineReport

PLAN_KINDS = (CONFIG_MAPS, DEPLOYMENTS)
OTHER_KINDS = (SERVICE_ACCOUNTS, NETWORK_POLICIES, SERVICES, DISRUPTION_BUDGETS)
CHILD_KINDS = (*PLAN_KINDS, *OTHER_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedState:
    """What the API server says at one moment.

    Args:
        body: The ServingCluster.
        live: Its children by kind and name, and others that carry its labels; of PLAN_KINDS only, at first.
        pods: Its pods, by name.
        engines: Engine pods.
        routers: Router pods.
        has_monitors: Whether the cluster knows ServiceMonitors.
        has_cert_manager: Whether it knows Certificates.
    """

    body: Object
    live: Mapping[ChildKey, Object]
    pods: Mapping[str, Object]
    engines: tuple[Pod, ...]
    routers: tuple[Pod, ...]
    has_monitors: bool
    has_cert_manager: bool

    def own(self, kind: Kind, name: str) -> Object | None:
        """A child, if it exists and is ours."""
        child = self.live.get((kind.name, name))
        return child if child and is_owned(child, uid_of(self.body)) else None

    def deployment(self, component: str) -> Object | None:
        """The Deployment of engines or routers."""
        return self.own(DEPLOYMENTS, names.name_workload(self.body["metadata"]["name"], component))


async def observe_plan_inputs(kubernetes: Kubernetes, key: ClusterKey, body: Object) -> ObservedState:
    """Reads what the plan of a cluster is made of.

    Raises:
        KubernetesError: To be tried again.
    """
    try:
        async with asyncio.TaskGroup() as group:
            has_monitors = group.create_task(kubernetes.is_served(SERVICE_MONITORS))
            has_cert_manager = group.create_task(kubernetes.is_served(CERTIFICATES))
            lists = group.create_task(_list(kubernetes, key, (*PLAN_KINDS, PODS)))
    except* KubernetesError as errors:
        raise _first_of(errors) from errors
    pods = [item for item in lists.result() if item["kind"] == PODS.name]
    return ObservedState(
        body=body,
        live={key_of(item): item for item in lists.result() if item["kind"] != PODS.name},
        pods={name_of(pod): pod for pod in pods},
        engines=_read_pods(pods, names.ENGINE),
        routers=_read_pods(pods, names.ROUTER),
        has_monitors=has_monitors.result(),
        has_cert_manager=has_cert_manager.result(),
    )


async def observe_children(kubernetes: Kubernetes, key: ClusterKey, observed: ObservedState) -> ObservedState:
    """Reads the rest of a cluster's children.

    Raises:
        KubernetesError: To be tried again.
    """
    served = [(SERVICE_MONITORS, observed.has_monitors), (CERTIFICATES, observed.has_cert_manager)]
    kinds = [*OTHER_KINDS, *(kind for kind, is_served in served if is_served)]
    try:
        found = await _list(kubernetes, key, kinds)
    except* KubernetesError as errors:
        raise _first_of(errors) from errors
    return replace(observed, live={**observed.live, **{key_of(item): item for item in found}})


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRouters:
    """What the routers of a cluster say at one moment.

    Args:
        statuses: Newest status of each router that answers, by its name.
        reports: What they say of the engines, put together.
    """

    statuses: Mapping[str, control_pb2.GetStatusResponse]
    reports: Mapping[EngineId, EngineReport]


def observe_routers(routers: Routers, key: ClusterKey, observed: ObservedState) -> ObservedRouters:
    """Connects to the router pods that run, and reads their newest statuses."""
    reachable = [pod for pod in observed.routers if pod.address and not pod.has_ended]
    # By pod: while TLS or the number of workers changes, routers of both kinds run.
    addresses = {
        name_worker(pod.name, worker): RouterAddress(host=pod.address, worker=worker, server_name=pod.control_tls)
        for pod in reachable
        for worker in range(pod.num_workers)
    }
    routers.set_routers(key, addresses)
    statuses = routers.statuses(key)
    return ObservedRouters(statuses=statuses, reports=merge_reports(statuses.values()))


async def _list(kubernetes: Kubernetes, key: ClusterKey, kinds: Collection[Kind]) -> list[Object]:
    labels = {CLUSTER_LABEL: key.name}
    async with asyncio.TaskGroup() as group:
        reads = [group.create_task(kubernetes.list(kind, key.namespace, labels)) for kind in kinds]
    return [item for read in reads for item in read.result()]


def _read_pods(pods: Collection[Object], component: str) -> tuple[Pod, ...]:
    found = [read_pod(pod) for pod in pods if labels_of(pod).get(COMPONENT_LABEL) == component]
    return tuple(sorted(found, key=lambda pod: pod.name))


def _first_of(errors: BaseExceptionGroup[KubernetesError]) -> KubernetesError:
    """Picks one of several errors; one that asks for a pause comes first."""
    leaves = list(_leaves(errors))
    return next((error for error in leaves if isinstance(error, BusyError)), leaves[0])


def _leaves(errors: BaseExceptionGroup[KubernetesError]) -> list[KubernetesError]:
    found: list[KubernetesError] = []
    for error in errors.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
