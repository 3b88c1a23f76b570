"""Renders the network policies of engines and routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.field_types import port_range

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster, ServingClusterSpec
    from sluice_operator.kubernetes.objects import Object

# Set by Kubernetes on every namespace.
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def render_network_policies(cluster: ServingCluster, operator_namespace: str) -> list[Object]:
    """Renders network policies: nothing comes in but what is listed.

    Args:
        cluster: The manifest.
        operator_namespace: Where the operator runs; nobody else reaches the control ports.
    """
    name, spec = cluster.metadata.name, cluster.spec
    engines = {"podSelector": {"matchLabels": names.select_component(name, names.ENGINE)}}
    routers = {"podSelector": {"matchLabels": names.select_component(name, names.ROUTER)}}
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: operator_namespace}},
        "podSelector": {"matchLabels": {names.NAME_LABEL: names.MANAGER}},
    }
    # Scrapers run in any namespace; the kubelet's probes pass every policy.
    metrics = {"from": [{"namespaceSelector": {}}], "ports": [_allow(names.METRICS_PORT)]}
    return [
        _render_policy(
            name,
            names.ENGINE,
            [
                {"from": [routers], "ports": [_allow(names.ENGINE_PORT)]},
                {"from": [engines], "ports": _allow_kv(spec)},
                metrics,
            ],
        ),
        _render_policy(
            name,
            names.ROUTER,
            [
                {"ports": [_allow(names.HTTP_PORT), _allow(names.GRPC_PORT)]},
                {"from": [operator], "ports": [_allow(names.CONTROL_PORT)]},
                metrics,
            ],
        ),
    ]


def _render_policy(cluster: str, component: str, ingress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": names.name_workload(cluster, component),
            "labels": names.label_child(cluster, component),
        },
        "spec": {
            "podSelector": {"matchLabels": names.select_component(cluster, component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _allow(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def _allow_kv(spec: ServingClusterSpec) -> list[Object]:
    """Ports of KV traffic: UCX over TCP takes any where the manifest names none."""
    if spec.network.tcp_port_range is None:
        return [{"protocol": "TCP", "port": 1, "endPort": 65535}]
    ports = port_range(spec.network.tcp_port_range)
    return [_allow(spec.network.kv_port), {"protocol": "TCP", "port": ports[0], "endPort": ports[-1]}]
