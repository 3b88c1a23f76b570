"""Names, labels and ports of what a ServingCluster owns. Each is built here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_core.records import Role

if TYPE_CHECKING:
    from sluice_operator.api.spec.cluster_spec import Metadata

GROUP = "sluice.dev"
# Field manager of what we apply, and value of the managed-by label.
MANAGER = "sluice-operator"

CLUSTER_LABEL = f"{GROUP}/cluster"
ROLE_LABEL = f"{GROUP}/role"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
NAME_LABEL = "app.kubernetes.io/name"
# Kubernetes deletes the pods with the least cost first when a Deployment is scaled down.
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
# When a pod that leaves began to drain, in seconds since 1970.
DRAINING_SINCE_ANNOTATION = f"{GROUP}/draining-since"
# On pods: the id of the model that they serve (api.model_identity).
MODEL_LABEL = f"{GROUP}/model"
RESTART_HASH_ANNOTATION = f"{GROUP}/restart-hash"
TEMPLATE_ANNOTATION = f"{GROUP}/pod-template"
APPLIED_HASH_ANNOTATION = f"{GROUP}/applied-hash"
# On routers whose control port requires a certificate: the name in their own certificate.
CONTROL_TLS_ANNOTATION = f"{GROUP}/control-tls"
# On Deployments: the operator's default image that they run; empty where the spec names one.
DEFAULT_IMAGE_ANNOTATION = f"{GROUP}/default-image"
# On the engines' Deployment: a roll that is measured, or that went back.
ROLLOUT_ANNOTATION = f"{GROUP}/rollout"
# On ServingClusters: "allowed" lets it take new default images now.
UPGRADE_ANNOTATION = f"{GROUP}/upgrade"
GENERATION_ANNOTATION = f"{GROUP}/plan-generation"
# On the plan: sliders that autotune put in force instead of the spec's.
TUNED_ANNOTATION = f"{GROUP}/tuned"
# On the plan: how many engines autoscaling asks for, and what it knows of them.
SCALE_ANNOTATION = f"{GROUP}/scale"

ENGINE = "engine"
ROUTER = "router"
# The certificate of the routers' ports for clients.
FRONT = "front"
PLAN_FILE = "plan.json"
# Beside the plan: the models that routers serve, while one replaces another.
MODELS_FILE = "models.json"
# Beside the plan: the spec that was accepted last, which stays in force while another one is refused.
ACCEPTED_SPEC_FILE = "accepted-spec.json"

# Ports of pods. The CRD refuses the engines' in network.kvPort and network.tcpPortRange.
HTTP_PORT = 8000
GRPC_PORT = 8001
CONTROL_PORT = 8002
ENGINE_PORT = 8010
METRICS_PORT = 9090

# Values of the role label, in the lower case that labels have everywhere.
ROLE_VALUES = {role: role.value.lower() for role in Role}


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


def select_component(cluster: str, component: str) -> dict[str, str]:
    """Labels that select the pods of engines or routers."""
    return {CLUSTER_LABEL: cluster, COMPONENT_LABEL: component}


def label_child(cluster: str, component: str) -> dict[str, str]:
    """Labels of everything that belongs to a cluster."""
    return {NAME_LABEL: "sluice", MANAGED_BY_LABEL: MANAGER, **select_component(cluster, component)}


def format_selector(labels: dict[str, str]) -> str:
    """Writes labels as a selector, for requests and for the status."""
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
