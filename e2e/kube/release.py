"""The chart on the real node: installed, upgraded and uninstalled as users do, with images under their default names."""

from __future__ import annotations

import contextlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import yaml
from testbed.errors import TestbedError
from testbed.helm import CHART, RELEASE, SYSTEM
from testbed.product import make_engine_image, make_service_image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pod_cluster import PodCluster
    from testbed.client import Client
    from testbed.images import Image
    from testbed.node import Node

DEFINITION = "servingclusters.sluice.dev"
OPERATOR = "deployment/sluice-operator"
# What the kubelet asks for when a manifest says `sluice-engine:0.1.0`.
LIBRARY = "docker.io/library"
# Labels of a namespace whose pods must be as Pod Security wants them at its strictest.
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def name_image(part: str) -> str:
    """What the kubelet calls the image of a part that the chart names by default."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    return f"{LIBRARY}/sluice-{part}:{version}"


def load_images(node: Node, folder: Path) -> None:
    """Brings the product's images, under the names that the chart has for them, to the node."""

    def make(part: str) -> Image:
        return make_service_image(name_image(part), part, folder / part)

    with ThreadPoolExecutor() as pool:
        # Each is half a minute of installing.
        for image in pool.map(make, ("operator", "router")):
            node.load_image(image)
    node.load_image(make_engine_image(name_image("engine")))


class Release:
    """One release of the chart.

    Args:
        client: The administrator.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    def begin(self, cluster: PodCluster) -> None:
        """Makes a cluster, and says what hinders it if it does not come to serve."""
        cluster.create()
        try:
            cluster.wait_whole()
        except AssertionError:
            print(self.describe(), cluster.describe(), sep="\n")
            raise

    def install(self) -> None:
        self._helm("install", "--create-namespace", "--wait", "--timeout=3m", chart=CHART)

    def upgrade(self, chart: Path, *values: str) -> None:
        """Upgrades to another chart, or to other values, each as KEY=VALUE."""
        self._helm("upgrade", "--wait", "--timeout=3m", *(f"--set={value}" for value in values), chart=chart)

    def roll_back(self) -> None:
        self._helm("rollback", "--wait", "--timeout=3m")

    def test(self) -> str:
        return self._helm("test", "--timeout=2m")

    def uninstall(self) -> str:
        return self._helm("uninstall", "--wait", "--timeout=2m")

    def is_installed(self) -> bool:
        return bool(json.loads(self.client.helm("list", "-n", SYSTEM, "-o", "json")))

    def pods(self) -> set[str]:
        """Uids of the operator's pods."""
        answer = self.client.kubectl(
            *("get", "pods", "-n", SYSTEM, "-l", "app.kubernetes.io/name=sluice-operator"),
            *("-o", "jsonpath={.items[*].metadata.uid}"),
        )
        return set(answer.split())

    def remove_definition(self) -> None:
        """Makes the cluster one that has never seen Sluice."""
        self.client.kubectl("delete", "crd", DEFINITION, "--ignore-not-found", "--timeout=60s")

    def describe(self) -> str:
        """The operator's pods and logs, for people."""
        said = [self.client.kubectl("get", "pods", "-o", "wide", "-n", SYSTEM)]
        try:
            said.append(self.client.kubectl("logs", "--tail=60", "--all-pods", "--prefix", "-n", SYSTEM, OPERATOR))
        except TestbedError as error:
            said.append(str(error))
        return "\n".join(said)

    def _helm(self, command: str, *arguments: str, chart: Path | None = None) -> str:
        return self.client.helm(command, RELEASE, *([str(chart)] if chart else []), "-n", SYSTEM, *arguments)


@contextlib.contextmanager
def run_release(client: Client) -> Iterator[Release]:
    """The chart, installed into a Kubernetes that has never seen Sluice, as long as the block lasts."""
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM, "labels": RESTRICTED}})
    made = Release(client)
    made.remove_definition()
    try:
        made.install()
        yield made
    except TestbedError:
        print(made.describe())
        raise
    made.uninstall()


def make_next_chart(folder: Path) -> Path:
    """A later version of the chart, whose definition has one more column and one more field."""
    chart = folder / "sluice"
    shutil.copytree(CHART, chart)
    description: dict[str, Any] = yaml.safe_load((chart / "Chart.yaml").read_text())
    description["version"] += "-next"
    (chart / "Chart.yaml").write_text(yaml.safe_dump(description))
    path = chart / "files" / "servingclusters.yaml"
    definition = yaml.safe_load(path.read_text())
    (version,) = definition["spec"]["versions"]
    version["additionalPrinterColumns"].append({"name": "Next", "type": "string", "jsonPath": ".spec.next"})
    version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["next"] = {
        "type": "string",
        "maxLength": 63,
        "description": "What a later version of Sluice knows.",
    }
    path.write_text(yaml.safe_dump(definition))
    return chart
