"""Renders the Services of engines and routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.labels import MODEL_LABEL, label_child, select_component
from sluice_operator.api.ports import ENGINE_PORT, GRPC_PORT, HTTP_PORT, METRICS_PORT
from sluice_operator.api.router_workers import control_port, metrics_port, name_worker

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


def render_services(cluster: ServingCluster, router_model: str = "") -> list[Object]:
    """Renders the Services: for clients, for routers to find engines, for the routers' control ports.

    Args:
        cluster: The manifest.
        router_model: Id of the model whose routers get new connections of clients; empty: all do.
    """
    name, service = cluster.metadata.name, cluster.spec.router.service
    clients = {
        "type": service.type,
        "ports": [
            _render_port("http", service.port, HTTP_PORT),
            _render_port("grpc", GRPC_PORT, GRPC_PORT),
        ],
    }
    # Engines that start or end have no endpoints otherwise, and routers must keep streams to those that drain.
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True}
    metrics = _render_port("metrics", METRICS_PORT, METRICS_PORT)
    engines = {**headless, "ports": [_render_port("grpc", ENGINE_PORT, ENGINE_PORT), metrics]}
    workers = [
        _render_port(name_worker(purpose, worker), port(worker), port(worker))
        for worker in range(cluster.spec.router.workers)
        for purpose, port in (("control", control_port), ("metrics", metrics_port))
    ]
    rendered = [
        _render_service(name, names.name_router_service(name), names.ROUTER, clients),
        _render_service(name, names.name_engine_service(name), names.ENGINE, engines),
        _render_service(name, names.name_control_service(name), names.ROUTER, {**headless, "ports": workers}),
    ]
    if router_model:
        rendered[0]["spec"]["selector"] |= {MODEL_LABEL: router_model}
    if service.annotations:
        rendered[0]["metadata"]["annotations"] = dict(service.annotations)
    return rendered


def _render_service(cluster: str, name: str, component: str, spec: Object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": label_child(cluster, component)},
        "spec": {**spec, "selector": select_component(cluster, component)},
    }


def _render_port(name: str, port: int, target: int) -> Object:
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}
