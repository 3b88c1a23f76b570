"""Pods get their model from an S3 or from an OCI image, and answer as stock vLLM does with the same files."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from examples.tiny_model import make_tiny_model
from moto.server import ThreadedMotoServer
from pod_cluster import CLAIMS, MODELS, PodCluster, make_pods_manifest
from release import RESTRICTED
from test_exactness import check
from testbed.images import Image
from testbed.settings import ROOT

from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
from sluice_operator.api.model_identity import identify_model, name_revision_key
from sluice_operator.resources.pods.object_storage_fetch import find_revision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from release import Release
    from testbed.client import Client
    from testbed.cluster import Testbed
    from testbed.node import Node
    from workload import Answer, Request

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

URI, IMAGE = "s3://models/org/tiny", "docker.io/local/tiny-model:1"
OLDEST_WITH_IMAGE_VOLUMES = (2, 1)
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def s3(testbed: Testbed) -> Iterator[str]:
    """The address of an S3 that has the tiny model, for the length of the block; this process has its keys too."""
    make_tiny_model(MODELS / "tiny")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=testbed.settings.address, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            environment.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        for path in (MODELS / "tiny").iterdir():
            client.upload_file(str(path), "models", f"org/tiny/{path.name}")
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def namespace(client: Client, request: pytest.FixtureRequest) -> str:
    """A namespace with the keys of the S3, named after the source."""
    name = f"model-from-{request.node.name.rpartition('_')[2]}"
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})
    data = {name: base64.b64encode(value.encode()).decode() for name, value in KEYS.items()}
    metadata = {"name": "s3", "namespace": name}
    client.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    return name


@contextmanager
def run_cluster(client: Client, release: Release, namespace: str, source: dict[str, Any]) -> Iterator[PodCluster]:
    """Runs an engine and a router for the length of the block."""
    manifest = make_pods_manifest(replicas=1)
    manifest["spec"]["model"] = {"name": "org/tiny", "servedName": "tiny", "source": source}
    manifest["spec"]["router"]["replicas"] = 1
    if "objectStorage" in source:
        # What fetches the model is in the engine's environment, which pods mount.
        mounts = [{"name": "checkout", "mountPath": str(ROOT), "readOnly": True}]
        manifest["spec"]["engine"]["podTemplate"]["spec"]["initContainers"] = [
            {"name": name, "volumeMounts": mounts} for name in ("resolve-model", "fetch-model")
        ]
    made = PodCluster(client, namespace, manifest, claims={"checkout": CLAIMS["checkout"]})
    release.begin(made)
    yield made
    made.remove()


async def check_answers(cluster: PodCluster, known: list[tuple[Request, Answer]]) -> None:
    """Checks that answers are those of stock vLLM."""
    async with cluster.connect() as clients:
        results = await asyncio.gather(*(clients.generate(request) for request, _ in known[:8]))
    for (_, answer), result in zip(known[:8], results, strict=True):
        check(result, answer)


def find_volumes(cluster: PodCluster) -> list[dict[str, Any]]:
    """Finds the model's volume in each pod."""
    pods = (*cluster.engines.values(), *cluster.routers.values())
    return [volume for pod in pods for volume in pod["spec"]["volumes"] if volume["name"] == "model"]


async def test_pods_fetch_one_revision_from_s3(
    client: Client, release: Release, namespace: str, s3: str, known: list[tuple[Request, Answer]]
) -> None:
    source = {"objectStorage": {"uri": URI, "endpoint": s3, "secretName": "s3"}}
    with run_cluster(client, release, namespace, source) as cluster:
        await check_answers(cluster, known)
        model = ModelSpec.model_validate(cluster.manifest["spec"]["model"])
        stored = cluster.read("configmap/tiny-plan")["data"][name_revision_key(identify_model(model))]
        assert stored == find_revision(URI)
        assert [volume["emptyDir"] for volume in find_volumes(cluster)] == [{}, {}]
        for pod in (*cluster.engines.values(), *cluster.routers.values()):
            ended = {each["name"]: each["state"]["terminated"] for each in pod["status"]["initContainerStatuses"]}
            assert ended["resolve-model"]["message"] == stored
            assert ended["fetch-model"]["exitCode"] == 0


async def test_pods_mount_an_image(
    client: Client, release: Release, namespace: str, node: Node, known: list[tuple[Request, Answer]]
) -> None:
    if read_containerd_version() < OLDEST_WITH_IMAGE_VOLUMES:
        pytest.skip("the node's containerd mounts no images")
    make_tiny_model(MODELS / "tiny")
    # No container runs it.
    node.load_image(Image(name=IMAGE, command=("/none",), files={}, trees={"/models/tiny": MODELS / "tiny"}))
    with run_cluster(client, release, namespace, {"image": {"reference": IMAGE, "path": "models/tiny"}}) as cluster:
        await check_answers(cluster, known)
        assert [volume["image"]["reference"] for volume in find_volumes(cluster)] == [IMAGE, IMAGE]


def read_containerd_version() -> tuple[int, ...]:
    """Reads the version of the containerd that the node runs."""
    said = subprocess.run(["containerd", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v?(\d+)\.(\d+)", said.partition(" ")[2])
    assert found is not None, said
    return tuple(int(part) for part in found.groups())
