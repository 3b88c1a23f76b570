"""A ServingCluster whose number of engines changes, and the manifests of docs/guides/autoscaling.md that change it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import TYPE_CHECKING, Any

import yaml
from examples.tiny_model import make_tiny_model
from pod_cluster import MODELS, PodCluster, make_pods_manifest
from pod_load import keep_asking
from release import RESTRICTED
from steady_load import Shape
from testbed.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from release import Release
    from testbed.client import Client

# An emulated A100 computes such a prompt in about a second: one engine serves 1.1 a second in time, three serve 3.6.
LITTLE = Shape(prompt_tokens=3500, output_tokens=20, rate_rps=0.6)
MUCH = LITTLE._replace(rate_rps=2.2)
# Two engines cannot serve so much.
MOST = LITTLE._replace(rate_rps=3.5)
GUIDE = ROOT / "docs" / "guides" / "autoscaling.md"
# What the guide's manifests differ in from those that run: two cores have room for three engines.
OWN = {
    "minReplicas: 2": "minReplicas: 1",
    "maxReplicas: 8": "maxReplicas: 3",
    "maxReplicaCount: 8": "maxReplicaCount: 3",
    "$NAME": "tiny",
    "qwen": "tiny",
}


@contextlib.contextmanager
def run_scaled_cluster(client: Client, release: Release, namespace: str, **autoscaling: Any) -> Iterator[PodCluster]:
    """Runs a cluster of one engine for the length of the block.

    Args:
        client: The administrator.
        release: The chart, installed.
        namespace: A namespace, which it creates.
        autoscaling: That section of the spec.
    """
    assert release.is_installed()
    make_tiny_model(MODELS / "tiny")
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": RESTRICTED}})
    manifest = make_pods_manifest(
        replicas=1,
        prefillHeavy="50%",
        slo={"ttftMilliseconds": 4000, "tpotMilliseconds": 200},
        autoscaling=autoscaling,
    )
    manifest["spec"]["engine"]["emulation"] = {"gpu": "a100-80g", "model": "qwen2.5-14b"}
    made = PodCluster(client, namespace, manifest)
    release.begin(made)
    yield made
    made.remove()


async def wait(cluster: PodCluster, what: str, poll: Callable[[], Any]) -> None:
    """Waits for something, and prints how long that took and what the operator says."""
    started_s = time.monotonic()
    await asyncio.to_thread(cluster.wait_for, poll, what)
    status = cluster.read("slc/tiny")["status"]
    print(f"{what}: after {time.monotonic() - started_s:.1f} s; {status.get('autoscaling')}")


def serves(cluster: PodCluster, number: int) -> Callable[[], bool]:
    """Whether so many engines serve, and no other pod of an engine is left."""

    def poll() -> bool:
        status = cluster.read("slc/tiny")["status"]
        return (status["readyReplicas"], status["replicas"], len(cluster.engines)) == (number, number, number)

    return poll


async def check_scaling_by_others(cluster: PodCluster, manifest: str) -> None:
    """Applies what scales the cluster: load brings engines, and without load they leave, every stream exact."""
    cluster.kubectl("apply", "-f", "-", stdin=manifest)
    async with keep_asking(cluster, MOST):
        await wait(cluster, "three engines for what is queued", serves(cluster, 3))
    await wait(cluster, "one engine once nothing is", serves(cluster, 1))
    await asyncio.to_thread(cluster.kubectl, "delete", "-f", "-", stdin=manifest)
    # It wrote to the scale alone; the operator wrote nothing.
    writers = cluster.list_spec_writers()
    assert writers <= {"kubectl-client-side-apply", "kubectl-patch", "kube-controller-manager"}


def read_guide(start: str, namespace: str) -> str:
    """Reads the one manifest or configuration of the guide that begins so, with the names of this cluster.

    Args:
        start: Its first lines.
        namespace: The cluster's namespace.
    """
    (found,) = re.findall(rf"^{re.escape(start)}.*?(?=^MANIFEST$|^```$)", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    text = str(found)
    for shown, own in (OWN | {'namespace="llm"': f'namespace="{namespace}"'}).items():
        text = text.replace(shown, own)
    assert yaml.safe_load(text)
    return text


def read_hpa(namespace: str) -> str:
    """Reads the guide's HPA."""
    return read_guide("apiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\n", namespace)
