"""Renders ServiceMonitors for the Prometheus operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.labels import label_child, select_component
from sluice_operator.api.router_workers import name_worker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


def render_service_monitors(cluster: ServingCluster, labels: Mapping[str, str]) -> list[Object]:
    """Renders monitors for the Prometheus operator; they find the headless Services, which have a port for metrics.

    Args:
        cluster: The manifest.
        labels: By which a Prometheus selects its monitors.
    """
    name = cluster.metadata.name
    scraped = {names.ENGINE: 1, names.ROUTER: cluster.spec.router.workers}
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "ServiceMonitor",
            "metadata": {
                "name": names.name_workload(name, component),
                "labels": {**labels, **label_child(name, component)},
            },
            "spec": {
                "selector": {"matchLabels": select_component(name, component)},
                "endpoints": [{"port": name_worker("metrics", each)} for each in range(processes)],
            },
        }
        for component, processes in scraped.items()
    ]
