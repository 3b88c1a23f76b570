"""Reads are repeated, writes are not, and nobody waits long."""

from __future__ import annotations

import random

import pytest
from fake_kubernetes import READS
from world import KEY, World

from sluice_operator.kubernetes_port import PODS, BusyError, ForbiddenError, KubernetesError
from sluice_operator.reconciler import Reconciler
from sluice_operator.retrying import MAX_ATTEMPTS, RetryingKubernetes
from sluice_operator.work_queue import Schedule


def make(world: World) -> tuple[RetryingKubernetes, list[float]]:
    pauses: list[float] = []

    async def sleep(duration_s: float) -> None:
        pauses.append(duration_s)
        world.now += duration_s

    return RetryingKubernetes(world.kubernetes, now=lambda: world.now, sleep=sleep), pauses


def fail_with(world: World, *errors: KubernetesError, takes_s: float = 0.0) -> None:
    remaining = list(errors)

    def fail(_verb: str, _plural: str) -> None:
        world.now += takes_s
        if remaining:
            raise remaining.pop(0)

    world.kubernetes.before = fail


async def test_a_read_is_repeated_until_it_succeeds() -> None:
    world = World()
    kubernetes, pauses = make(world)
    fail_with(world, BusyError("500"), BusyError("429", retry_after_s=1.0), BusyError("503"))
    assert await kubernetes.list(PODS, "default", {}) == []
    assert pauses == [0.1, 1.0, pytest.approx(0.3)]


@pytest.mark.parametrize(
    ("errors", "takes_s", "num_calls"),
    [
        ([BusyError("500")] * 9, 0.0, MAX_ATTEMPTS),
        ([BusyError("no answer")] * 9, 5.0, 1),
        ([BusyError("429", retry_after_s=30.0)] * 9, 0.0, 1),
        ([ForbiddenError("403")] * 9, 0.0, 1),
    ],
    ids=["always", "silent", "told to wait", "forbidden"],
)
async def test_a_read_is_not_repeated_for_ever_nor_where_that_is_vain(errors, takes_s, num_calls) -> None:
    world = World()
    kubernetes, _ = make(world)
    fail_with(world, *errors, takes_s=takes_s)
    with pytest.raises(type(errors[0])):
        await kubernetes.get(PODS, "default", "p")
    assert len(world.kubernetes.calls) == num_calls


async def test_a_write_is_never_repeated() -> None:
    world = World()
    await world.settle()
    kubernetes, pauses = make(world)
    pod = world.engines[0]["metadata"]["name"]
    fail_with(world, BusyError("500"))
    with pytest.raises(BusyError):
        await kubernetes.patch(PODS, "default", pod, {"metadata": {"labels": {"a": "b"}}})
    assert pauses == []


@pytest.mark.parametrize("seed", range(10))
async def test_an_edit_is_in_force_within_seconds_though_a_fifth_of_all_requests_fails(seed) -> None:
    world = World()
    await world.settle()
    kubernetes, _ = make(world)
    reconciler = Reconciler(
        kubernetes, world.routers, world.settings, now=lambda: world.now, now_text=lambda: f"t{world.now:.0f}"
    )
    rng = random.Random(seed)

    def fail(_verb: str, _plural: str) -> None:
        if rng.random() < 0.2:
            raise BusyError("a fault")

    world.kubernetes.before = fail
    world.edit(prefillHeavy=3)
    schedule: Schedule[object] = Schedule(rng)
    schedule.add(KEY, world.now)
    edited_s = world.now
    # As the queue would have it: a look that fails comes again after its back-off.
    while world.plan is None or sum(part.role == 1 for part in world.plan.engines) != 3:
        assert schedule.take(world.now) is KEY
        try:
            await reconciler.reconcile(KEY)
        except KubernetesError:
            world.now += schedule.fail(KEY, world.now)
    assert world.now - edited_s < 8.0
    assert not {call[0] for call in world.kubernetes.calls} <= READS
