"""Clients do not notice when an engine is killed, frozen or removed: every stream completes with its exact tokens."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from cluster import stream_through_fault
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
    due = sum(request.sampling["max_tokens"] for request, _ in known) // 3
    results = await stream_through_fault(cluster, [request for request, _ in known], due, fault)
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
