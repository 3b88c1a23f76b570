"""Crashes, deletions and second leaders at every write of a cluster's life, on a real API server with kwok's pods.

A crash after a read leaves the same state as a crash after the write before it, so these tests crash after writes only.
``operator/tests/test_operator_faults.py`` has the interleaved reads and the failing requests: it needs no cluster.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from in_process_operator import PATIENCE_S, PAUSE_S, Crash, ReconciledCluster, connect, is_settled
from kubectl_cluster import wait_for
from testbed.fake_nodes import is_ready, make_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from testbed.client import Client

    from sluice_operator.kubernetes.client import KubernetesClient
    from sluice_operator.kubernetes.objects import Object

pytestmark = pytest.mark.usefixtures("crd", "crash_node")

# More clusters at once than the API server can serve would only wait for one another.
NUM_AT_ONCE = 16
EDITS: tuple[dict[str, Any], ...] = (
    {},
    {"prefillHeavy": 1, "chunkSizes": {"prefillHeavy": 1024}},
    {"replicas": 5},
    {"replicas": 1, "router": {"replicas": 2}},
)


@pytest.fixture(scope="module")
def crash_node(client: Client) -> Iterator[None]:
    """A kwok node without a taint, which any pod may run on."""
    node = make_node("crash")
    del node["spec"]["taints"]
    client.apply(node)
    wait_for(lambda: is_ready(client, "crash"), "the open node")
    yield
    client.kubectl("delete", "node", "crash")


@asynccontextmanager
async def make_cluster(kubernetes: KubernetesClient, namespace: str, name: str) -> AsyncIterator[ReconciledCluster]:
    """Runs with a cluster for the length of the block, and leaves nothing of it."""
    cluster = ReconciledCluster(kubernetes, namespace, name)
    await cluster.create()
    yield cluster
    await cluster.delete()
    await wait_until_gone(cluster)


async def wait_until_gone(cluster: ReconciledCluster) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await cluster.list_children():
            await cluster.reconcile()
            await asyncio.sleep(PAUSE_S)


async def make_edits(cluster: ReconciledCluster) -> AsyncIterator[Object]:
    """Makes the edits one after the other; yields the state after each."""
    for edit in EDITS:
        if edit:
            await cluster.edit(**edit)
        await cluster.settle()
        yield await cluster.summarize()


async def run_all(*runs: Callable[[], Awaitable[None]]) -> None:
    """Runs all, a few at a time; the first failure ends all."""
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(one: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            await one()

    async with asyncio.TaskGroup() as group:
        for one in runs:
            group.create_task(run(one))


async def test_a_crash_after_any_write_of_an_edit_ends_in_the_same_state(client: Client, namespace: str) -> None:
    async with connect(client) as kubernetes:
        wanted, num_writes = [], [0]
        async with make_cluster(kubernetes, namespace, "calm") as calm:
            async for state in make_edits(calm):
                wanted.append(state)
                num_writes.append(calm.watched.num_writes)
        assert num_writes[-1] > 40
        lengths = [end - start for start, end in pairwise(num_writes)]
        num_crashes = 0

        async def crash_after(number: int) -> None:
            """One operator after the other dies after this write of an edit, and the next one ends what it began."""
            nonlocal num_crashes
            before = num_reached = 0

            async def after(write: int) -> None:
                if write == before + number:
                    raise Crash

            async with make_cluster(kubernetes, namespace, f"c{number:03}") as cluster:
                cluster.watched.after = after
                ends = enumerate(zip(EDITS, wanted, strict=True))
                async for found in make_edits(cluster):
                    index, (edit, should_be) = next(ends)
                    was_reached = cluster.watched.num_writes >= before + number
                    assert found == should_be, f"after a crash at write {number} of {edit}"
                    num_reached += was_reached
                    assert cluster.num_crashes == num_reached
                    before = cluster.watched.num_writes
                    # No later edit has so many writes. This one had no crash: damage of the last may show here first.
                    if not was_reached and max(lengths[index + 1 :], default=0) < number:
                        break
                num_crashes += cluster.num_crashes

        await run_all(*(lambda number=number: crash_after(number) for number in range(1, max(lengths) + 1)))
        # The number of status writes depends on timing: the last ones of an edit may not come.
        assert num_crashes > 40


@pytest.mark.parametrize("comes_back", [False, True], ids=["deleted", "recreated"])
async def test_a_cluster_deleted_after_any_write_of_its_creation_leaves_nothing(
    client: Client, namespace: str, *, comes_back: bool
) -> None:
    async with connect(client) as kubernetes:
        async with make_cluster(kubernetes, namespace, "calm") as calm:
            await calm.settle()
            wanted, num_writes = await calm.summarize(), calm.watched.num_writes
        assert num_writes > 15
        num_deleted = 0

        async def delete_after(number: int) -> None:
            nonlocal num_deleted
            cluster = ReconciledCluster(kubernetes, namespace, f"d{number:03}")
            await cluster.create()
            was_deleted = False

            async def after(write: int) -> None:
                nonlocal was_deleted
                if write == number:
                    was_deleted = True
                    await cluster.delete()
                    if comes_back:
                        await cluster.create()

            cluster.watched.after = after
            # The number of status writes depends on timing: the last ones may not come.
            while True:
                is_calm = await cluster.reconcile()
                if was_deleted or (is_calm and is_settled(await cluster.read())):
                    break
                await asyncio.sleep(PAUSE_S)
            num_deleted += was_deleted
            if comes_back:
                await cluster.settle()
                # Nothing is left of the first cluster of this name, and nothing of it was adopted.
                assert await cluster.summarize() == wanted
            if comes_back or not was_deleted:
                await cluster.delete()
            await wait_until_gone(cluster)

        await run_all(*(lambda number=number: delete_after(number) for number in range(1, num_writes + 1)))
        assert num_deleted > 15


async def test_two_leaders_never_give_two_plans_the_same_generation(client: Client, namespace: str) -> None:
    async with connect(client) as kubernetes, make_cluster(kubernetes, namespace, "two") as cluster:
        await cluster.settle()
        second = ReconciledCluster(kubernetes, namespace, "two")
        second.routers.plans, second.routers.offered = cluster.routers.plans, cluster.routers.offered
        second.start_operator()
        rng = random.Random(1)
        limit_s = time.monotonic() + 30.0

        def goes_on() -> bool:
            # How many plans come in a second depends on what else the machine does.
            num_plans = len({plan.generation for plan in cluster.routers.offered})
            is_enough = num_plans > 8 and cluster.num_conflicts + second.num_conflicts > 0
            return not is_enough and time.monotonic() < limit_s

        async def lead(leader: ReconciledCluster) -> None:
            while goes_on():
                await leader.reconcile()

        async def edit() -> None:
            while goes_on():
                await cluster.edit(prefillHeavy=rng.randrange(5), chunkSizes={"prefillHeavy": rng.randrange(256, 1024)})
                await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as group:
            for task in (lead(cluster), lead(second), edit()):
                group.create_task(task)
        assert cluster.num_conflicts + second.num_conflicts > 0
        await cluster.settle()
        plans: dict[int, Any] = {}
        for plan in cluster.routers.offered:
            assert plans.setdefault(plan.generation, plan) == plan
        assert len(plans) > 5
        assert cluster.plan.generation == max(plans)
