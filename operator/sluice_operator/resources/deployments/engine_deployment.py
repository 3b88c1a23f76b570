"""The Deployment of the engines: one for P-heavy and D-heavy engines alike. Their pod is in ``pods/engine_pod.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.labels import DEFAULT_IMAGE_ANNOTATION, label_child, select_component
from sluice_operator.resources.deployments import rolling_update
from sluice_operator.resources.pods.engine_pod import render_engine_pod

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


def render_engines(cluster: ServingCluster, replicas: int, default_image: str, gpu_resource_name: str = "") -> Object:
    """Renders the engines' Deployment.

    Args:
        cluster: The manifest.
        replicas: Pods, victims of a scale-down included until they have drained.
        default_image: Image of manifests that name none.
        gpu_resource_name: Extended resource of GPUs, of manifests that name none; empty: nodes have none.
    """
    name, spec = cluster.metadata.name, cluster.spec
    labels = select_component(name, names.ENGINE)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": names.name_workload(name, names.ENGINE),
            "labels": label_child(name, names.ENGINE),
            "annotations": {DEFAULT_IMAGE_ANNOTATION: "" if spec.engine.image else default_image},
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            **rolling_update.render_rolling_update(spec),
            "template": render_engine_pod(cluster, spec.engine.image or default_image, gpu_resource_name),
        },
    }
