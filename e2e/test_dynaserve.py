"""DynaServe on real engines: load alone splits answers between engines. Tokens are stock vLLM's."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from cluster import Result, run_cluster
from test_exactness import check

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster import Client, Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

PORTS = "24600-25099"
HTTP_PORT = 25100
NUM_REQUESTS = 96
NUM_STREAMS = 12  # at a time


@pytest.fixture(scope="module")
def dynaserve(tmp_path_factory: pytest.TempPathFactory, example: dict[str, Any], models: Path) -> Iterator[Cluster]:
    """Two engines."""
    manifest = json.loads(json.dumps(example))
    manifest["metadata"]["name"] = "dynaserve"
    spec = manifest["spec"]
    spec.update(replicas=2, prefillHeavy=1, strategy="DynaServe")
    spec["slo"] = {"ttftMilliseconds": 600_000, "tpotMilliseconds": 60_000}
    spec["router"].update(replicas=1, service={"port": HTTP_PORT})
    with run_cluster(tmp_path_factory.mktemp("dynaserve"), manifest, models=models, ports=PORTS) as cluster:
        cluster.wait_ready()
        yield cluster


async def count_splits(cluster: Cluster) -> int:
    """Moves of the cause ``split`` that are done."""
    async with aiohttp.ClientSession() as session, session.get(f"{cluster.url('router-0')}/metrics") as answer:
        pattern = r'^sluice_moves_total\{cause="split",result="done"\} (.+)$'
        return sum(int(float(value)) for value in re.findall(pattern, await answer.text(), re.MULTILINE))


async def test_load_alone_splits_answers_and_every_token_is_exact(
    dynaserve: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    asked = known[:NUM_REQUESTS]
    before = await count_splits(dynaserve)
    open_ = asyncio.Semaphore(NUM_STREAMS)

    async def ask(client: Client, request: Request) -> Result:
        async with open_:
            return await client.generate(request)

    async with dynaserve.client() as client:
        results = await asyncio.gather(*(ask(client, request) for request, _ in asked))
    for result, (_, answer) in zip(results, asked, strict=True):
        check(result, answer)
    splits = await count_splits(dynaserve) - before
    print(f"splits: {splits}")
    assert splits >= 20
    dynaserve.wait_idle()
