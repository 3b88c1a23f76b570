"""Reconciles that scale a cluster: engines drain before they go."""

from __future__ import annotations

import pytest
from cluster_harness import COST, World

from sluice.v1 import plan_pb2
from sluice_operator.kubernetes.kinds import DISRUPTION_BUDGETS


async def test_engines_are_drained_before_they_go() -> None:
    world = World()
    await world.settle()
    world.routers.loads = dict.fromkeys(world.engine_uids, 10)
    idle = {next(uid for uid, role in world.roles.items() if role == name) for name in ("p-heavy", "d-heavy")}
    world.routers.loads.update(dict.fromkeys(idle, 0))
    world.routers.stuck = set(world.engine_uids)
    world.edit(replicas=2)
    for _ in range(5):
        world.kubernetes.run_controllers()
        await world.reconcile()
    assert world.deployment()["spec"]["replicas"] == 4
    assert world.conditions["Progressing"] == ("True", "Draining")
    draining = {part.engine_id for part in world.plan.engines if part.is_draining}
    marked = {pod["metadata"]["uid"] for pod in world.engines if COST in (pod["metadata"].get("annotations") or {})}
    assert draining == marked == idle
    kept = world.engine_uids - idle
    world.routers.stuck = set()
    await world.settle()
    assert world.engine_uids == kept
    assert world.conditions["Progressing"] == ("False", "Settled")
    assert not any(part.is_draining for part in world.plan.engines)


async def test_an_engine_that_never_drains_goes_when_its_time_is_over() -> None:
    world = World()
    await world.settle()
    world.routers.stuck = set(world.engine_uids)
    world.edit(replicas=3)
    limit_s = 35.0
    assert await world.reconcile() == 0.2
    started_s = world.now
    for passed_s in (0.0, 10.0, 20.0, 34.0):
        world.now = started_s + passed_s
        assert await world.reconcile() == pytest.approx(limit_s - passed_s)
        assert world.deployment()["spec"]["replicas"] == 4
    world.now = started_s + limit_s
    await world.settle()
    assert len(world.engines) == 3


async def test_the_next_reconcile_comes_when_the_first_victim_is_out_of_time() -> None:
    world = World()
    await world.settle()
    world.routers.stuck = set(world.engine_uids)
    world.edit(replicas=3)
    await world.reconcile()
    await world.reconcile()
    world.now += 10.0
    world.edit(replicas=2)
    await world.reconcile()
    assert await world.reconcile() == pytest.approx(25.0)


async def test_an_engine_counts_as_drained_once_every_router_has_the_newest_plan() -> None:
    world = World()
    await world.settle()
    world.edit(replicas=3)
    await world.reconcile()
    # The plan drains an engine; one router has not got so far.
    address, plan = next(iter(world.routers.plans.items()))
    older = plan_pb2.Plan()
    older.CopyFrom(plan)
    older.generation -= 1
    world.routers.plans[address] = older
    await world.reconcile()
    assert world.deployment()["spec"]["replicas"] == 4
    for _ in range(2):
        await world.reconcile()
    assert world.deployment()["spec"]["replicas"] == 3


async def test_a_new_process_goes_on_with_the_time_that_a_drain_had() -> None:
    world = World()
    await world.settle()
    world.routers.stuck = set(world.engine_uids)
    world.edit(replicas=3)
    for _ in range(3):
        await world.reconcile()
    world.now += 30.0
    stuck = world.routers.stuck
    world.start_operator()
    world.routers.stuck = stuck
    for _ in range(12):
        world.kubernetes.run_controllers()
        await world.reconcile()
        world.now += 1.0
    assert len(world.engines) == 3


async def test_one_engine_that_does_not_drain_keeps_no_other_from_leaving() -> None:
    world = World()
    await world.settle()
    stuck = next(iter(world.engine_uids))
    world.routers.loads = dict.fromkeys(world.engine_uids - {stuck}, 10) | {stuck: 0}
    world.routers.stuck = {stuck}
    world.edit(replicas=1)
    for _ in range(6):
        world.kubernetes.run_controllers()
        await world.reconcile()
    assert stuck in world.engine_uids
    assert len(world.engines) == 2
    assert world.conditions["Progressing"] == ("True", "Draining")


async def test_a_reverted_scale_down_leaves_no_deletion_cost() -> None:
    world = World()
    await world.settle()
    before = world.engine_uids
    world.routers.stuck = set(before)
    world.edit(replicas=2)
    for _ in range(3):
        await world.reconcile()
    world.edit(replicas=4)
    await world.settle()
    assert world.engine_uids == before
    assert not any(part.is_draining for part in world.plan.engines)
    assert not any(COST in (pod["metadata"].get("annotations") or {}) for pod in world.engines)


async def test_scaling_up_and_down_to_one_takes_the_budget_away_and_back() -> None:
    world = World()
    await world.settle()
    world.edit(replicas=1)
    await world.settle()
    assert [item["metadata"]["name"] for item in world.kubernetes.select(DISRUPTION_BUDGETS)] == ["tiny-router"]
    world.edit(replicas=3)
    await world.settle()
    assert len(world.kubernetes.select(DISRUPTION_BUDGETS)) == 2
    assert len(world.engines) == 3
