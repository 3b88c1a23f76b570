"""Streams go on at another router after theirs was killed: every token once and in order, as stock vLLM makes them."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING

import httpx
import pytest
from resuming_streams import ResumingStream

if TYPE_CHECKING:
    from cluster import Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

ROUTERS = ("router-0", "router-1")
NUM_STREAMS = 16


async def wait_open(streams: list[tuple[ResumingStream, Answer]], count: int) -> None:
    """Waits until so many streams have a token, and still half of their answer to come."""

    def count_open() -> int:
        return sum(0 < len(got.token_ids) < len(answer.token_ids) // 2 for got, answer in streams)

    async with asyncio.timeout(60):
        while count_open() < count:  # noqa: ASYNC110  streams have no event
            await asyncio.sleep(0.005)


async def test_streams_go_on_at_another_router_when_theirs_is_killed(
    cluster: Cluster, known_long: list[tuple[Request, Answer]]
) -> None:
    # On a busy machine short answers end before the kill.
    longest = [(request, answer) for request, answer in known_long if len(answer.token_ids) > 200]
    known = random.Random(4).sample(longest, NUM_STREAMS)
    streams = [ResumingStream(request) for request, _ in known]
    urls = [cluster.url(name) for name in ROUTERS]
    addresses = [cluster.address(name) for name in ROUTERS]
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        # The first of each kind begins at the router that dies, the second at the one that lives.
        tasks = [
            asyncio.create_task(
                stream.run_http(client, urls if index % 4 < 2 else urls[::-1])
                if index % 2
                else stream.run_grpc(lambda turn=index % 4 < 2: addresses if turn else addresses[::-1])
            )
            for index, stream in enumerate(streams)
        ]
        dying = [(streams[index], known[index][1]) for index in range(NUM_STREAMS) if index % 4 < 2]
        await wait_open(dying, len(dying) // 2 + 1)
        before = cluster.pid(ROUTERS[0])
        cluster.kill(ROUTERS[0], signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*tasks), 90)
    for stream, (_, answer) in zip(streams, known, strict=True):
        stream.check(answer)
    num_resumed = sum(stream.num_resumed for stream in streams)
    print(f"{num_resumed} streams went on at another router")
    assert num_resumed >= NUM_STREAMS // 4
    await asyncio.to_thread(cluster.wait_router_replaced, ROUTERS[0], before)
