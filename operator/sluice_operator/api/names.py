"""Names of what a ServingCluster owns: objects, files, certificates. Each is built here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.cluster_spec import Metadata

GROUP = "sluice.dev"
# Field manager of what we apply, and value of the managed-by label.
MANAGER = "sluice-operator"


ENGINE = "engine"
ROUTER = "router"
# The certificate of the routers' ports for clients.
FRONT = "front"
PLAN_FILE = "plan.json"
# Beside the plan: the models that routers serve, while one replaces another.
MODELS_FILE = "models.json"
# Beside the plan: the spec that was accepted last, which stays in force while another one is refused.
ACCEPTED_SPEC_FILE = "accepted-spec.json"


@dataclass(frozen=True, slots=True, order=True)
class ClusterKey:
    """Names one ServingCluster.

    Args:
        namespace: Its namespace.
        name: Its name.
    """

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def name_workload(cluster: str, component: str) -> str:
    """Name of the Deployment, disruption budget, network policy and service account of engines or routers."""
    return f"{cluster}-{component}"


def name_engine_service(cluster: str) -> str:
    """Name of the headless Service by which routers find engines."""
    return f"{cluster}-engines"


def name_router_service(cluster: str) -> str:
    """Name of the Service that clients use."""
    return f"{cluster}-router"


def name_control_service(cluster: str) -> str:
    """Name of the headless Service of the routers' control ports."""
    return f"{cluster}-router-control"


def name_plan(cluster: str) -> str:
    """Name of the ConfigMap that holds the plan."""
    return f"{cluster}-plan"


def name_certificate(cluster: str, purpose: str) -> str:
    """Name of a Certificate of cert-manager's, and of the Secret that it fills; for engines, routers, or the front."""
    return f"{cluster}-{purpose}-tls"


def name_engine_peer(metadata: Metadata) -> str:
    """Name in the certificate of a cluster's engines."""
    return f"{name_engine_service(metadata.name)}.{metadata.namespace}.svc"


def name_router_peer(metadata: Metadata) -> str:
    """Name in the certificate of a cluster's routers, as engines and control plane know them."""
    return f"{name_control_service(metadata.name)}.{metadata.namespace}.svc"


def name_operator_peer(namespace: str) -> str:
    """Name in the certificate of the operator.

    Args:
        namespace: Its own.
    """
    return f"{MANAGER}.{namespace}.svc"


def list_router_hosts(metadata: Metadata) -> list[str]:
    """Names under which clients in the same Kubernetes cluster reach the routers."""
    service = name_router_service(metadata.name)
    within = f"{service}.{metadata.namespace}"
    return [service, within, f"{within}.svc", f"{within}.svc.cluster.local"]
