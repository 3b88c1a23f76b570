"""The chart on the real node: installed, upgraded and uninstalled as users do, with images of the default names."""

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
# Registry and path that the kubelet adds to `sluice-engine:0.1.0`.
LIBRARY = "docker.io/library"
# Clusters of tests have namespaces of their own, and run on CPUs.
SETTINGS = ("--set=watchAllNamespaces=true", "--set=watchNodes=true", "--set=gpuResourceName=")
# Labels of a namespace that enforces Pod Security `restricted`.
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def name_image(part: str) -> str:
    """Returns the full name that the kubelet uses for the image of a part, as the chart names it by default."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    return f"{LIBRARY}/sluice-{part}:{version}"


def load_images(node: Node, folder: Path) -> None:
    """Loads the product's images onto the node, under the chart's default names."""

    def make(part: str) -> Image:
        return make_service_image(name_image(part), part, folder / part)

    with ThreadPoolExecutor() as pool:
        # In threads: installing an environment takes half a minute.
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
        """Creates a cluster, and prints what hinders it if it does not become ready."""
        cluster.create()
        try:
            cluster.wait_whole()
        except AssertionError:
            print(self.describe(), cluster.describe(), sep="\n")
            raise

    def install(self) -> None:
        self._helm("install", "--create-namespace", "--wait", "--timeout=3m", *SETTINGS, chart=CHART)

    def upgrade(self, chart: Path, *values: str) -> None:
        """Upgrades to another chart, or to other values, each as KEY=VALUE."""
        settings = [*SETTINGS, *(f"--set={value}" for value in values)]
        self._helm("upgrade", "--wait", "--timeout=3m", *settings, chart=chart)

    def roll_back(self) -> None:
        self._helm("rollback", "--wait", "--timeout=3m")

    def test(self) -> str:
        return self._helm("test", "--timeout=2m")

    def uninstall(self) -> str:
        return self._helm("uninstall", "--wait", "--timeout=2m")

    def is_installed(self) -> bool:
        return bool(json.loads(self.client.helm("list", "-n", SYSTEM, "-o", "json")))

    def pods(self) -> set[str]:
        """Lists the uids of the operator's pods."""
        answer = self.client.kubectl(
            *("get", "pods", "-n", SYSTEM, "-l", "app.kubernetes.io/name=sluice-operator"),
            *("-o", "jsonpath={.items[*].metadata.uid}"),
        )
        return set(answer.split())

    def remove_definition(self) -> None:
        """Removes the CRD, so that Kubernetes has no trace of Sluice."""
        self.client.kubectl("delete", "crd", DEFINITION, "--ignore-not-found", "--timeout=60s")

    def describe(self) -> str:
        """Describes the operator's pods and logs as text."""
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
    """Installs the chart into a Kubernetes without Sluice's CRD, for the length of the block."""
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
    """Writes a later version of the chart, whose CRD has one more column and one more field."""
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
