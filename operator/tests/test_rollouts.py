"""Rolls of the engines: how many are away at once, pauses, and what the status says meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_harness import World

MAX_BATCH = 4096


async def roll(world: World) -> tuple[int, int, int]:
    """Rolls the engines to the end; returns the fewest that served, the most that there were, and the steps it took."""
    before = world.engine_uids
    world.edit(engine={"maxBatchTokens": MAX_BATCH})
    fewest, most = len(before), 0
    for step in range(80):
        world.run_controllers()
        present = [pod for pod in world.engines if "deletionTimestamp" not in pod["metadata"]]
        fewest, most = min(fewest, len(present)), max(most, len(present))
        await world.reconcile()
        world.now += 1.0
        if not before & world.engine_uids:
            await world.settle()
            return fewest, most, step
    raise AssertionError(f"old engines are left: {world.conditions}")


@pytest.mark.parametrize(
    ("rollout", "fewest", "most"),
    [
        ({}, 7, 8),
        ({"maxUnavailable": 3}, 5, 8),
        ({"maxUnavailable": "50%"}, 4, 8),
        ({"maxUnavailable": 0, "maxSurge": 1}, 8, 9),
        ({"maxUnavailable": 0, "maxSurge": "20%"}, 8, 10),
        ({"maxUnavailable": "10%"}, 7, 8),
    ],
    ids=["one", "three", "half", "surge", "surge-rounded-up", "rounded-down-to-none"],
)
async def test_as_many_engines_are_away_as_the_rollout_allows(rollout: dict[str, Any], fewest: int, most: int) -> None:
    world = World(replicas=8, rollout=rollout)
    await world.settle()
    assert (await roll(world))[:2] == (fewest, most)
    assert world.conditions["Progressing"] == ("False", "Settled")
    assert sorted(world.roles.values()) == ["d-heavy"] * 4 + ["p-heavy"] * 4


async def test_both_kinds_serve_while_a_surge_adds_engines() -> None:
    world = World(replicas=2, rollout={"maxSurge": 2, "maxUnavailable": 0})
    await world.settle()
    world.edit(engine={"maxBatchTokens": MAX_BATCH})
    for _ in range(20):
        world.run_controllers()
        await world.reconcile()
        kinds = {part.role for part in world.plan.engines if not part.is_draining}
        assert len(kinds) == 2
        world.now += 1.0


async def test_a_paused_roll_goes_no_further_and_is_no_trouble() -> None:
    world = World(replicas=4)
    await world.settle()
    before = world.engine_uids
    world.edit(rollout={"paused": True}, engine={"maxBatchTokens": MAX_BATCH})
    await world.settle()
    assert world.engine_uids == before
    assert world.conditions["Progressing"] == ("False", "RolloutPaused")
    assert world.conditions["Degraded"] == ("False", "AsExpected")
    world.edit(rollout={"paused": False})
    await world.settle()
    assert not before & world.engine_uids
    assert world.conditions["Progressing"] == ("False", "Settled")


@pytest.mark.parametrize("surge", [0, 1])
async def test_the_outage_of_a_single_engine_is_said(surge: int) -> None:
    world = World(replicas=1, prefillHeavy=1, rollout={"maxSurge": surge})
    await world.settle()
    world.edit(engine={"maxBatchTokens": MAX_BATCH})
    await world.reconcile()
    await world.reconcile()
    assert world.conditions["Progressing"] == ("True", "RollingOut")
    assert ("does not serve meanwhile" in world.message("Progressing")) == (surge == 0)
