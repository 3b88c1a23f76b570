"""Clients do not notice when an engine is killed, frozen or removed: every stream completes with its exact tokens."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest
from cluster import Result
from test_exactness import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster import Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

NUM_STREAMS = 16
# One of each role: the first P-heavy engine and the last D-heavy one.
ENGINES = ("engine-0", "engine-3")


async def stream_through(cluster: Cluster, known: list[tuple[Request, Answer]], fault: Callable[[], object]) -> None:
    """Stream requests, cause the fault once a third of all tokens have come, and check every answer."""
    loop = asyncio.get_running_loop()
    results = [Result(name=request.name) for request, _ in known]
    due = sum(request.sampling["max_tokens"] for request, _ in known) // 3
    async with cluster.client() as client:
        pairs = zip(known, results, strict=True)
        tasks = [asyncio.create_task(client.generate(request, result=result)) for (request, _), result in pairs]
        async with asyncio.timeout(60):
            while sum(len(result.token_ids) for result in results) < due:  # noqa: ASYNC110  streams have no event for it
                await asyncio.sleep(0.01)
        done = sum(task.done() for task in tasks)
        await loop.run_in_executor(None, fault)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert done < len(tasks), "the fault came only after the streams had ended"
    for result, (_, answer) in zip(results, known, strict=True):
        check(result, answer)


@pytest.mark.parametrize("engine", ENGINES)
async def test_clients_do_not_notice_a_killed_engine(
    cluster: Cluster, known: list[tuple[Request, Answer]], engine: str
) -> None:
    first = ENGINES.index(engine) * NUM_STREAMS
    before = cluster.pid(engine)
    await stream_through(cluster, known[first : first + NUM_STREAMS], lambda: cluster.kill(engine, signal.SIGKILL))
    cluster.wait_replaced(engine, before)


@pytest.mark.parametrize("engine", ENGINES)
async def test_clients_do_not_notice_a_frozen_engine(
    cluster: Cluster, known: list[tuple[Request, Answer]], engine: str
) -> None:
    frozen = cluster.engine_tree(engine)
    try:
        await stream_through(cluster, known[80 : 80 + NUM_STREAMS], lambda: cluster.signal_all(frozen, signal.SIGSTOP))
    finally:
        cluster.signal_all(frozen, signal.SIGCONT)
    cluster.wait_ready()


@pytest.mark.parametrize("engine", ENGINES)
async def test_clients_do_not_notice_an_engine_that_gets_sigterm(
    cluster: Cluster, known: list[tuple[Request, Answer]], engine: str
) -> None:
    first = 120 + ENGINES.index(engine) * NUM_STREAMS
    before = cluster.pid(engine)
    await stream_through(cluster, known[first : first + NUM_STREAMS], lambda: cluster.kill(engine, signal.SIGTERM))
    cluster.wait_replaced(engine, before)


async def test_clients_do_not_notice_a_scale_down(cluster: Cluster, known: list[tuple[Request, Answer]]) -> None:
    def remove() -> None:
        cluster.edit(lambda spec: spec.update(replicas=3))

    await stream_through(cluster, known[100 : 100 + 2 * NUM_STREAMS], remove)
    status = cluster.wait("one engine is gone", lambda status: len(status["engines"]) == 3)
    assert len({engine["pid"] for engine in status["engines"]}) == 3
