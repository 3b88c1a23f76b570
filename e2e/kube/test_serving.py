"""Sluice as users meet it: `helm install`, `kubectl apply`, edits while streams run.

Chart, operator, routers, engines and vLLM are real, in pods under Pod Security ``restricted``. Every stream has the
tokens of stock vLLM. All tests share one installation and one cluster: each finds them whole, and leaves them so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
from conftest import FAILED
from examples.tiny_model import RECIPE, make_tiny_model
from kubectl_cluster import wait_for
from pod_cluster import MODELS, EditTimes, PodCluster, Status, list_sizes
from pod_streams import NUM_LANES, REST_S, STREAM_S, resume_while, stream_while
from release import DEFINITION, RESTRICTED, Release, make_next_chart
from testbed.settings import NODE_NAME, ROOT
from workload import Request, answers, make_prompt

from sluice.v1 import control_pb2, plan_pb2, router_pb2
from sluice_operator.api.labels import MODEL_LABEL
from sluice_operator.api.ports import HTTP_PORT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from testbed.client import Client
    from workload import Answer

    Known = list[tuple[Request, Answer]]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NAMESPACE = "serving"
P, D = plan_pb2.ROLE_PREFILL_HEAVY, plan_pb2.ROLE_DECODE_HEAVY
# A reliable p99 needs more edits than CI has time for, and rare faults of resumed answers more kills.
NUM_ROUTER_KILLS = int(os.environ.get("SLUICE_ROUTER_KILLS", "4"))
NUM_TIMED_EDITS = int(os.environ.get("SLUICE_TIMED_EDITS", "12"))


@pytest.fixture(scope="module")
def served(client: Client, release: Release) -> Iterator[PodCluster]:
    """The cluster, in a namespace under Pod Security ``restricted``."""
    assert release.is_installed()
    make_tiny_model(MODELS / "tiny")
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}})
    made = PodCluster(client, NAMESPACE)
    started_s = time.monotonic()
    release.begin(made)
    print(f"from `kubectl apply` to two engines and two routers that serve: {time.monotonic() - started_s:.0f} s")
    yield made
    started_s = time.monotonic()
    made.remove()
    print(f"from `kubectl delete` to the end of all pods: {time.monotonic() - started_s:.0f} s")


@pytest.fixture
def cluster(served: PodCluster, release: Release, request: pytest.FixtureRequest) -> Iterator[PodCluster]:
    """The cluster, whole before and after each test."""
    served.wait_whole()
    yield served
    if request.node.stash.get(FAILED, False):
        print(release.describe(), served.describe(), sep="\n")
    if not release.is_installed():
        release.install()
    served.reset()
    served.wait_whole()


def count_roles(status: Status) -> tuple[int, int]:
    roles = [engine.role for engine in status.engines]
    return roles.count(P), roles.count(D)


def test_helm_test_passes(release: Release) -> None:
    assert "Succeeded" in release.test()
    assert len(release.pods()) == 2


def test_the_example_is_served(cluster: PodCluster) -> None:
    cluster.kubectl("wait", "--for=condition=Ready", "--timeout=5s", "slc/tiny")
    columns = cluster.kubectl("get", "slc", "tiny").splitlines()[1].split()
    assert columns[:5] == ["tiny", "True", "2", "1", "1"]
    # Its pods carry no token for the API server.
    pods = [*cluster.engines.values(), *cluster.routers.values()]
    assert len(pods) == 4
    assert not any(pod["spec"].get("automountServiceAccountToken", True) for pod in pods)
    assert {pod["spec"]["nodeName"] for pod in pods} == {"real"}


def test_a_pod_streams_a_chat_through_the_service_by_its_name(cluster: PodCluster) -> None:
    lines = cluster.chat()
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line) for line in lines[:-1]]
    assert len(pieces) > 1
    assert pieces[-1]["choices"][0]["finish_reason"] in ("length", "stop")


Edit = tuple[dict[str, Any], "Callable[[Status], bool]", list[int]]
# Each edit, its effect on a router's status, and the chunk sizes that the engines' metrics then show.
EDITS: dict[str, Edit] = {
    "ratio": ({"prefillHeavy": 2}, lambda s: count_roles(s) == (2, 0), [512, 512]),
    "prefill-heavy chunk": ({"chunkSizes": {"prefillHeavy": 96}}, lambda s: list_sizes(s) == [64, 96], [64, 96]),
    "decode-heavy chunk": ({"chunkSizes": {"decodeHeavy": 200}}, lambda s: list_sizes(s) == [200, 512], [200, 512]),
    "no prompts on D-heavy": ({"chunkSizes": {"decodeHeavy": 0}}, lambda s: list_sizes(s) == [0, 512], [0, 512]),
    "aggregated": ({"strategy": "Aggregated"}, lambda s: list_sizes(s) == [512, 512], [512, 512]),
    "disaggregated": ({"strategy": "Disaggregated"}, lambda s: list_sizes(s) == [0, 2048], [0, 2048]),
    "objectives": (
        {"slo": {"ttftMilliseconds": 900, "tpotMilliseconds": 50}},
        lambda s: list_sizes(s) == [64, 512],
        [64, 512],
    ),
    "parameters": (
        {"parameters": {"watermarkPercent": 50, "earlyRejection": "Random"}},
        lambda s: list_sizes(s) == [64, 512],
        [64, 512],
    ),
}


@pytest.mark.parametrize("name", EDITS)
async def test_a_live_edit_replaces_no_pod_and_breaks_no_stream(cluster: PodCluster, known: Known, name: str) -> None:
    edit, is_reached, sizes = EDITS[name]
    before = cluster.identify("engine"), cluster.identify("router")

    def act() -> EditTimes:
        times = cluster.time_edit(is_reached, **edit)
        cluster.wait_chunk_sizes(sizes)
        return times

    times, fared = await stream_while(cluster, known, act)
    print(f"{name}: {times}; streams: {dict(fared)}")
    assert (cluster.identify("engine"), cluster.identify("router")) == before
    # No status has objectives or parameters: the decisions on the next request have.
    if name == "objectives":
        admitted = (await decide(cluster, name))["admitted"]
        assert (admitted["ttft_slo_s"], admitted["tpot_slo_s"]) == (0.9, 0.05)
    if name == "parameters":
        assert (await decide(cluster, name, ttft_slo_ms=1))["placement"]["decision"]["reason"] == "random"


async def decide(cluster: PodCluster, name: str, *, ttft_slo_ms: int = 0) -> dict[str, dict[str, Any]]:
    """Asks for one token to a long prompt; returns what the router decided, by event."""
    prompt = make_prompt(1500, random.Random(1))
    request = Request(name=name, prompt_token_ids=prompt, sampling={"temperature": 0.0, "max_tokens": 1})
    async with cluster.connect() as client:
        await client.generate(request, ttft_slo_ms=ttft_slo_ms)
    events = await asyncio.to_thread(cluster.explain, request.name)
    return {event["event"]: event for event in events}


async def test_every_one_of_many_edits_reaches_the_engines(cluster: PodCluster, known: Known) -> None:
    before = cluster.identify("engine"), cluster.identify("router")

    def act() -> list[EditTimes]:
        times = []
        for number in range(NUM_TIMED_EDITS):
            size = 96 + 16 * (number % 2)
            reached = [64, size]
            times.append(
                cluster.time_edit(
                    lambda s, reached=reached: list_sizes(s) == reached, chunkSizes={"prefillHeavy": size}
                )
            )
        cluster.wait_chunk_sizes(reached)
        return times

    times, fared = await stream_while(cluster, known, act)
    print(f"{len(times)} edits of a slider; streams: {dict(fared)}")
    for step in ("accepted_s", "pushed_s", "in_force_s"):
        cuts = statistics.quantiles(map(attrgetter(step), times), n=100, method="inclusive")
        print(f"{step} from the request to the API server: p50 {cuts[49]:.3f}, p90 {cuts[89]:.3f}, p99 {cuts[98]:.3f}")
    assert len(times) == NUM_TIMED_EDITS
    assert (cluster.identify("engine"), cluster.identify("router")) == before


async def test_an_objective_is_in_force_for_the_next_request(cluster: PodCluster, known: Known) -> None:
    request, _ = known[0]

    async def is_met() -> bool:
        async with cluster.connect() as client:
            prompt = router_pb2.TokenIds(values=request.prompt_token_ids)
            sampling = request.to_proto()
            sampling.max_tokens = 1
            asked = router_pb2.GenerateRequest(token_ids=prompt, sampling=sampling)
            deltas = [delta async for delta in client.api.Generate(asked)]
        return bool(deltas[-1].usage.is_slo_met)

    # A request keeps the objective that it was admitted with: an hour is met, a millisecond is not.
    cluster.time_edit(lambda _: True, slo={"ttftMilliseconds": 600000, "tpotMilliseconds": 60000})
    assert [await is_met() for _ in range(8)] == [True] * 8
    cluster.time_edit(lambda _: True, slo={"ttftMilliseconds": 1})
    assert [await is_met() for _ in range(8)] == [False] * 8


async def test_engines_go_and_come_while_streams_run(cluster: PodCluster, known: Known) -> None:
    before = cluster.identify("engine")

    def act() -> None:
        cluster.kubectl("scale", "slc/tiny", "--replicas=1")
        cluster.wait_for(lambda: len(cluster.engines) == 1, "the end of an engine")
        cluster.wait_ready("engine")
        assert cluster.identify("engine") < before
        cluster.kubectl("scale", "slc/tiny", "--replicas=2")
        cluster.wait_for(lambda: len(cluster.engines) == 2, "another engine")
        cluster.wait_ready("engine")

    _, fared = await stream_while(cluster, known, act)
    print(f"scaled to one engine and back: {dict(fared)}")
    assert len(cluster.identify("engine") & before) == 1


async def test_clients_do_not_notice_a_deleted_engine_pod(cluster: PodCluster, known: Known) -> None:
    """A spec that is refused meanwhile keeps the new pod from nothing: what was accepted before is in force for it."""
    before = set(cluster.engines)
    victim = next(iter(cluster.engines.values()))["metadata"]["name"]

    def act() -> None:
        cluster.edit(prefillHeavy=2, engine={"podTemplate": {"spec": {"hostNetwork": True}}})
        cluster.wait("SpecValid", "PodTemplateRefused")
        cluster.kubectl("delete", "pod", victim, "--timeout=90s")
        cluster.wait_ready("engine")
        cluster.wait_for(
            lambda: all(
                {engine.engine_id for engine in status.engines} == set(cluster.engines)
                and count_roles(status) == (1, 1)
                for status in cluster.statuses()
            ),
            "the new engine beside the other one",
        )
        cluster.wait("Degraded", "SpecInvalid")

    _, fared = await stream_while(cluster, known, act)
    print(f"deleted an engine pod: {dict(fared)}")
    assert len(set(cluster.engines) & before) == 1


async def test_clients_do_not_notice_a_killed_engine_core(cluster: PodCluster, known: Known) -> None:
    uid, pod = next(iter(cluster.engines.items()))
    # Every process in the container but PID 1 and the one that kills.
    kill = (
        "import os, signal; [os.kill(int(p), signal.SIGKILL) for p in os.listdir('/proc')"
        " if p.isdecimal() and int(p) not in (1, os.getpid())]"
    )

    def restarts() -> int:
        return int(cluster.engines[uid]["status"]["containerStatuses"][0]["restartCount"])

    def act() -> None:
        cluster.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", kill)
        cluster.wait_for(lambda: restarts() == 1, "the container's restart")
        cluster.wait_ready("engine")

    _, fared = await stream_while(cluster, known, act)
    print(f"killed an engine's core: {dict(fared)}")


async def test_a_router_pod_that_ends_finishes_its_streams(cluster: PodCluster, known: Known) -> None:
    before = set(cluster.routers)
    victim = next(iter(cluster.routers.values()))["metadata"]["name"]

    def act() -> None:
        cluster.kubectl("delete", "pod", victim, "--timeout=90s")
        cluster.wait_ready("router")

    _, fared = await stream_while(cluster, known, act)
    print(f"ended a router pod: {dict(fared)}")
    assert len(set(cluster.routers) & before) == 1


async def test_streams_of_a_killed_router_end_with_an_error_and_others_go_on(cluster: PodCluster, known: Known) -> None:
    before = set(cluster.routers)
    victim = next(iter(cluster.routers.values()))["metadata"]["name"]

    def act() -> None:
        cluster.kubectl("delete", "pod", victim, "--force", "--grace-period=0")
        cluster.wait_for(lambda: len(set(cluster.routers) - before) == 1, "another pod")
        cluster.wait_ready("router")

    _, fared = await stream_while(cluster, known, act, may_break=True)
    print(f"killed a router pod: {dict(fared)}")


@pytest.mark.timeout(600 + 30 * NUM_ROUTER_KILLS)
async def test_answers_go_on_at_another_router_pod_when_theirs_is_killed(cluster: PodCluster, known: Known) -> None:
    """Through the Service, which knows nothing of answers."""

    def act() -> None:
        for _ in range(NUM_ROUTER_KILLS):
            before = set(cluster.routers)
            cluster.kill_router(random.choice(sorted(before)))
            cluster.wait_for(lambda before=before: len(set(cluster.routers) - before) == 1, "another pod")
            cluster.wait_ready("router")

    _, fared = await resume_while(cluster, known, act)
    print(f"killed {NUM_ROUTER_KILLS} router pods: {dict(fared)}")
    assert fared["resumed"] >= NUM_ROUTER_KILLS // 2


async def test_clients_do_not_notice_the_drain_of_a_node(cluster: PodCluster, known: Known) -> None:
    before = {uid: pod["metadata"]["name"] for uid, pod in cluster.engines.items()}

    def act() -> None:
        # As Karpenter does: the node says that it goes, then its pods are evicted as the disruption budget allows.
        with tainted(cluster.client, "karpenter.sh/disrupted"):
            leaving = cluster.wait_for(lambda: find_drained(cluster), "an engine that has handed its work over")
            (staying,) = before.keys() - leaving
            assert set(cluster.engines) == before.keys()
            cluster.wait("Progressing", "Draining")
            effective = cluster.read("slc/tiny")["status"]["effective"]
            assert (effective["prefillHeavy"] + effective["decodeHeavy"], effective["draining"]) == (1, 1)
            assert cluster.evict(before[leaving.pop()]) == 201
            assert cluster.evict(before[staying]) == 429
        # The successor needs a node that takes pods. This grace is shorter than a drain may be, as where a node ends.
        wait_for(lambda: cluster.evict(before[staying], grace_s=20) == 201, "the other one's turn", cluster.patience_s)
        cluster.wait_for(lambda: not before.keys() & set(cluster.engines), "the end of both")
        cluster.wait_ready("engine")

    _, fared = await stream_while(cluster, known, act)
    print(f"drained the node of both engines: {dict(fared)}")


@contextmanager
def tainted(client: Client, key: str) -> Iterator[None]:
    """Keeps new pods off this machine, for the length of the block."""
    client.kubectl("taint", "node", NODE_NAME, f"{key}:NoSchedule")
    try:
        yield
    finally:
        client.kubectl("taint", "node", NODE_NAME, f"{key}:NoSchedule-")


def find_drained(cluster: PodCluster) -> set[str]:
    """Finds engines that have drained, by every router."""
    drained = [
        {engine.engine_id for engine in status.engines if engine.state == control_pb2.ENGINE_STATE_DRAINED}
        for status in cluster.statuses()
    ]
    return set.intersection(*drained) if drained else set()


def keep_one(pods: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    return pods if len(pods) == 1 else set()


async def test_a_wrong_image_stops_the_rollout_and_is_rolled_back(cluster: PodCluster, known: Known) -> None:
    before = cluster.identify("engine")

    def act() -> None:
        # Nothing listens at this address, so the pull fails whatever the network.
        cluster.edit(engine={"image": "127.0.0.1:9/absent:1"})
        cluster.wait("Progressing", "RolloutStopped")
        cluster.wait("Degraded", "ImagePullBackOff")
        # The old engine that the new one replaces may still be ending.
        kept = wait_for(
            lambda: keep_one(cluster.identify("engine") & before), "the end of one engine", cluster.patience_s
        )
        cluster.kubectl("wait", "--for=condition=Ready", "--timeout=5s", "slc/tiny")
        cluster.edit(engine={"image": None})
        cluster.wait_ready("engine")
        assert kept < cluster.identify("engine")

    _, fared = await stream_while(cluster, known, act)
    print(f"a wrong image, and back: {dict(fared)}")


async def test_an_upgrade_of_the_chart_and_its_crd_restarts_no_engine_or_router(
    cluster: PodCluster, release: Release, known: Known, tmp_path: Path
) -> None:
    before = cluster.identify("engine"), cluster.identify("router")
    operators = release.pods()
    chart = make_next_chart(tmp_path)

    def knows_next() -> bool:
        fields = cluster.kubectl("explain", "slc.spec")
        assert "chunkSizes" in fields
        return "What a later version of Sluice knows." in fields and "NEXT" in cluster.kubectl("get", "slc")

    def act() -> None:
        assert not knows_next()
        release.upgrade(chart)
        assert knows_next()
        wait_for(lambda: not release.pods() & operators, "the end of the old operators")
        cluster.time_edit(lambda s: list_sizes(s) == [64, 96], chunkSizes={"prefillHeavy": 96})
        release.roll_back()
        assert not knows_next()
        cluster.time_edit(lambda s: list_sizes(s) == [64, 512], chunkSizes={"prefillHeavy": 512})

    _, fared = await stream_while(cluster, known, act)
    print(f"upgraded the operator, and back: {dict(fared)}")
    assert (cluster.identify("engine"), cluster.identify("router")) == before


async def test_uninstalling_the_chart_leaves_clusters_running(
    cluster: PodCluster, release: Release, client: Client, known: Known
) -> None:
    before = cluster.identify("engine"), cluster.identify("router")

    def act() -> str:
        said = release.uninstall()
        wait_for(lambda: not release.pods(), "the end of the operators")
        # Streams go on without an operator.
        cluster.edit(chunkSizes={"prefillHeavy": 96})
        return said

    said, fared = await stream_while(cluster, known, act)
    print(f"uninstalled: {dict(fared)}")
    assert f"[CustomResourceDefinition] {DEFINITION}" in said
    assert json.loads(client.kubectl("get", "slc", "-A", "-o", "json"))["items"]
    assert cluster.chunk_sizes() == [64, 512]

    def install() -> None:
        release.install()
        cluster.wait("Progressing", "Settled")

    _, fared = await stream_while(cluster, known, install)
    print(f"installed again: {dict(fared)}")
    cluster.wait_chunk_sizes([64, 96])
    assert (cluster.identify("engine"), cluster.identify("router")) == before


async def test_clients_do_not_notice_a_roll_of_the_engines(served: PodCluster, known: Known) -> None:
    """KV blocks of 32 and of 64 tokens are incompatible, so the last old engine's requests are computed anew.

    It leaves the cluster changed, for the next test.
    """
    served.wait_whole()
    engines, routers = set(served.engines), served.identify("router")

    def act() -> None:
        served.edit(
            chunkSizes={"prefillHeavy": 4096}, engine={"maxBatchTokens": 4096, "extraArgs": ["--block-size=64"]}
        )
        served.wait_for(lambda: not engines & set(served.engines), "the end of the old engines")
        served.wait_ready("engine")

    _, fared = await stream_while(served, known, act)
    print(f"rolled both engines: {dict(fared)}")
    served.wait_whole()
    assert served.identify("router") == routers
    served.wait_chunk_sizes([64, 4096])
    (fingerprint,) = {engine.fingerprint for status in served.statuses() for engine in status.engines}
    assert "/block64/" in fingerprint


async def test_one_model_replaces_another_and_each_answer_is_one_models(served: PodCluster, known: Known) -> None:
    """It leaves the cluster with another model: no test follows."""
    served.wait_whole()
    make_tiny_model(MODELS / "other", replace(RECIPE, seed=2))
    few = known[:12]
    others = answers(MODELS / "other", [request for request, _ in few], ROOT / ".sluice" / "e2e")
    asked = list(zip(few, others, strict=True))
    assert all(old.token_ids != new.token_ids for (_, old), new in asked)
    before = set(served.engines)
    assert await asyncio.to_thread(read_model_name, served) == "tiny"
    is_over = asyncio.Event()

    async def stream(number: int, has_begun: asyncio.Event) -> list[str]:
        """Sends one request after the other; returns whose tokens each answer has."""
        models: list[str] = []
        async with served.connect() as client:
            for (request, old), new in itertools.cycle(asked[number::NUM_LANES]):
                result = await asyncio.wait_for(client.generate(request), STREAM_S)
                assert result.token_ids in (old.token_ids, new.token_ids), f"{request.name}: neither model's tokens"
                models.append("old" if result.token_ids == old.token_ids else "new")
                has_begun.set()
                if is_over.is_set() and models[-1] == "new":
                    return models
                await asyncio.sleep(REST_S)
        raise AssertionError("a cycle has no end")

    def act() -> None:
        source = {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}
        served.edit(model={"name": "other", "servedName": "other", "source": source})
        served.wait_for(lambda: not set(served.engines) & before, "the end of the old model's engines")
        served.wait_settled()

    begun = [asyncio.Event() for _ in range(NUM_LANES)]
    lanes = [asyncio.create_task(stream(number, begun[number])) for number in range(NUM_LANES)]
    await asyncio.gather(*(event.wait() for event in begun))
    try:
        await asyncio.to_thread(act)
    finally:
        is_over.set()
    for models in await asyncio.gather(*lanes):
        print(f"{models.count('old')} answers of the old model, then {models.count('new')} of the new one")
        assert models == sorted(models, key=["old", "new"].index)
        assert set(models) == {"old", "new"}
    await asyncio.to_thread(served.wait_whole)
    assert await asyncio.to_thread(read_model_name, served) == "other"
    labels = {pod["metadata"]["labels"][MODEL_LABEL] for pod in [*served.engines.values(), *served.routers.values()]}
    assert len(labels) == 1


def read_model_name(cluster: PodCluster) -> str:
    """The model's name for clients, as the Service has it."""
    address = cluster.read("service/tiny-router")["spec"]["clusterIP"]
    with urllib.request.urlopen(f"http://{address}:{HTTP_PORT}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])
