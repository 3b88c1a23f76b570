"""A Prometheus that scrapes what ServiceMonitors name, for the length of a block.

Debian builds Prometheus without its discovery of Kubernetes, so the test tells it the targets over HTTP. Their labels
are those that the Prometheus operator has it set.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from stand_in_server import QuietHandler, serve
from testbed.client import render_outside_service
from testbed.prometheus import find_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from testbed.client import Client
    from testbed.cluster import Testbed

# Where docs/guides/autoscaling.md expects it.
NAME, NAMESPACE, PORT = "prometheus", "monitoring", 9090
# The default of a minute is one of patience.
INTERVAL = "2s"


@contextlib.contextmanager
def run_prometheus(testbed: Testbed, monitors: Sequence[dict[str, Any]], namespace: str) -> Iterator[str]:
    """Runs Prometheus on this machine, behind a Service.

    Args:
        testbed: The cluster.
        monitors: ServiceMonitors that say what it scrapes.
        namespace: Theirs.

    Yields:
        Its URL in the cluster.
    """
    settings = testbed.settings

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            targets = list_targets(testbed.client, monitors, namespace)
            self.answer(json.dumps(targets).encode(), **{"Content-Type": "application/json"})

    # The port after those of the cluster.
    port = settings.ports.dns + 1
    file = settings.folder / "prometheus.json"
    testbed.client.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        *render_outside_service(NAME, NAMESPACE, settings.address, {"web": (PORT, port)}),
    )
    command = [
        str(find_program("prometheus")),
        f"--config.file={file}",
        f"--storage.tsdb.path={settings.folder / 'prometheus'}",
        f"--web.listen-address={settings.address}:{port}",
    ]
    with serve("127.0.0.1", Handler) as discovery:
        file.write_text(json.dumps(render_configuration(discovery)))
        testbed.processes.start(NAME, command)
        try:
            yield f"http://{NAME}.{NAMESPACE}:{PORT}"
        finally:
            testbed.processes.stop(NAME)


def render_configuration(discovery_port: int) -> dict[str, Any]:
    """Renders Prometheus' configuration."""
    discovery = {"url": f"http://127.0.0.1:{discovery_port}/targets", "refresh_interval": INTERVAL}
    job = {"job_name": "monitors", "http_sd_configs": [discovery]}
    return {"global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL}, "scrape_configs": [job]}


def list_targets(client: Client, monitors: Sequence[dict[str, Any]], namespace: str) -> list[dict[str, Any]]:
    """Lists what monitors select: the pods behind every Service with their labels and their port."""
    targets = []
    for monitor in monitors:
        # The slices of a Service have its labels.
        selector = ",".join(f"{key}={value}" for key, value in monitor["spec"]["selector"]["matchLabels"].items())
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector={quote(selector)}"
        names = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
        for item in client.request("GET", path).content["items"]:
            service = item["metadata"]["labels"]["kubernetes.io/service-name"]
            targets += [
                {
                    "targets": [f"{address}:{port['port']}"],
                    "labels": {"namespace": namespace, "service": service, "pod": endpoint["targetRef"]["name"]},
                }
                for port in item["ports"] or ()
                if port["name"] in names
                for endpoint in item["endpoints"] or ()
                for address in endpoint["addresses"]
            ]
    return targets
