"""The kinds of objects that the operator reads and writes: group, version and name of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.kubernetes.objects import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of object.

    Args:
        api_version: Group and version, such as ``apps/v1``.
        name: Kind, such as ``Deployment``.
        plural: Name in addresses, such as ``deployments``.
    """

    api_version: str
    name: str
    plural: str

    @property
    def group(self) -> str:
        """Group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """Version within the group."""
        return self.api_version.rpartition("/")[2]

    @property
    def root(self) -> str:
        """Address of the group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"


CLUSTERS = Kind(api_version="sluice.dev/v1alpha1", name="ServingCluster", plural="servingclusters")
DEPLOYMENTS = Kind(api_version="apps/v1", name="Deployment", plural="deployments")
PODS = Kind(api_version="v1", name="Pod", plural="pods")
SERVICES = Kind(api_version="v1", name="Service", plural="services")
CONFIG_MAPS = Kind(api_version="v1", name="ConfigMap", plural="configmaps")
SERVICE_ACCOUNTS = Kind(api_version="v1", name="ServiceAccount", plural="serviceaccounts")
DISRUPTION_BUDGETS = Kind(api_version="policy/v1", name="PodDisruptionBudget", plural="poddisruptionbudgets")
NETWORK_POLICIES = Kind(api_version="networking.k8s.io/v1", name="NetworkPolicy", plural="networkpolicies")
SERVICE_MONITORS = Kind(api_version="monitoring.coreos.com/v1", name="ServiceMonitor", plural="servicemonitors")
CERTIFICATES = Kind(api_version="cert-manager.io/v1", name="Certificate", plural="certificates")
LEASES = Kind(api_version="coordination.k8s.io/v1", name="Lease", plural="leases")
NODES = Kind(api_version="v1", name="Node", plural="nodes")
EVENTS = Kind(api_version="events.k8s.io/v1", name="Event", plural="events")
KINDS = {
    kind.name: kind
    for kind in (
        CLUSTERS,
        DEPLOYMENTS,
        PODS,
        SERVICES,
        CONFIG_MAPS,
        SERVICE_ACCOUNTS,
        DISRUPTION_BUDGETS,
        NETWORK_POLICIES,
        SERVICE_MONITORS,
        CERTIFICATES,
        LEASES,
        EVENTS,
    )
}


def kind_of(content: Object) -> Kind:
    """The kind of an object."""
    return KINDS[content["kind"]]
