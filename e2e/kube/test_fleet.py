"""A fleet in real pods that grows, shrinks, goes back by itself and is deleted, while streams run: each one is exact.

Its model comes from a Hub into a cache on a volume that root made. Engines emulate a GPU, so that six of them fit on
two cores. The tests run in order: each starts from the cluster as the test before left it.
"""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from conftest import FAILED, make_volume
from examples.tiny_model import make_tiny_model
from pod_cluster import CLAIMS, MODELS, PodCluster, make_pods_manifest
from pod_load import keep_asking
from pod_streams import WatchedResult
from release import RESTRICTED
from stand_in_hub import COMMIT, run_stand_in_hub
from steady_load import Shape, expect_tokens, make_request
from testbed.settings import ROOT

from sluice.v1 import plan_pb2
from sluice_operator.kubernetes.kinds import CONFIG_MAPS
from sluice_operator.kubernetes.objects import uid_of
from sluice_operator.planning.plan_store import read_plan
from sluice_operator.resources.pods.termination import compute_grace_period_s

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from release import Release
    from testbed.client import Client
    from testbed.cluster import Testbed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NAMESPACE, MODEL = "fleet", "sluice/tiny"
# Streams of some seconds; and short ones, of which enough end on each engine while it is measured.
LOAD = Shape(prompt_tokens=300, output_tokens=400, rate_rps=0.8)
SHORT = Shape(prompt_tokens=300, output_tokens=60, rate_rps=2.5)
# A token takes about 10 ms on the one, and 37 ms on the other.
FAST, SLOW = {"gpu": "a100-80g", "model": "llama-3-8b"}, {"gpu": "a100-80g", "model": "qwen2.5-32b"}
TPOT_MS = 25


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the cache's volume, as a provisioner makes it: root's, and nobody else may write."""
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o755)
    assert (folder.stat().st_uid, folder.stat().st_gid) == (0, 0)
    return folder


@pytest.fixture(scope="module")
def fleet(client: Client, testbed: Testbed, release: Release, cache: Path) -> Iterator[PodCluster]:
    """Two engines and two routers, these in one pod; the pods fetch the model into the cache."""
    assert release.is_installed()
    make_tiny_model(MODELS / "tiny")
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}})
    with run_stand_in_hub(testbed.settings.address, MODEL, MODELS / "tiny") as endpoint:
        made = PodCluster(client, NAMESPACE, make_fleet_manifest(endpoint), claims={"checkout": CLAIMS["checkout"]})
        volume, claim = make_volume(NAMESPACE, "cache", cache, "ReadWriteMany")
        claim["metadata"]["namespace"] = NAMESPACE
        client.apply(volume, claim)
        release.begin(made)
        yield made
        if made.engines:
            made.remove()


def make_fleet_manifest(endpoint: str) -> dict[str, Any]:
    """Makes the manifest. What fetches the model is in the engine's environment, which pods mount."""
    source = {"huggingFace": {"endpoint": endpoint, "cacheClaimName": "cache"}}
    manifest = make_pods_manifest(prefillHeavy="50%", slo={"ttftMilliseconds": 4000, "tpotMilliseconds": TPOT_MS})
    manifest["spec"]["model"] = {"name": MODEL, "servedName": "tiny", "source": source}
    manifest["spec"]["router"].update(replicas=1, workers=2)
    engine = manifest["spec"]["engine"]
    engine["emulation"] = FAST
    mounts = [{"name": "checkout", "mountPath": str(ROOT), "readOnly": True}]
    engine["podTemplate"]["spec"]["initContainers"] = [
        {"name": name, "volumeMounts": mounts} for name in ("resolve-model", "fetch-model")
    ]
    return manifest


@pytest.fixture
def cluster(fleet: PodCluster, release: Release, request: pytest.FixtureRequest) -> Iterator[PodCluster]:
    yield fleet
    if request.node.stash.get(FAILED, False):
        print(release.describe(), fleet.describe(), sep="\n")


def test_pods_that_are_not_root_fetch_the_model_into_a_volume_that_root_made(cluster: PodCluster, cache: Path) -> None:
    (folder,) = cache.iterdir()
    # The Hub's answer to no revision, the same for every pod.
    assert folder.name == f"sluice--tiny--{COMMIT}--tokenizer"
    assert (folder / "config.json").read_bytes() == (MODELS / "tiny" / "config.json").read_bytes()
    assert (folder / "config.json").stat().st_uid == 65532
    # The image's user writes by its group; nobody else may.
    status = cache.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (0, 65532, 0o2775)
    for pod in (*cluster.engines.values(), *cluster.routers.values()):
        mount = next(item for item in pod["spec"]["containers"][0]["volumeMounts"] if item["mountPath"] == "/model")
        assert mount["readOnly"]


@contextmanager
def watch_plans(cluster: PodCluster) -> Iterator[set[tuple[int, int]]]:
    """Collects, from every plan that is stored, how many engines stay and how many of these are P-heavy."""
    seen: set[tuple[int, int]] = set()
    is_over = threading.Event()
    uid = uid_of(cluster.read("slc/tiny"))
    path = f"{CONFIG_MAPS.root}/namespaces/{cluster.namespace}/{CONFIG_MAPS.plural}/tiny-plan"

    def watch() -> None:
        while not is_over.wait(0.1):
            plan = read_plan(cluster.client.request("GET", path).content, uid).plan
            assert plan is not None
            roles = [part.role for part in plan.engines if not part.is_draining]
            seen.add((len(roles), roles.count(plan_pb2.ROLE_PREFILL_HEAVY)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


async def test_two_engines_become_six_and_two_again_with_both_roles_at_every_moment(cluster: PodCluster) -> None:
    def scale(replicas: int) -> None:
        cluster.kubectl("scale", "slc/tiny", f"--replicas={replicas}")
        cluster.wait_for(lambda: len(cluster.engines) == replicas, f"{replicas} engines")
        cluster.wait_ready("engine")
        cluster.wait("Progressing", "Settled")
        assert cluster.roles.count("p-heavy") == replicas // 2

    before = set(cluster.engines)
    async with keep_asking(cluster, LOAD):
        with watch_plans(cluster) as plans:
            await asyncio.to_thread(scale, 6)
            assert before < set(cluster.engines)
            await asyncio.to_thread(scale, 2)
    print(f"engines, P-heavy ones: {sorted(plans)}")
    # The kernel has given both routers of the pod connections.
    assert [status.num_arrived > 0 for status in cluster.statuses()] == [True, True]
    assert {(2, 1), (6, 3)} <= plans
    assert all(abs(2 * num_prefill_heavy - number) <= 1 for number, num_prefill_heavy in plans)


async def test_a_roll_to_slower_engines_goes_back_by_itself(cluster: PodCluster) -> None:
    before = cluster.identify("engine")
    gate = {"durationSeconds": 20, "minAttainment": "60%", "minRequests": 4, "timeoutSeconds": 600}

    def act() -> None:
        # Requests stay where they are placed: otherwise the faster engines would take them over.
        cluster.edit(strategy="Aggregated")
        cluster.wait("Progressing", "Settled")
        cluster.edit(rollout={"maxSurge": 1, "maxUnavailable": 0, "gate": gate}, engine={"emulation": SLOW})
        cluster.wait_for(lambda: len(cluster.engines) == 3, "a slower engine beside the others")
        cluster.wait("Degraded", "RolledBack")
        cluster.wait_for(lambda: cluster.identify("engine") == before, "the end of the slower engine")

    async with keep_asking(cluster, SHORT):
        await asyncio.to_thread(act)
    conditions = {item["type"]: item["message"] for item in cluster.read("slc/tiny")["status"]["conditions"]}
    print(conditions["Degraded"])
    assert "rollout.gate.minAttainment 60%" in conditions["Degraded"]


async def test_streams_of_a_deleted_cluster_end_whole(cluster: PodCluster) -> None:
    """Its engines' own time is over long before the streams are, and routers allow them 30 s."""

    def shorten_drains() -> None:
        cluster.edit(rollout={"gate": None}, engine={"emulation": FAST, "drainTimeoutSeconds": 1})
        cluster.wait("Progressing", "Settled")
        cluster.wait_for(lambda: all(map(is_short, cluster.engines.values())), "the end of the former engines")
        grace_s = {pod["spec"]["terminationGracePeriodSeconds"] for pod in cluster.engines.values()}
        assert grace_s == {compute_grace_period_s(30)}

    def is_short(pod: dict[str, Any]) -> bool:
        return "--drain-timeout-s 1 " in " ".join(pod["spec"]["containers"][0]["command"])

    await asyncio.to_thread(shorten_drains)
    rng = random.Random(2)
    requests = [make_request(f"last-{number}", LOAD, rng) for number in range(8)]
    begun = [asyncio.Event() for _ in requests]
    results = [WatchedResult(event, request.name) for event, request in zip(begun, requests, strict=True)]
    async with cluster.connect() as client, asyncio.TaskGroup() as tasks:
        for request, result in zip(requests, results, strict=True):
            tasks.create_task(client.generate(request, result=result))
        await asyncio.gather(*(event.wait() for event in begun))
        await asyncio.to_thread(cluster.kubectl, "delete", "slc", "tiny", "--wait=false")
        assert not any(result.finish_reason for result in results)
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == expect_tokens(request, MODELS / "tiny"), request.name
    await asyncio.to_thread(
        cluster.wait_for, lambda: not cluster.engines and not cluster.routers, "the end of the pods"
    )
