"""What stands around the pods: Services, disruption budgets, network policies, service accounts, monitors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.field_types import port_range

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster, ServingClusterSpec
    from sluice_operator.kubernetes.interface import Object

# Set by Kubernetes on every namespace.
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def render_services(cluster: ServingCluster) -> list[Object]:
    """Renders the Services: for clients, for routers to find engines, for the routers' control ports."""
    name, service = cluster.metadata.name, cluster.spec.router.service
    clients = {
        "type": service.type,
        "ports": [
            _render_port("http", service.port, names.HTTP_PORT),
            _render_port("grpc", names.GRPC_PORT, names.GRPC_PORT),
        ],
    }
    # Engines that start or end have no endpoints otherwise, and routers must keep streams to those that drain.
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True}
    metrics = _render_port("metrics", names.METRICS_PORT, names.METRICS_PORT)
    engines = {**headless, "ports": [_render_port("grpc", names.ENGINE_PORT, names.ENGINE_PORT), metrics]}
    control = {**headless, "ports": [_render_port("control", names.CONTROL_PORT, names.CONTROL_PORT), metrics]}
    rendered = [
        _render_service(name, names.name_router_service(name), names.ROUTER, clients),
        _render_service(name, names.name_engine_service(name), names.ENGINE, engines),
        _render_service(name, names.name_control_service(name), names.ROUTER, control),
    ]
    if service.annotations:
        rendered[0]["metadata"]["annotations"] = dict(service.annotations)
    return rendered


def _render_service(cluster: str, name: str, component: str, spec: Object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": names.label_child(cluster, component)},
        "spec": {**spec, "selector": names.select_component(cluster, component)},
    }


def _render_port(name: str, port: int, target: int) -> Object:
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}


def render_disruption_budgets(cluster: ServingCluster) -> list[Object]:
    """Renders disruption budgets; none where there is one pod only, which a budget would nail to its node."""
    replicas = {names.ENGINE: cluster.spec.replicas, names.ROUTER: cluster.spec.router.replicas}
    name = cluster.metadata.name
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {
                "name": names.name_workload(name, component),
                "labels": names.label_child(name, component),
            },
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": names.select_component(name, component)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
        for component, count in replicas.items()
        if count > 1
    ]


def render_service_accounts(cluster: ServingCluster) -> list[Object]:
    """Renders service accounts: identities without rights, and without a token in any pod."""
    name = cluster.metadata.name
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": names.name_workload(name, component), "labels": names.label_child(name, component)},
            "automountServiceAccountToken": False,
        }
        for component in (names.ENGINE, names.ROUTER)
    ]


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


def render_monitors(cluster: ServingCluster) -> list[Object]:
    """Renders monitors for the Prometheus operator; they find the headless Services, which have a port for metrics."""
    name = cluster.metadata.name
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "ServiceMonitor",
            "metadata": {"name": names.name_workload(name, component), "labels": names.label_child(name, component)},
            "spec": {
                "selector": {"matchLabels": names.select_component(name, component)},
                "endpoints": [{"port": "metrics"}],
            },
        }
        for component in (names.ENGINE, names.ROUTER)
    ]
