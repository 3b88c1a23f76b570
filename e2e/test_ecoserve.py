"""EcoServe on real engines: load alone makes engines change between prefills and decodes. Tokens are stock vLLM's."""

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

PORTS = "26200-26699"
HTTP_PORT = 26700
NUM_REQUESTS = 96
NUM_STREAMS = 12  # at a time
NUM_BLOCKS = 150  # of 32 tokens: one engine has no room for all streams


@pytest.fixture(scope="module")
def ecoserve(tmp_path_factory: pytest.TempPathFactory, example: dict[str, Any], models: Path) -> Iterator[Cluster]:
    """Two engines with little KV, in one macro instance."""
    manifest = json.loads(json.dumps(example))
    manifest["metadata"]["name"] = "ecoserve"
    spec = manifest["spec"]
    spec.update(replicas=2, prefillHeavy=1, strategy="EcoServe")
    spec["slo"] = {"ttftMilliseconds": 600_000, "tpotMilliseconds": 60_000}
    spec["engine"].update(maxModelLen=4096, extraArgs=[f"--num-gpu-blocks-override={NUM_BLOCKS + 1}"])
    spec["router"].update(replicas=1, service={"port": HTTP_PORT})
    with run_cluster(tmp_path_factory.mktemp("ecoserve"), manifest, models=models, ports=PORTS) as cluster:
        cluster.wait_ready()
        yield cluster


async def count_switches(cluster: Cluster) -> dict[str, int]:
    """Phase switches of each engine since its start."""
    found = {}
    async with aiohttp.ClientSession() as session:
        for name, record in cluster.processes("engine").items():
            async with session.get(f"http://127.0.0.1:{record['ports']['metrics']}/metrics") as answer:
                (value,) = re.findall(r"^sluice_engine_phase_switches_total (.+)$", await answer.text(), re.MULTILINE)
                found[name] = int(float(value))
    return found


async def test_load_alone_switches_phases_and_every_token_is_exact(
    ecoserve: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    asked = known[:NUM_REQUESTS]
    before = await count_switches(ecoserve)
    open_ = asyncio.Semaphore(NUM_STREAMS)

    async def ask(client: Client, request: Request) -> Result:
        async with open_:
            return await client.generate(request)

    async with ecoserve.client() as client:
        results = await asyncio.gather(*(ask(client, request) for request, _ in asked))
    for result, (_, answer) in zip(results, asked, strict=True):
        check(result, answer)
    after = await count_switches(ecoserve)
    switches = {name: after[name] - before[name] for name in after}
    print(f"phase switches by engine: {switches}")
    assert sum(switches.values()) >= 20
    ecoserve.wait_idle()
