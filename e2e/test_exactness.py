"""Moved requests have the tokens of stock vLLM, whatever their hops, sampling state and chunk sizes."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster import Client, Cluster, Result
    from workload import Answer, Request

pytestmark = pytest.mark.engine

# Some for each engine: an iteration costs the same for several, so fewer would take longer.
CONCURRENCY = 48
MAX_HOPS = 4
MOST_ROUNDS = 8
LOGPROB_TOLERANCE = 1e-4


def check(result: Result, answer: Answer) -> None:
    """Checks that a result has the answer's tokens, finish reason and logprobs."""
    assert result.token_ids == answer.token_ids, result.name
    if answer.logprobs is not None:
        assert result.logprobs == pytest.approx(answer.logprobs, abs=LOGPROB_TOLERANCE), result.name


async def run_all(
    client: Client,
    known: list[tuple[Request, Answer]],
    engines: list[str],
    hops: Counter[int],
    *,
    seed: int = 1,
    counts: Sequence[int] = range(MAX_HOPS + 1),
) -> None:
    """Run the requests a few at a time, each with one of ``counts`` of requested moves from engine to engine."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(CONCURRENCY)

    async def run(index: int, request: Request, answer: Answer) -> None:
        count = counts[index % len(counts)]
        # Some tokens pass between the cuts, until a move is done and the next one can begin. The more moves, the
        # earlier they begin: a busy machine makes more tokens while one is done.
        cuts = tuple(sorted(rng.sample(range(1, 40 if count < MAX_HOPS else 12), count)))
        route = tuple(itertools.islice(itertools.cycle(rng.sample(engines, len(engines))), count))
        async with gate:
            result = await client.generate(request, move_at=cuts, route=route)
        check(result, answer)
        hops[min(result.num_hand_offs, MAX_HOPS)] += 1

    async with asyncio.TaskGroup() as tasks:
        for index, (request, answer) in enumerate(known):
            tasks.create_task(run(index, request, answer))


async def test_moved_requests_have_the_tokens_of_stock_vllm(
    cluster: Cluster, known_long: list[tuple[Request, Answer]]
) -> None:
    assert len(known_long) >= 200
    hops: Counter[int] = Counter()
    engines = sorted(cluster.processes("engine"))
    async with cluster.client() as client:
        await run_all(client, known_long, engines, hops)
        assert sum(hops.values()) == len(known_long)
        # Not every move that is asked for is done before the answer ends: chance decides how many have all of them.
        for seed in range(10, 10 + MOST_ROUNDS):
            rare = [count for count in range(MAX_HOPS + 1) if hops[count] < 2]
            if rare:
                await run_all(client, known_long[:40], engines, hops, seed=seed, counts=rare)
    print(f"requests by number of hops: {dict(sorted(hops.items()))}")
    assert all(hops[count] >= 2 for count in range(MAX_HOPS + 1)), hops


async def test_two_routers_share_the_engines(cluster: Cluster, known_long: list[tuple[Request, Answer]]) -> None:
    hops: Counter[int] = Counter()
    engines = sorted(cluster.processes("engine"))
    async with cluster.client("router-0") as first, cluster.client("router-1") as second:
        await asyncio.gather(
            run_all(first, known_long[:40], engines, hops, seed=2),
            run_all(second, known_long[40:80], engines, hops, seed=3),
        )
    assert sum(hops.values()) == 80
    assert sum(count for hop, count in hops.items() if hop) >= 27
