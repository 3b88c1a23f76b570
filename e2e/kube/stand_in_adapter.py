"""An adapter for external metrics: it answers an HPA with the sum of a metric over a cluster's engines or routers.

prometheus-adapter answers with the same sum, of what Prometheus scraped. This one scrapes when it is asked.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import ssl
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import trustme
from stand_in_server import QuietHandler, serve
from testbed.client import render_outside_service

from sluice_operator.api import names
from sluice_operator.api.ports import METRICS_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pod_cluster import PodCluster

NAME = "adapter"
GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
ROOT_PATH = f"/apis/{GROUP}/{VERSION}"
# Prometheus labels what it scrapes with the Service through which it found it.
COMPONENTS = {names.name_engine_service("tiny"): names.ENGINE, "tiny-router-control": names.ROUTER}


@contextmanager
def run_stand_in_adapter(cluster: PodCluster, address: str) -> Iterator[dict[str, list[float]]]:
    """Serves Kubernetes' API of external metrics for the length of the block.

    Args:
        cluster: Whose pods it scrapes; the adapter's Service is in the same namespace.
        address: Of this machine, as the API server reaches it.

    Yields:
        The values that it answered with, by metric.
    """
    answered: dict[str, list[float]] = {}

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            url = urlsplit(self.path)
            metric = url.path.removeprefix(f"{ROOT_PATH}/namespaces/{cluster.namespace}/")
            service = parse_qs(url.query).get("labelSelector", [""])[0].removeprefix("service=")
            if url.path == ROOT_PATH:
                self._answer({"kind": "APIResourceList", "groupVersion": f"{GROUP}/{VERSION}", "resources": []})
            elif "/" in metric or service not in COMPONENTS:
                self.send_error(404)
            else:
                values = answered.setdefault(metric, [])
                values.append(sum_metric(cluster, COMPONENTS[service], metric))
                self._answer(make_value_list(metric, values[-1]))

        def _answer(self, content: Any) -> None:
            self.answer(json.dumps(content).encode(), **{"Content-Type": "application/json"})

    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(f"{NAME}.{cluster.namespace}.svc").configure_cert(context)
    with serve(address, Handler, context) as port:
        objects = render_registration(cluster.namespace, address, port, authority.cert_pem.bytes())
        try:
            cluster.client.apply(*objects)
            yield answered
        finally:
            cluster.client.kubectl("delete", "apiservice", objects[-1]["metadata"]["name"])


def sum_metric(cluster: PodCluster, component: str, metric: str) -> float:
    """Scrapes every engine or router that answers, and sums the samples of a metric."""
    total = 0.0
    for address in cluster.addresses(component).values():
        try:
            with urllib.request.urlopen(f"http://{address}:{METRICS_PORT}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            # An engine that starts or ends has no figures.
            continue
        total += sum(float(line.split()[-1]) for line in lines if line.partition(" ")[0].partition("{")[0] == metric)
    return total


def make_value_list(metric: str, value: float) -> dict[str, Any]:
    """Makes the answer to an HPA."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    item = {"metricName": metric, "metricLabels": {}, "timestamp": now, "value": f"{round(1000 * value)}m"}
    return {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": [item]}


def render_registration(namespace: str, address: str, port: int, authority: bytes) -> list[dict[str, Any]]:
    """Renders what has the API server pass the group's requests on to a port of this machine."""
    return [
        *render_outside_service(NAME, namespace, address, {"https": (443, port)}),
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "service": {"namespace": namespace, "name": NAME, "port": 443},
                "caBundle": base64.b64encode(authority).decode(),
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        },
    ]
