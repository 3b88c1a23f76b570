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
from typing import TYPE_CHECKING

import pytest
from conftest import FAILED
from pod_load import keep_asking
from scaled_cluster import LITTLE, MUCH, check_scaling_by_others, read_hpa, run_scaled_cluster, serves, wait
from stand_in_adapter import run_stand_in_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pod_cluster import PodCluster
    from release import Release
    from testbed.client import Client
    from testbed.cluster import Testbed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NAMESPACE = "scaled"
WINDOW_S = 20


@pytest.fixture(scope="module")
def scaled(client: Client, release: Release) -> Iterator[PodCluster]:
    """One engine, which autoscaling may make three."""
    window = {"stabilizationWindowSeconds": WINDOW_S}
    bounds = {"minReplicas": 1, "maxReplicas": 3}
    with run_scaled_cluster(client, release, NAMESPACE, mode="Apply", **bounds, scaleDown=window) as made:
        yield made


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


async def test_an_hpa_brings_engines_by_what_is_queued_and_takes_them_away(
    watched: PodCluster, testbed: Testbed
) -> None:
    cluster = watched
    await asyncio.to_thread(cluster.edit, autoscaling={"mode": "Disabled"})
    await wait(cluster, "the manifest's engine", serves(cluster, 1))
    with run_stand_in_adapter(cluster, testbed.settings.address) as queues:
        await check_scaling_by_others(cluster, read_hpa(NAMESPACE))
    print(f"what the HPA was told: {queues}")
    # Routers hold next to nothing back while an engine serves: what waits, waits there.
    assert max(queues["sluice_engine_queued_requests"]) > 8


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
