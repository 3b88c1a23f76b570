"""Disaggregated on real engines: finished prefills wait on the prefill engine until the decode engine has room.

Load alone brings the waits about: 64 streams, of which the decode engine has room for a few. Tokens are stock vLLM's.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from cluster import Result
from strategy_cluster import MOST_ROUNDS, NUM_BLOCKS, WANTED_EVENTS, ask_all, use_strategy
from test_exactness import check

if TYPE_CHECKING:
    from cluster import Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

NUM_STREAMS = 64


@pytest.fixture
def disaggregated(two_engines: Cluster) -> Cluster:
    """One prefill and one decode engine."""
    use_strategy(two_engines, "Disaggregated")
    return two_engines


async def list_stories(cluster: Cluster, results: list[Result]) -> list[list[dict[str, Any]]]:
    """The router's decisions about each request."""
    stories = []
    async with aiohttp.ClientSession() as session:
        for result in results:
            async with session.get(f"{cluster.url()}/debug/requests/{result.name}") as answer:
                assert answer.status == 200
                stories.append((await answer.json())["events"])
    return stories


def has_waited(story: list[dict[str, Any]]) -> bool:
    """Whether a finished prefill found no room at once."""
    kept_s = [event["at_s"] for event in story if event["event"] == "kept"]
    granted_s = [event["at_s"] for event in story if event["event"] == "granted"]
    asked_s = [event["at_s"] for event in story if event["event"] == "grant_asked"]
    return bool(kept_s and granted_s) and (asked_s[0] > kept_s[0] or len(asked_s) > 1)


async def test_prefills_wait_for_room_on_the_decode_engine_and_every_token_is_exact(
    disaggregated: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    num_waits = 0
    for _ in range(MOST_ROUNDS):
        results = await ask_all(disaggregated, known[:NUM_STREAMS], NUM_STREAMS)
        num_waits += sum(map(has_waited, await list_stories(disaggregated, results)))
        if num_waits >= WANTED_EVENTS:
            break
    print(f"{num_waits} finished prefills waited for room")
    assert num_waits >= WANTED_EVENTS
    disaggregated.wait_idle()


async def test_clients_do_not_notice_that_the_decode_engine_dies_while_prefills_wait(
    disaggregated: Cluster, known: list[tuple[Request, Answer]]
) -> None:
    loop = asyncio.get_running_loop()
    asked = known[NUM_STREAMS : 2 * NUM_STREAMS]
    results = [Result(name=request.name) for request, _ in asked]
    status = disaggregated.wait_idle()
    (decode_engine,) = (engine["engine_id"] for engine in status["engines"] if engine["role"] == "D-heavy")

    def is_waiting(status: dict[str, Any]) -> bool:
        return any((engine["kv_blocks_pinned"] or 0) > NUM_BLOCKS // 3 for engine in status["engines"])

    async with disaggregated.client() as client:
        pairs = zip(asked, results, strict=True)
        tasks = [asyncio.create_task(client.generate(request, result=result)) for (request, _), result in pairs]
        await loop.run_in_executor(None, disaggregated.wait, "prefills wait", is_waiting, 60)
        await loop.run_in_executor(None, disaggregated.kill, decode_engine, signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
    for result, (_, answer) in zip(results, asked, strict=True):
        check(result, answer)
    disaggregated.wait_ready()
    disaggregated.wait_idle()
