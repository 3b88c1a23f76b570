"""Autoscaling in Kubernetes: a helm-installed operator chooses how many engines run in real pods, while streams run.

Load takes the cluster from one engine to three and back, and every stream is exact. Then all engines leave, and a
stream that comes brings one back. Only the user writes the spec. Last, an HPA of Kubernetes does the same by
what is queued. Engines emulate a GPU, so that they serve what a search predicts. The tests run in order: each starts
from the cluster as the test before left it.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from conftest import FAILED
from examples.tiny_model import make_tiny_model
from pod_cluster import MODELS, PodCluster, make_pods_manifest
from pod_load import keep_asking
from release import RESTRICTED
from stand_in_adapter import run_stand_in_adapter
from steady_load import Shape

from sluice_operator.api import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from release import Release
    from testbed.client import Client
    from testbed.cluster import Testbed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NAMESPACE = "scaled"
# An emulated A100 computes such a prompt in about a second: one engine serves 1.1 a second in time, three serve 3.6.
LITTLE = Shape(prompt_tokens=3500, output_tokens=20, rate_rps=0.6)
MUCH = LITTLE._replace(rate_rps=2.2)
# Two engines cannot serve so much.
MOST = LITTLE._replace(rate_rps=3.5)
WINDOW_S = 20


@pytest.fixture(scope="module")
def scaled(client: Client, release: Release) -> Iterator[PodCluster]:
    """One engine, which autoscaling may make three."""
    assert release.is_installed()
    make_tiny_model(MODELS / "tiny")
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}})
    manifest = make_pods_manifest(
        replicas=1,
        prefillHeavy="50%",
        slo={"ttftMilliseconds": 4000, "tpotMilliseconds": 200},
        autoscaling={
            "mode": "Apply",
            "minReplicas": 1,
            "maxReplicas": 3,
            "scaleDown": {"stabilizationWindowSeconds": WINDOW_S},
        },
    )
    manifest["spec"]["engine"]["emulation"] = {"gpu": "a100-80g", "model": "qwen2.5-14b"}
    made = PodCluster(client, NAMESPACE, manifest)
    release.begin(made)
    yield made
    made.remove()


@pytest.fixture
def watched(scaled: PodCluster, release: Release, request: pytest.FixtureRequest) -> Iterator[PodCluster]:
    """The cluster; a test that fails says how it is."""
    yield scaled
    if request.node.stash.get(FAILED, False):
        print(release.describe(), scaled.describe(), sep="\n")


@pytest.fixture
def cluster(watched: PodCluster) -> Iterator[PodCluster]:
    """The cluster; the operator has written no field of its spec."""
    scaled = watched
    yield scaled
    assert scaled.list_spec_writers() <= {"kubectl-client-side-apply", "kubectl-patch"}
    assert scaled.read("slc/tiny")["spec"]["replicas"] == 1


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


async def test_load_brings_engines_and_their_streams_stay_whole_when_it_ends(cluster: PodCluster) -> None:
    async with keep_asking(cluster, LITTLE) as load:
        await wait(
            cluster,
            "what engines serve is known",
            lambda: find_reason(cluster) == "Sized" and cluster.read("slc/tiny")["status"]["readyReplicas"] == 1,
        )
        load.shape = MUCH
        await wait(cluster, "three engines for four times as many requests", serves(cluster, 3))
        await wait(cluster, "both roles among them", lambda: set(cluster.roles) == {"d-heavy", "p-heavy"})
        load.shape = LITTLE
        await wait(cluster, "one engine again", serves(cluster, 1))


def find_reason(cluster: PodCluster) -> str:
    """Reads the reason of the condition Autoscaled."""
    conditions = cluster.read("slc/tiny")["status"]["conditions"]
    return next((str(item["reason"]) for item in conditions if item["type"] == "Autoscaled"), "")


async def test_an_idle_cluster_has_no_engine_until_a_stream_comes(cluster: PodCluster) -> None:
    await asyncio.to_thread(cluster.edit, autoscaling={"minReplicas": 0})
    await wait(cluster, "no engine is left", serves(cluster, 0))
    conditions = {item["type"]: item["reason"] for item in cluster.read("slc/tiny")["status"]["conditions"]}
    assert (conditions["Ready"], conditions["Autoscaled"]) == ("Idle", "Idle")
    started_s = time.monotonic()
    lines = await asyncio.to_thread(stream, cluster)
    took_s = time.monotonic() - started_s
    print(f"an answer from no engine: after {took_s:.1f} s, {lines.count(COMMENT)} comments")
    # The first one comes after ten seconds, and an emulated engine may have started by then.
    assert COMMENT in lines or took_s < 15.0
    assert lines[-1] == "data: [DONE]"
    assert sum(line.startswith("data: {") for line in lines) >= 8
    # The kubelet looks every two seconds whether it is ready.
    await wait(cluster, "the engine counts as ready", serves(cluster, 1))
    await wait(cluster, "no engine is left again", serves(cluster, 0))


# As in docs/guides/autoscaling.md, but for its bounds and for how long it waits before engines leave.
HPA = {
    "apiVersion": "autoscaling/v2",
    "kind": "HorizontalPodAutoscaler",
    "metadata": {"name": "tiny", "namespace": NAMESPACE},
    "spec": {
        "scaleTargetRef": {"apiVersion": "sluice.dev/v1alpha1", "kind": "ServingCluster", "name": "tiny"},
        "minReplicas": 1,
        "maxReplicas": 3,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}},
        "metrics": [
            {
                "type": "External",
                "external": {
                    "metric": {"name": metric, "selector": {"matchLabels": {"service": service}}},
                    "target": {"type": "AverageValue", "averageValue": "4"},
                },
            }
            for metric, service in (
                ("sluice_engine_queued_requests", names.name_engine_service("tiny")),
                ("sluice_requests_waiting", "tiny-router-control"),
            )
        ],
    },
}


async def test_an_hpa_brings_engines_by_what_is_queued_and_takes_them_away(
    watched: PodCluster, testbed: Testbed
) -> None:
    cluster = watched
    await asyncio.to_thread(cluster.edit, autoscaling={"mode": "Disabled"})
    await wait(cluster, "the manifest's engine", serves(cluster, 1))
    with run_stand_in_adapter(cluster, testbed.settings.address) as queues:
        cluster.client.apply(HPA)
        async with keep_asking(cluster, MOST):
            await wait(cluster, "three engines for what is queued", serves(cluster, 3))
        await wait(cluster, "one engine once nothing is", serves(cluster, 1))
        await asyncio.to_thread(cluster.kubectl, "delete", "hpa", "tiny")
    print(f"what the HPA was told: {queues}")
    # Routers hold next to nothing back while an engine serves: what waits, waits there.
    assert max(queues["sluice_engine_queued_requests"]) > 8
    # It wrote to the scale alone; the operator wrote nothing.
    writers = cluster.list_spec_writers()
    assert writers <= {"kubectl-client-side-apply", "kubectl-patch", "kube-controller-manager"}


COMMENT = ": waiting for an engine"


def stream(cluster: PodCluster) -> list[str]:
    """Streams an answer of eight tokens; returns all lines that are not empty."""
    address = cluster.read("service/tiny-router")["spec"]["clusterIP"]
    body = {"model": "tiny", "stream": True, "max_tokens": 8, "ignore_eos": True, "prompt": "Hello"}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{address}:8000/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = [line.decode().strip() for line in answer]
    return [line for line in lines if line]
