"""Renders the network policies of engines and routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.field_types import port_range
from sluice_operator.api.labels import NAME_LABEL, label_child, select_component
from sluice_operator.api.ports import ENGINE_PORT, GRPC_PORT, HTTP_PORT, METRICS_PORT
from sluice_operator.api.router_workers import control_port, metrics_port

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
    engines = {"podSelector": {"matchLabels": select_component(name, names.ENGINE)}}
    routers = {"podSelector": {"matchLabels": select_component(name, names.ROUTER)}}
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: operator_namespace}},
        "podSelector": {"matchLabels": {NAME_LABEL: names.MANAGER}},
    }
    # Scrapers run in any namespace; the kubelet's probes pass every policy.
    scrapers: Object = {"from": [{"namespaceSelector": {}}]}
    workers = range(spec.router.workers)
    return [
        _render_policy(
            name,
            names.ENGINE,
            [
                {"from": [routers], "ports": [_allow(ENGINE_PORT)]},
                {"from": [engines], "ports": _allow_kv(spec)},
                {**scrapers, "ports": [_allow(METRICS_PORT)]},
            ],
        ),
        _render_policy(
            name,
            names.ROUTER,
            [
                {"ports": [_allow(HTTP_PORT), _allow(GRPC_PORT)]},
                {"from": [operator], "ports": [_allow(control_port(worker)) for worker in workers]},
                {**scrapers, "ports": [_allow(metrics_port(worker)) for worker in workers]},
            ],
        ),
    ]


def _render_policy(cluster: str, component: str, ingress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": names.name_workload(cluster, component),
            "labels": label_child(cluster, component),
        },
        "spec": {
            "podSelector": {"matchLabels": select_component(cluster, component)},
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
