"""Renders the disruption budgets of engines and routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.labels import label_child, select_component

# So many pods of one kind at a time.
EVICTIONS_AT_ONCE = 1

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


def render_disruption_budgets(cluster: ServingCluster) -> list[Object]:
    """Renders disruption budgets; none for a single pod, whose node could not be drained then."""
    replicas = {names.ENGINE: cluster.spec.replicas, names.ROUTER: cluster.spec.router.replicas}
    name = cluster.metadata.name
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {
                "name": names.name_workload(name, component),
                "labels": label_child(name, component),
            },
            "spec": {
                "maxUnavailable": EVICTIONS_AT_ONCE,
                "selector": {"matchLabels": select_component(name, component)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
        for component, count in replicas.items()
        if count > 1
    ]
