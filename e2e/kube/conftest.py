"""One real cluster for all tests here; each test has namespaces of its own."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, Literal

import pytest
from release import DEFINITION, Release, load_images, run_release
from testbed.cluster import Testbed, run_testbed
from testbed.errors import TestbedError
from testbed.helm import Helm
from testbed.images import make_python_image
from testbed.kubernetes_choice import build_chosen
from testbed.settings import NODE_NAME, ROOT, make_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from testbed.client import Client
    from testbed.node import Node

# Cases that the Python model and the CRD are held to without a cluster.
sys.path.append(str(ROOT / "operator" / "tests"))

# `make images-check` and `make autoscalers-check` run them: they build for minutes, the first needs 30 GB of disk.
collect_ignore = ["test_images.py", "test_autoscalers.py"]
CRD = ROOT / "crds" / "servingclusters.yaml"
PYTHON_IMAGE = "docker.io/local/python:1"
NUMBERS = itertools.count()
FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option by which the two halves of the tests run side by side, each on a cluster of its own."""
    parser.addoption("--nodes", choices=["real", "played"], help="only modules with, or without, pods on this machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the modules that belong to the half which ``--nodes`` names."""
    if (half := config.getoption("--nodes")) is None:
        return
    real = {item.path for item in items if "node" in getattr(item, "fixturenames", ())}
    left_out = [item for item in items if (item.path in real) != (half == "real")]
    items[:] = [item for item in items if (item.path in real) == (half == "real")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    """The cluster: control plane, two fake nodes, and this machine as a node (root) if any test asks for one."""
    needs_node = any("node" in item.fixturenames for item in request.session.items if isinstance(item, pytest.Function))
    with run_testbed(make_settings(has_real_node=needs_node)) as running:
        yield running


@pytest.fixture(scope="session")
def node(testbed: Testbed) -> Node:
    """This machine as a node, with an image of its Python."""
    testbed.node.load_image(make_python_image(PYTHON_IMAGE))
    return testbed.node


@pytest.fixture(scope="session")
def product(node: Node, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The product's images, on the node."""
    load_images(node, tmp_path_factory.mktemp("environments"))


@pytest.fixture(scope="module", autouse=True)
def place_for_pods(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps pods off this machine in modules whose tests do not ask for ``node``: kwok plays those pods."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = {name for item in items if item.module is request.module for name in item.fixturenames}
    running: Testbed | None = request.getfixturevalue("testbed") if "testbed" in asked and "node" not in asked else None
    if running is None or not running.settings.has_real_node:
        yield
        return
    running.client.kubectl("cordon", NODE_NAME)
    yield
    running.client.kubectl("uncordon", NODE_NAME)


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm, which needs no cluster to render."""
    return Helm(build_chosen() / "helm", tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def client(testbed: Testbed) -> Client:
    """The administrator of the cluster."""
    return testbed.client


@pytest.fixture(scope="session")
def crd(client: Client) -> Path:
    """The CRD, installed."""
    client.kubectl("apply", "--server-side", "-f", str(CRD))
    client.wait_established("servingclusters.sluice.dev")
    return CRD


def choose_scope(fixture_name: str, config: pytest.Config) -> Literal["session", "module"]:
    """Shares the installation among modules of which every one uses it: the others run an operator of their own."""
    del fixture_name
    return "session" if config.getoption("--nodes") == "real" else "module"


@pytest.fixture(scope=choose_scope)
def release(client: Client, crd: Path, product: None) -> Iterator[Release]:
    """The chart, installed into a Kubernetes without Sluice's CRD; afterwards the CRD is as other tests need it."""
    with run_release(client) as made:
        yield made
    made.remove_definition()
    client.kubectl("apply", "--server-side", "-f", str(crd))
    client.wait_established(DEFINITION)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Notes whether a test failed, for fixtures that then print more about it."""
    report = yield
    item.stash.setdefault(FAILED, False)
    item.stash[FAILED] |= report.failed
    return report


@pytest.fixture
def make_namespace(client: Client, request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Makes namespaces that enforce a Pod Security level; prints their pods and events after a failure."""
    made: list[str] = []

    def make(level: str = "restricted") -> str:
        name = f"test-{next(NUMBERS)}"
        labels = {"pod-security.kubernetes.io/enforce": level}
        client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        # Kubernetes refuses pods until the namespace has its service account.
        client.kubectl("wait", "--for=create", "--timeout=30s", "-n", name, "serviceaccount/default")
        made.append(name)
        return name

    yield make
    for name in made if request.node.stash.get(FAILED, False) else ():
        print(client.kubectl("get", "pods", "-o", "wide", "-n", name))
        print(client.kubectl("events", "-n", name))
        for pod in client.kubectl("get", "pods", "-o", "name", "-n", name).split():
            print(f"--- {pod}\n{read_last_words(client, name, pod)}")


def read_last_words(client: Client, namespace: str, pod: str) -> str:
    """Reads the end of a pod's log, or why there is none: the pod may be gone, and kwok's pods have no log."""
    try:
        return client.kubectl("logs", "--tail=40", "--ignore-errors", "-n", namespace, pod)
    except TestbedError as error:
        return str(error)


@pytest.fixture
def namespace(make_namespace: Callable[[str], str]) -> str:
    """A namespace under Pod Security ``restricted``."""
    return make_namespace("restricted")


def make_volume(
    namespace: str, claim: str, folder: Path, access: str = "ReadOnlyMany"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes a folder of this machine a volume, bound to a claim that restricted pods may use.

    Mount the claim with ``readOnly: true``. Otherwise the kubelet changes owner and mode of the files on the machine.
    """
    size = {"storage": "1Gi"}
    common = {"accessModes": [access], "storageClassName": ""}
    real = {"matchExpressions": [{"key": "type", "operator": "In", "values": ["real"]}]}
    name = f"{namespace}-{claim}"
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            **common,
            "capacity": size,
            "claimRef": {"name": claim, "namespace": namespace},
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [real]}},
        },
    }
    return volume, {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim},
        "spec": {**common, "volumeName": name, "resources": {"requests": size}},
    }
