"""An upgrade of the chart that names another engine image: clusters in real pods take it in turn, under streams.

Engines emulate a GPU. Each cluster has one, and may have a second one while it rolls. Every stream is exact.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from conftest import FAILED
from examples.tiny_model import make_tiny_model
from kubectl_cluster import find_turn, read_images
from pod_cluster import MODELS, PodCluster, make_pods_manifest
from pod_load import keep_asking
from release import LIBRARY, RESTRICTED
from steady_load import Shape
from testbed.helm import CHART
from testbed.product import make_engine_image

if TYPE_CHECKING:
    from collections.abc import Iterator

    from release import Release
    from testbed.client import Client
    from testbed.node import Node

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NEXT_IMAGE = f"{LIBRARY}/sluice-engine:next"
NAMES = ("upgraded-1", "upgraded-2", "upgraded-3")
# Streams of some seconds, so that each engine that leaves has some.
LOAD = Shape(prompt_tokens=300, output_tokens=400, rate_rps=0.3)


@pytest.fixture
def clusters(
    client: Client, node: Node, release: Release, request: pytest.FixtureRequest
) -> Iterator[list[PodCluster]]:
    """Three clusters of one engine and one router each."""
    make_tiny_model(MODELS / "tiny")
    node.load_image(make_engine_image(NEXT_IMAGE))
    made = [PodCluster(client, name, make_manifest()) for name in NAMES]
    for each in made:
        client.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": each.namespace, "labels": RESTRICTED}}
        )
    with ThreadPoolExecutor() as pool:
        list(pool.map(release.begin, made))
    yield made
    if request.node.stash.get(FAILED, False):
        print(release.describe(), *(each.describe() for each in made), sep="\n")
    with ThreadPoolExecutor() as pool:
        list(pool.map(PodCluster.remove, made))
    release.upgrade(CHART)


def make_manifest() -> dict[str, object]:
    manifest = make_pods_manifest(
        replicas=1, strategy="Aggregated", prefillHeavy=1, rollout={"maxSurge": 1, "maxUnavailable": 0}
    )
    manifest["spec"]["engine"]["emulation"] = {"gpu": "a100-80g", "model": "llama-3-8b"}
    manifest["spec"]["router"]["replicas"] = 1
    return manifest


async def test_clusters_take_the_image_of_an_upgraded_chart_in_turn_and_no_stream_breaks(
    clusters: list[PodCluster], release: Release
) -> None:
    def upgrade() -> None:
        release.upgrade(CHART, f"engineImage={NEXT_IMAGE}")
        for each in clusters:
            each.wait_for(lambda each=each: read_images(each) == {NEXT_IMAGE}, "engines of the new image alone")
            each.wait_settled()

    before = [each.identify("router") for each in clusters]
    async with contextlib.AsyncExitStack() as loads:
        for each in clusters:
            await loads.enter_async_context(keep_asking(each, LOAD))
        await asyncio.to_thread(upgrade)
    turns = sorted(map(find_turn, clusters))
    print(f"first new engine, last one Ready: {turns}")
    assert all(end <= begin for (_, end), (begin, _) in pairwise(turns))
    assert [each.identify("router") for each in clusters] == before
    for each in clusters:
        each.wait_whole()
