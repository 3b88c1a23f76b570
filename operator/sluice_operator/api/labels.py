"""Labels and annotations of what a ServingCluster owns. Each is named here and nowhere else."""

from __future__ import annotations

from sluice_core.records import Role
from sluice_operator.api.names import GROUP, MANAGER

CLUSTER_LABEL = f"{GROUP}/cluster"
ROLE_LABEL = f"{GROUP}/role"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
NAME_LABEL = "app.kubernetes.io/name"
# Kubernetes deletes the pods with the least cost first when a Deployment is scaled down.
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
# Of a victim of a scale-down.
DELETION_COST = "-1000"
# Of a victim that has drained: it goes before those that have not.
DRAINED_DELETION_COST = "-2000"
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
# Values of the role label, in the lower case that labels have everywhere.
ROLE_VALUES = {role: role.value.lower() for role in Role}


def select_component(cluster: str, component: str) -> dict[str, str]:
    """Labels that select the pods of engines or routers."""
    return {CLUSTER_LABEL: cluster, COMPONENT_LABEL: component}


def label_child(cluster: str, component: str) -> dict[str, str]:
    """Labels of everything that belongs to a cluster."""
    return {NAME_LABEL: "sluice", MANAGED_BY_LABEL: MANAGER, **select_component(cluster, component)}


def format_selector(labels: dict[str, str]) -> str:
    """Writes labels as a selector, for requests and for the status."""
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
