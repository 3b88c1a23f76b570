"""The faults that an operator lives with: crashes at every request, a second leader, an API server that fails."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from cluster_harness import KEY, World
from fake_kubernetes import READS, FakeKubernetes, copy_object

from sluice_operator.controller.reconciler import Reconciler
from sluice_operator.kubernetes.client import METHODS
from sluice_operator.kubernetes.errors import BusyError, ConflictError, KubernetesError, LeaseLostError
from sluice_operator.kubernetes.fencing import LeaseFence
from sluice_operator.kubernetes.interceptors import InterceptedKubernetes
from sluice_operator.kubernetes.kinds import CONFIG_MAPS, KINDS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

SCENARIO: tuple[tuple[str, Callable[[World], None]], ...] = (
    ("create", lambda _world: None),
    ("sliders", lambda world: world.edit(prefillHeavy=1, chunkSizes={"prefillHeavy": 1024})),
    ("scale down", lambda world: world.edit(replicas=2)),
    ("scale up", lambda world: world.edit(replicas=5)),
    ("restart", lambda world: world.edit(engine={"maxBatchTokens": 4096})),
    ("one", lambda world: world.edit(replicas=1, router={"replicas": 1})),
)


class Crash(BaseException):
    """The end of the operator's process."""


class CrashOnce:
    """Ends the operator's process at one request.

    Args:
        number: Requests that go through before it.
    """

    def __init__(self, number: int) -> None:
        self._remaining = number

    def __call__(self, _verb: str, _plural: str) -> None:
        self._remaining -= 1
        if self._remaining == -1:
            raise Crash

    @property
    def has_come(self) -> bool:
        return self._remaining < 0


async def play(world: World, crash: CrashOnce | None = None) -> list[object]:
    """Plays the scenario to the end of the part in which it crashes; returns the state after each part."""
    states = []
    for _, edit in SCENARIO:
        edit(world)
        await settle_through_crashes(world)
        states.append(world.summary())
        if crash is not None and crash.has_come:
            break
    return states


async def settle_through_crashes(world: World) -> None:
    is_settled = False
    while not is_settled:
        try:
            await world.settle()
        except* Crash:
            # Also from inside: the reads of one reconcile go out together, in tasks.
            world.start_operator()
        else:
            is_settled = True


async def test_a_crash_after_every_request_ends_in_the_same_state() -> None:
    calm = World()
    wanted = await play(calm)
    num_calls = len(calm.kubernetes.calls)
    writes = [index for index, call in enumerate(calm.kubernetes.calls) if call[0] not in READS]
    assert len(writes) > 60
    # After every write, which leaves something half-done, and some reads.
    for crash_at in sorted({*writes, *range(0, num_calls, 20)}):
        world = World()
        world.kubernetes.after = crash = CrashOnce(crash_at)
        states = await play(world, crash)
        assert states == wanted[: len(states)], f"crashed after request {crash_at}: {calm.kubernetes.calls[crash_at]}"
        assert crash.has_come


async def test_a_crash_before_a_request_ends_in_the_same_state() -> None:
    calm = World()
    wanted = await play(calm)
    writes = [index for index, call in enumerate(calm.kubernetes.calls) if call[0] not in READS]
    for crash_at in writes[::3]:
        world = World()
        world.kubernetes.before = crash = CrashOnce(crash_at)
        states = await play(world, crash)
        assert states == wanted[: len(states)], f"crashed before request {crash_at}: {calm.kubernetes.calls[crash_at]}"
        assert crash.has_come


async def test_engines_are_never_taken_away_before_they_have_drained_whenever_the_operator_crashes() -> None:
    calm = World()
    await calm.settle()
    num_before = len(calm.kubernetes.calls)
    calm.edit(replicas=2)
    await calm.settle()
    for crash_at in range(num_before, len(calm.kubernetes.calls)):
        world = World()
        await world.settle()
        busy = world.engine_uids
        world.routers.stuck = set(busy)
        world.kubernetes.after = CrashOnce(crash_at - num_before)
        world.edit(replicas=2)
        for _ in range(8):
            world.kubernetes.run_controllers()
            try:
                await world.reconcile()
            except* Crash:
                world.start_operator()
            world.now += 1.0
        assert world.engine_uids == busy
        world.routers.stuck.clear()
        await settle_through_crashes(world)
        assert len(world.engines) == 2


@pytest.mark.parametrize("seed", range(6))
async def test_a_fifth_of_all_requests_may_fail(seed) -> None:
    calm = World()
    wanted = await play(calm)
    world = World()
    rng = random.Random(seed)
    faults = [BusyError("503"), BusyError("no answer"), BusyError("429", retry_after_s=1.0), ConflictError("409")]

    def fail(verb: str, _plural: str) -> None:
        # A conflict of a read makes no sense.
        if rng.random() < 0.2:
            raise rng.choice(faults[:3] if verb in READS else faults)

    states = []
    for _, edit in SCENARIO:
        edit(world)
        # Half of the faults strike after the server has done it: the answer is lost.
        world.kubernetes.before, world.kubernetes.after = (
            (fail, lambda *_: None) if seed % 2 else (lambda *_: None, fail)
        )
        for _ in range(120):
            world.kubernetes.run_controllers()
            await world.reconcile()
            world.now += 1.0
        world.kubernetes.before = world.kubernetes.after = lambda *_: None
        await world.settle()
        states.append(world.summary())
    assert states == wanted


@pytest.mark.parametrize("seed", range(8))
async def test_two_leaders_never_give_two_plans_one_number(seed) -> None:
    world = World()
    await world.settle()
    rng = random.Random(seed)
    leaders = [world.reconciler]
    other = World.__new__(World)
    other.kubernetes, other.routers, other.settings = world.kubernetes, world.routers.restart(), world.settings
    leaders.append(
        Reconciler(
            world.kubernetes, other.routers, world.settings, now=lambda: world.now, now_text=lambda: f"t{world.now:.0f}"
        )
    )
    interleave(world, rng, leaders)
    for number in range(30):
        world.edit(prefillHeavy=rng.randrange(5), chunkSizes={"prefillHeavy": 256 + number})
        # The second leader reconciles in the middle of the first one's reconcile, between its reads and its writes.
        await reconcile(leaders[0])
        world.now += 0.1
    world.kubernetes.before = lambda *_: None
    await world.settle()
    by_number: dict[int, object] = {}
    for plan in world.routers.offered:
        assert by_number.setdefault(plan.generation, plan) == plan
    assert len(by_number) > 20
    assert world.plan.generation == max(by_number)


def interleave(world: World, rng: random.Random, leaders: list[Reconciler]) -> None:
    """Has the second leader reconcile before some of the first one's writes."""
    is_inside = False

    def strike(verb: str, plural: str) -> None:
        nonlocal is_inside
        if is_inside or verb not in ("patch", "create") or plural != "configmaps" or rng.random() < 0.3:
            return
        is_inside = True
        try:
            # The fakes never wait: a reconcile runs to its end when it is driven by hand.
            drive(reconcile(leaders[1]))
        finally:
            is_inside = False

    world.kubernetes.before = strike


async def reconcile(leader: Reconciler) -> None:
    try:
        await leader.reconcile(KEY)
    except KubernetesError:
        return


def drive(coroutine: object) -> None:
    """Runs a reconcile inside another one, in a loop of its own on another thread."""
    import asyncio  # noqa: PLC0415
    import threading  # noqa: PLC0415

    thread = threading.Thread(target=lambda: asyncio.run(coroutine))
    thread.start()
    thread.join()


async def test_a_replica_that_lost_its_lease_writes_nothing() -> None:
    world = World()
    fenced = InterceptedKubernetes(world.kubernetes, LeaseFence(lambda: False))
    reconciler = Reconciler(fenced, world.routers, world.settings, now=lambda: 0.0, now_text=lambda: "t")
    with pytest.raises(LeaseLostError):
        await reconciler.reconcile(KEY)
    assert world.kubernetes.writes == []


REQUESTS = {
    "get": lambda kubernetes, kind, _: kubernetes.get(kind, "default", "x"),
    "list": lambda kubernetes, kind, _: kubernetes.list(kind, "default", {}),
    "discover": lambda kubernetes, kind, _: kubernetes.is_served(kind),
    "apply": lambda kubernetes, _, content: kubernetes.apply(content),
    "create": lambda kubernetes, _, content: kubernetes.create(content),
    "patch": lambda kubernetes, kind, _: kubernetes.patch(kind, "default", "x", {"metadata": {"labels": {"a": "b"}}}),
    "patch_status": lambda kubernetes, kind, _: kubernetes.patch_status(kind, "default", "x", {"status": {"a": "b"}}),
    "delete": lambda kubernetes, kind, content: kubernetes.delete(kind, "default", "x", content["metadata"]["uid"]),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("verb", METHODS)
async def test_without_the_lease_every_kind_is_read_and_none_is_written(verb: str, kind: Kind) -> None:
    kubernetes = FakeKubernetes()
    content = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": "x", "namespace": "default"}}
    stored = copy_object(kubernetes.put(content))
    fenced = InterceptedKubernetes(kubernetes, LeaseFence(lambda: False))
    if verb in READS:
        await REQUESTS[verb](fenced, kind, stored)
        assert kubernetes.calls == [(verb, kind.plural)]
        return
    with pytest.raises(LeaseLostError, match=verb):
        await REQUESTS[verb](fenced, kind, stored)
    assert kubernetes.calls == []
    assert kubernetes.find(kind, "x") == stored


async def test_a_lease_lost_during_a_reconcile_stops_it_there() -> None:
    world = World()
    is_held = True
    fenced = InterceptedKubernetes(world.kubernetes, LeaseFence(lambda: is_held))
    reconciler = Reconciler(fenced, world.routers, world.settings, now=lambda: 0.0, now_text=lambda: "t")

    def lose(verb: str, plural: str) -> None:
        nonlocal is_held
        if (verb, plural) == ("apply", "services"):
            is_held = False

    world.kubernetes.after = lose
    with pytest.raises(LeaseLostError):
        await reconciler.reconcile(KEY)
    assert world.kubernetes.writes[-1] == ("apply", "services")
    world.kubernetes.after = lambda *_: None
    await world.settle()
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_edits_during_a_reconcile_are_in_the_next_plan() -> None:
    world = World()
    await world.settle()
    edits = iter(range(1, 4))

    def edit(verb: str, plural: str) -> None:
        if (verb, plural) == ("patch", "configmaps"):
            number = next(edits, None)
            if number is not None:
                world.edit(prefillHeavy=number)

    world.kubernetes.after = edit
    world.edit(prefillHeavy=0)
    await world.settle()
    assert sum(part.role == 1 for part in world.plan.engines) == 3


async def test_a_flip_that_is_half_done_when_the_operator_crashes_is_finished_and_not_turned_back() -> None:
    world = World()
    await world.settle()
    before = world.roles
    world.routers.late = set(world.engine_uids)
    world.edit(prefillHeavy=4)
    await world.settle()
    flipped = {part.engine_id for part in world.plan.engines if part.role == 1}
    assert world.roles == before
    # One of the two engines that change has the new setting, the other does not answer.
    first, last = sorted(uid for uid in flipped if before[uid] == "d-heavy")
    world.routers.late = {last}
    await world.settle()
    assert world.roles == {**before, first: "p-heavy"}
    assert world.conditions["Progressing"] == ("True", "ApplyingPlan")
    generation = world.plan.generation
    world.start_operator()
    await world.settle()
    assert world.plan.generation == generation
    assert world.roles == {**before, first: "p-heavy"}
    world.routers.late.clear()
    await world.settle()
    assert set(world.roles.values()) == {"p-heavy"}
    assert world.conditions["Progressing"] == ("False", "Settled")


async def test_the_number_of_a_plan_never_falls_even_if_two_operators_find_it_gone() -> None:
    world = World()
    await world.settle()
    generation = world.plan.generation
    world.kubernetes.remove(CONFIG_MAPS, "default", "tiny-plan")
    world.start_operator()
    await world.settle()
    assert world.plan.generation > generation


@pytest.mark.parametrize(
    "plurals",
    [("configmaps", "pods"), ("networkpolicies", "services")],
    ids=["what a plan is made of", "the other children"],
)
@pytest.mark.parametrize("is_first_busy", [True, False])
async def test_of_several_errors_the_one_counts_that_asks_for_a_pause(
    plurals: tuple[str, str], *, is_first_busy: bool
) -> None:
    world = World()
    await world.settle()
    busy = plurals[0 if is_first_busy else 1]

    def fail(verb: str, plural: str) -> None:
        if verb == "list" and plural in plurals:
            raise BusyError("429", retry_after_s=7.0) if plural == busy else KubernetesError("500")

    world.kubernetes.before = fail
    await world.reconcile()
    assert isinstance(world.last_error, BusyError)
    assert world.last_error.retry_after_s == 7.0
    busy = ""
    await world.reconcile()
    assert type(world.last_error) is KubernetesError
