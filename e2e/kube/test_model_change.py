"""One model replaces another in real pods while clients stream: each answer is one model's from beginning to end."""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.request
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import workload
from examples.tiny_model import RECIPE, make_tiny_model
from pod_cluster import MODELS, PodCluster, make_pods_manifest
from release import RESTRICTED
from testbed.settings import ROOT

from sluice_operator.api.labels import MODEL_LABEL
from sluice_operator.api.ports import HTTP_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from release import Release
    from testbed.client import Client
    from workload import Answer, Request

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NAMESPACE = "replaced"
NUM_LANES = 3
STREAM_S = 120.0
# Clients read at a limited pace: otherwise streams would take both cores, on which engines have to start.
REST_S = 0.5


@pytest.fixture(scope="module")
def cluster(client: Client, release: Release) -> Iterator[PodCluster]:
    make_tiny_model(MODELS / "tiny")
    make_tiny_model(MODELS / "other", replace(RECIPE, seed=2))
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}})
    made = PodCluster(client, NAMESPACE, make_pods_manifest())
    release.begin(made)
    yield made
    made.remove()


async def stream(
    cluster: PodCluster, known: list[tuple[Request, Answer, Answer]], has_begun: asyncio.Event, is_over: asyncio.Event
) -> list[str]:
    """Sends one request after the other; returns whose tokens each answer has."""
    models = []
    async with cluster.connect() as client:
        for request, old, new in itertools.cycle(known):
            result = await asyncio.wait_for(client.generate(request), STREAM_S)
            assert result.token_ids in (old.token_ids, new.token_ids), f"{request.name}: neither model's tokens"
            models.append("old" if result.token_ids == old.token_ids else "new")
            has_begun.set()
            if is_over.is_set() and models[-1] == "new":
                return models
            await asyncio.sleep(REST_S)
    raise AssertionError("a cycle has no end")


def read_name(cluster: PodCluster) -> str:
    """The model's name for clients, as the Service has it."""
    address = cluster.read("service/tiny-router")["spec"]["clusterIP"]
    with urllib.request.urlopen(f"http://{address}:{HTTP_PORT}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


async def test_streams_see_one_model_each_and_no_gap(cluster: PodCluster) -> None:
    requests = workload.make_requests(12)
    olds, news = (workload.answers(MODELS / name, requests, ROOT / ".sluice" / "e2e") for name in ("tiny", "other"))
    known = list(zip(requests, olds, news, strict=True))
    assert all(old.token_ids != new.token_ids for _, old, new in known)
    before = set(cluster.engines)
    assert await asyncio.to_thread(read_name, cluster) == "tiny"

    def act() -> None:
        source = {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}
        cluster.edit(model={"name": "other", "servedName": "other", "source": source})
        cluster.wait_for(lambda: not set(cluster.engines) & before, "the end of the old model's engines")
        cluster.wait_settled()

    is_over = asyncio.Event()
    begun = [asyncio.Event() for _ in range(NUM_LANES)]
    lanes = [
        asyncio.create_task(stream(cluster, known[number::NUM_LANES], begun[number], is_over))
        for number in range(NUM_LANES)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    try:
        await asyncio.to_thread(act)
    finally:
        is_over.set()
    for models in await asyncio.gather(*lanes):
        print(f"{models.count('old')} answers of the old model, then {models.count('new')} of the new one")
        assert models == sorted(models, key=["old", "new"].index)
        assert set(models) == {"old", "new"}
    await asyncio.to_thread(cluster.wait_whole)
    assert await asyncio.to_thread(read_name, cluster) == "other"
    labels = {pod["metadata"]["labels"][MODEL_LABEL] for pod in [*cluster.engines.values(), *cluster.routers.values()]}
    assert len(labels) == 1
