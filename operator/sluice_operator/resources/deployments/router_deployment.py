"""The Deployment of the routers. Their pod is in ``pods/router_pod.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.labels import DEFAULT_IMAGE_ANNOTATION, label_child, select_component
from sluice_operator.resources.deployments import rolling_update
from sluice_operator.resources.pods.router_pod import render_router_pod

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


def render_routers(cluster: ServingCluster, default_image: str, control_name: str) -> Object:
    """Renders the routers' Deployment.

    Args:
        cluster: The manifest.
        default_image: Image of manifests that name none.
        control_name: Name in the operator's certificate.
    """
    name, spec = cluster.metadata.name, cluster.spec
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": names.name_workload(name, names.ROUTER),
            "labels": label_child(name, names.ROUTER),
            "annotations": {DEFAULT_IMAGE_ANNOTATION: "" if spec.router.image else default_image},
        },
        "spec": {
            "replicas": spec.router.replicas,
            "selector": {"matchLabels": select_component(name, names.ROUTER)},
            "strategy": rolling_update.ROUTER_STRATEGY,
            "revisionHistoryLimit": 3,
            "template": render_router_pod(cluster, spec.router.image or default_image, control_name),
        },
    }
