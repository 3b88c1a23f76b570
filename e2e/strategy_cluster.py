"""Two engines under one strategy after the other, and load alone that shows what each does."""

from __future__ import annotations

import asyncio
import copy
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from cluster import Client, Cluster, Result, run_cluster
from test_exactness import check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from workload import Answer, Request


# Of 32 tokens: little KV, so that one engine has no room for all streams of a test.
NUM_BLOCKS = 150
PORTS = "25200-25699"
HTTP_PORT = 25700


@contextmanager
def run_two_engines(directory: Path, example: dict[str, Any], models: Path) -> Iterator[Cluster]:
    """Run the example with two engines, one of them P-heavy, and little KV."""
    manifest = copy.deepcopy(example)
    manifest["metadata"]["name"] = "two-engines"
    spec = manifest["spec"]
    spec.update(replicas=2, prefillHeavy=1)
    spec["slo"] = {"ttftMilliseconds": 600_000, "tpotMilliseconds": 60_000}
    spec["engine"].update(maxModelLen=4096, extraArgs=[f"--num-gpu-blocks-override={NUM_BLOCKS + 1}"])
    spec["router"].update(replicas=1, service={"port": HTTP_PORT})
    with run_cluster(directory, manifest, models=models, ports=PORTS) as cluster:
        cluster.wait_ready()
        yield cluster


def use_strategy(cluster: Cluster, strategy: str) -> None:
    """Edit the strategy, and wait until every engine has taken the plan."""
    if cluster.manifest["spec"]["strategy"] == strategy:
        return
    cluster.edit_plan(lambda spec: spec.update(strategy=strategy))


async def read_counter(cluster: Cluster, name: str, labels: str) -> int:
    """Read a counter of the router."""
    async with aiohttp.ClientSession() as session, session.get(f"{cluster.url('router-0')}/metrics") as answer:
        pattern = rf"^{name}\{{{labels}\}} (.+)$"
        return sum(int(float(value)) for value in re.findall(pattern, await answer.text(), re.MULTILINE))


# Events of a strategy that load alone shall bring about, and how often the same load is tried: on a busy machine fewer
# requests run at the same moment.
WANTED_EVENTS = 20
MOST_ROUNDS = 10


async def ask_until_seen(
    cluster: Cluster,
    asked: Sequence[tuple[Request, Answer]],
    num_streams: int,
    count: Callable[[], Awaitable[int]],
    ttft_ms: Callable[[Request], int] | None = None,
) -> int:
    """Ask all, again until ``count`` has grown by ``WANTED_EVENTS``; return by how much it has."""
    before = await count()
    for _ in range(MOST_ROUNDS):
        await ask_all(cluster, asked, num_streams, ttft_ms)
        if (seen := await count() - before) >= WANTED_EVENTS:
            break
    return seen


async def ask_all(
    cluster: Cluster,
    asked: Sequence[tuple[Request, Answer]],
    num_streams: int,
    ttft_ms: Callable[[Request], int] | None = None,
) -> list[Result]:
    """Ask, so many at a time, and check that every token is stock vLLM's; ``ttft_ms`` gives TTFT objectives."""
    open_ = asyncio.Semaphore(num_streams)

    async def ask(client: Client, request: Request) -> Result:
        async with open_:
            return await client.generate(request, ttft_slo_ms=0 if ttft_ms is None else ttft_ms(request))

    async with cluster.client() as client:
        results = await asyncio.gather(*(ask(client, request) for request, _ in asked))
    for result, (_, answer) in zip(results, asked, strict=True):
        check(result, answer)
    return results
