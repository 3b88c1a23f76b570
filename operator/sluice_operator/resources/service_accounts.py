"""Renders the service accounts of engines and routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.labels import label_child

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


def render_service_accounts(cluster: ServingCluster) -> list[Object]:
    """Renders service accounts: identities without rights, and without a token in any pod."""
    name = cluster.metadata.name
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": names.name_workload(name, component), "labels": label_child(name, component)},
            "automountServiceAccountToken": False,
        }
        for component in (names.ENGINE, names.ROUTER)
    ]
