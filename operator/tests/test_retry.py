"""Requests are repeated where that is harmless and may help, within bounds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from cluster_harness import World

from sluice_operator.kubernetes.errors import BusyError, ConflictError, ForbiddenError, KubernetesError, LeaseLostError
from sluice_operator.kubernetes.fencing import LeaseFence
from sluice_operator.kubernetes.interceptors import InterceptedKubernetes
from sluice_operator.kubernetes.kinds import CONFIG_MAPS, PODS
from sluice_operator.kubernetes.retry import MAX_ATTEMPTS, PAUSE_S, Retry

if TYPE_CHECKING:
    from sluice_operator.kubernetes.objects import Object

MAP: Object = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "m", "namespace": "default", "labels": {"a": "b"}},
}


def make(world: World) -> tuple[InterceptedKubernetes, list[float]]:
    pauses: list[float] = []

    async def sleep(duration_s: float) -> None:
        pauses.append(duration_s)
        world.now += duration_s

    kubernetes = InterceptedKubernetes(
        world.kubernetes, Retry(rng=random.Random(1), now=lambda: world.now, sleep=sleep)
    )
    return kubernetes, pauses


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
    assert PAUSE_S / 2 <= pauses[0] <= PAUSE_S
    assert pauses[1] == 1.0
    assert 2 * PAUSE_S <= pauses[2] <= 4 * PAUSE_S


@pytest.mark.parametrize(
    ("errors", "takes_s", "num_calls"),
    [
        ([BusyError("500")] * 9, 0.0, MAX_ATTEMPTS),
        ([BusyError("no answer")] * 9, 5.0, 2),
        ([BusyError("429", retry_after_s=30.0)] * 9, 0.0, 1),
        ([ForbiddenError("403")] * 9, 0.0, 1),
    ],
    ids=["always", "silent", "server asks for a long pause", "forbidden"],
)
async def test_a_request_is_not_repeated_for_ever_nor_where_that_is_vain(errors, takes_s, num_calls) -> None:
    world = World()
    kubernetes, _ = make(world)
    fail_with(world, *errors, takes_s=takes_s)
    with pytest.raises(type(errors[0])):
        await kubernetes.get(PODS, "default", "p")
    assert len(world.kubernetes.calls) == num_calls


class Halves(random.Random):
    """Draws the middle, always."""

    def random(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("attempts", "pauses_s"),
    [
        # Of each attempt: how long it took, and for how long the server asks to wait.
        ([(0.0, None)] * 3, [0.075, 0.15, 0.3]),
        ([(0.0, 0.2)] * 3, [0.2, 0.2, 0.3]),
        ([(0.0, 1.0)] * 3, [1.0, 1.0, 1.0]),
        ([(0.0, 0.0), (0.0, 1.1)], [0.075]),
        ([(1.0, None)] * 3, [0.075, 0.15, 0.3]),
        ([(1.1, None), (0.0, None), (0.0, None)], [0.075, 0.15, 0.3]),
        ([(1.1, None), (0.0, None), (1.1, None)], [0.075, 0.15]),
        ([(1.1, None), (1.1, None)], [0.075]),
    ],
)
async def test_each_pause_is_twice_the_last_or_what_the_server_asks_for(
    attempts: list[tuple[float, float | None]], pauses_s: list[float]
) -> None:
    world, slept_s, remaining = World(), [], list(attempts)

    async def sleep(duration_s: float) -> None:
        slept_s.append(duration_s)

    def fail(_verb: str, _plural: str) -> None:
        if remaining:
            took_s, asked_s = remaining.pop(0)
            world.now += took_s
            raise BusyError("503", retry_after_s=asked_s)

    world.kubernetes.before = fail
    retry = Retry(rng=Halves(), now=lambda: world.now, sleep=sleep)
    kubernetes = InterceptedKubernetes(world.kubernetes, retry)
    if len(pauses_s) == len(attempts):
        await kubernetes.list(PODS, "default", {})
    else:
        with pytest.raises(BusyError):
            await kubernetes.list(PODS, "default", {})
    assert slept_s == pytest.approx(pauses_s)
    assert remaining == []


WRITES = {
    "apply": lambda kubernetes, _: kubernetes.apply(MAP),
    "patch": lambda kubernetes, _: kubernetes.patch(CONFIG_MAPS, "default", "m", {"metadata": {"labels": {"a": "c"}}}),
    "patch_status": lambda kubernetes, _: kubernetes.patch_status(CONFIG_MAPS, "default", "m", {"status": {"a": "b"}}),
    "delete": lambda kubernetes, uid: kubernetes.delete(CONFIG_MAPS, "default", "m", uid),
}


@pytest.mark.parametrize("is_lost", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("verb", WRITES)
async def test_a_write_is_repeated_to_the_same_effect(verb, is_lost) -> None:
    calm, world = World(), World()
    uids = [(await each.kubernetes.apply(MAP))["metadata"]["uid"] for each in (calm, world)]
    kubernetes, pauses = make(world)
    fail_with(world, BusyError("500"), BusyError("500"))
    if is_lost:
        world.kubernetes.before, world.kubernetes.after = world.kubernetes.after, world.kubernetes.before
    await WRITES[verb](calm.kubernetes, uids[0])
    await WRITES[verb](kubernetes, uids[1])
    assert len(pauses) == 2
    assert world.kubernetes.objects == calm.kubernetes.objects


async def test_a_write_that_replaces_a_version_and_whose_answer_is_lost_ends_in_a_conflict() -> None:
    world = World()
    live = await world.kubernetes.apply(MAP)
    kubernetes, _ = make(world)
    fail_with(world, BusyError("lost"))
    world.kubernetes.before, world.kubernetes.after = world.kubernetes.after, world.kubernetes.before
    patch = {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"], "labels": {"a": "c"}}}
    with pytest.raises(ConflictError):
        await kubernetes.patch(CONFIG_MAPS, "default", "m", patch)


async def test_a_create_with_a_generated_name_is_not_repeated() -> None:
    world = World()
    kubernetes, pauses = make(world)
    fail_with(world, BusyError("500"))
    with pytest.raises(BusyError):
        await kubernetes.create({"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {}})
    assert pauses == []


async def test_no_repetition_outlives_the_lease() -> None:
    world = World()
    fence = LeaseFence(lambda: world.now < 1001.0)

    async def sleep(_duration_s: float) -> None:
        world.now = 1002.0

    kubernetes = InterceptedKubernetes(
        world.kubernetes, Retry(rng=random.Random(1), now=lambda: world.now, sleep=sleep), fence
    )
    fail_with(world, BusyError("500"))
    with pytest.raises(LeaseLostError):
        await kubernetes.apply(MAP)
    assert world.kubernetes.calls == [("apply", "configmaps")]
