"""Our own writes cause no reconcile; foreign ones do, whether before ours, after it, or in between."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
from cluster_harness import KEY, World
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.api.labels import ROLE_LABEL
from sluice_operator.controller.event_filter import EventFilter
from sluice_operator.controller.reconciler import Reconciler
from sluice_operator.controller.work_queue import WorkQueue
from sluice_operator.kubernetes.kinds import CLUSTERS, CONFIG_MAPS, PODS, Kind
from sluice_operator.kubernetes.own_writes import OwnWrites, Version, merge_patch, read_version

if TYPE_CHECKING:
    from sluice_operator.kubernetes.objects import Object

NAME = "m"
PATCH: Object = {"metadata": {"labels": {"role": "p"}}, "data": {"plan": "2"}}


async def make_map(world: World) -> Object:
    return await world.kubernetes.create(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": NAME, "labels": {"role": "d"}},
            "data": {"plan": "1"},
        }
    )


async def test_only_the_event_of_our_own_write_is_recognized() -> None:
    world, own_writes = World(), OwnWrites()
    seen = await make_map(world)
    answer = await world.kubernetes.patch(CONFIG_MAPS, "default", NAME, PATCH)
    own_writes.record(seen, PATCH, answer)
    assert own_writes.includes(read_version(answer))
    assert not own_writes.includes(read_version(seen))
    world.kubernetes.edit(CONFIG_MAPS, NAME, {"data": {"other": "x"}})
    assert not own_writes.includes(read_version(world.kubernetes.find(CONFIG_MAPS, NAME)))


@pytest.mark.parametrize(
    "edit",
    [
        {"data": {"other": "x"}},
        {"metadata": {"labels": {"x": "y"}}},
        {"metadata": {"annotations": {"x": "y"}}},
        {"metadata": {"deletionTimestamp": "now"}},
        {"status": {"x": "y"}},
    ],
    ids=["data", "label", "annotation", "deletion", "status"],
)
async def test_a_foreign_write_between_our_read_and_our_write_is_not_missed(edit) -> None:
    world, own_writes = World(), OwnWrites()
    seen = await make_map(world)
    world.kubernetes.edit(CONFIG_MAPS, NAME, edit)
    answer = await world.kubernetes.patch(CONFIG_MAPS, "default", NAME, PATCH)
    own_writes.record(seen, PATCH, answer)
    assert not own_writes.includes(read_version(answer))


def test_an_event_without_a_version_is_not_our_own() -> None:
    own_writes = OwnWrites()
    assert not own_writes.includes(read_version({"metadata": {"name": "x"}}))
    assert not own_writes.includes(Version(uid="", resource_version=""))


def test_what_the_server_keeps_for_itself_makes_no_difference() -> None:
    own_writes = OwnWrites()
    seen = {"metadata": {"uid": "u", "resourceVersion": "1", "managedFields": [1], "annotations": {"a": "b"}}}
    patch = {"metadata": {"uid": "u", "annotations": {"a": None}}}
    answer = {"metadata": {"uid": "u", "resourceVersion": "2", "managedFields": [1, 2]}}
    own_writes.record(seen, patch, answer)
    assert own_writes.includes(Version(uid="u", resource_version="2"))


def test_the_number_of_recorded_writes_is_bounded() -> None:
    own_writes = OwnWrites(max_objects=3)
    for number in range(5):
        content = {"metadata": {"uid": f"u{number}", "resourceVersion": str(number)}}
        own_writes.record(content, {}, content)
    kept = [
        number for number in range(5) if own_writes.includes(Version(uid=f"u{number}", resource_version=str(number)))
    ]
    assert kept == [2, 3, 4]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), JSON), st.dictionaries(st.sampled_from("abc"), JSON))
def test_a_merge_patch_leaves_what_it_does_not_name_and_takes_away_what_it_names_none(
    base: dict[str, Any], patch: dict[str, Any]
) -> None:
    merged = merge_patch(base, patch)
    for name in {*base, *patch}:
        if name not in patch:
            assert merged[name] == base[name]
        elif patch[name] is None:
            assert name not in merged
        elif not isinstance(patch[name], dict):
            assert merged[name] == patch[name]
        else:
            assert merged[name] == merge_patch(base.get(name, {}), patch[name])


# --- when events are checked


def make_event_filter() -> tuple[EventFilter, WorkQueue[Any], OwnWrites]:
    queue: WorkQueue[Any] = WorkQueue(random.Random(1), lambda: 0.0)
    own_writes = OwnWrites()
    return EventFilter(queue, own_writes), queue, own_writes


def make_event(kind: Kind, version: str) -> Object:
    return {"kind": kind.name, "metadata": {"uid": "u", "resourceVersion": version}}


async def test_an_event_between_two_reconciles_enqueues_at_once_unless_it_is_our_own() -> None:
    event_filter, queue, own_writes = make_event_filter()
    own_writes.record(make_event(CLUSTERS, "6"), {}, make_event(CLUSTERS, "7"))
    event_filter.handle_event(KEY, make_event(CLUSTERS, "7"))
    assert len(queue) == 0
    event_filter.handle_event(KEY, make_event(CLUSTERS, "8"))
    assert await queue.get() is KEY
    # The reconcile that it has caused sees it: none waits behind that one.
    assert not event_filter.is_edited(KEY)


@pytest.mark.parametrize(
    ("versions", "is_enqueued"),
    [(["7"], False), (["8"], True), (["7", "8"], True), (["8", "7"], True), ([], False)],
)
async def test_an_own_event_that_is_faster_than_its_answer_causes_no_reconcile(versions, is_enqueued) -> None:
    event_filter, queue, own_writes = make_event_filter()
    queue.add(KEY)
    await queue.get()
    for version in versions:
        event_filter.handle_event(KEY, make_event(CONFIG_MAPS, version))
    assert not event_filter.is_edited(KEY)
    own_writes.record(make_event(CONFIG_MAPS, "6"), {}, make_event(CONFIG_MAPS, "7"))
    queue.finish(KEY)
    event_filter.end_reconcile(KEY)
    assert len(queue) == is_enqueued
    # Each reconcile checks its own events only.
    queue.add(KEY)
    await queue.get()
    queue.finish(KEY)
    event_filter.end_reconcile(KEY)
    assert len(queue) == 0


async def test_an_edit_during_a_reconcile_is_known_to_it() -> None:
    event_filter, queue, _ = make_event_filter()
    queue.add(KEY)
    await queue.get()
    event_filter.handle_event(KEY, make_event(PODS, "7"))
    assert not event_filter.is_edited(KEY)
    event_filter.handle_event(KEY, make_event(CLUSTERS, "8"))
    assert event_filter.is_edited(KEY)
    queue.finish(KEY)
    event_filter.end_reconcile(KEY)
    assert not event_filter.is_edited(KEY)


# --- what a reconcile leaves to the next one


async def test_an_edit_is_one_short_reconcile_and_one_for_the_status() -> None:
    world = World()
    await world.settle()
    before, num_events = world.status, len(world.kubernetes.events)
    world.edit(chunkSizes={"prefillHeavy": 1024})
    world.kubernetes.calls.clear()
    assert await world.reconcile() == 0.2
    assert world.kubernetes.writes == [("patch", "configmaps")]
    assert [call for call in world.kubernetes.calls if call[0] in ("get", "list")] == [
        ("get", "servingclusters"),
        ("list", "configmaps"),
        ("list", "deployments"),
        ("list", "pods"),
    ]
    assert all(plan == world.plan for plan in world.routers.plans.values())
    assert world.status == before
    world.kubernetes.calls.clear()
    await world.reconcile()
    assert world.kubernetes.writes == [("patch_status", "servingclusters")]
    assert world.conditions["Progressing"] == ("False", "Settled")
    assert world.status["effective"]["chunkSizes"]["prefillHeavy"] == 1024
    assert len(world.kubernetes.events) == num_events


async def test_late_routers_are_reported() -> None:
    world = World()
    await world.settle()
    world.routers.late = set(world.engine_uids)
    world.edit(chunkSizes={"prefillHeavy": 1024})
    await world.reconcile()
    world.now += 0.2
    await world.reconcile()
    assert world.conditions["Progressing"] == ("True", "ApplyingPlan")


async def test_endless_edits_defer_children_and_status_for_a_limited_time() -> None:
    world = World()
    reconciler = Reconciler(
        world.kubernetes,
        world.routers,
        world.settings,
        now=lambda: world.now,
        now_text=lambda: "t",
        is_edited=lambda _: True,
    )
    world.reconciler = reconciler
    await world.settle()
    told_s = []
    for number in range(60):
        world.edit(chunkSizes={"prefillHeavy": 600 + number})
        world.kubernetes.calls.clear()
        await world.reconcile()
        assert world.kubernetes.writes[0] == ("patch", "configmaps")
        if ("patch_status", "servingclusters") in world.kubernetes.writes:
            told_s.append(world.now)
        world.now += 0.1
    assert len(told_s) >= 5
    assert all(later - sooner <= 1.2 for sooner, later in itertools.pairwise(told_s))


async def test_own_writes_of_a_flip_enqueue_nothing_and_deletion_costs_do() -> None:
    world, own_writes = World(), OwnWrites()
    world.reconciler = Reconciler(
        world.kubernetes,
        world.routers,
        world.settings,
        now=lambda: world.now,
        now_text=lambda: "t",
        own_writes=own_writes,
    )

    async def reconcile_and_list_foreign_events() -> set[str]:
        """Reconciles once; returns the kinds of the objects that it wrote and whose events enqueue."""
        before = world.snapshot()
        await world.reconcile()
        return {
            kind
            for (kind, *address), version in world.snapshot().items()
            if version != before.get((kind, *address))
            and not own_writes.includes(read_version(world.kubernetes.objects[kind, *address]))
        }

    await world.settle()
    world.edit(prefillHeavy=3)
    assert [await reconcile_and_list_foreign_events(), await reconcile_and_list_foreign_events()] == [set(), set()]
    assert sum(pod["metadata"]["labels"][ROLE_LABEL] == "p-heavy" for pod in world.engines) == 3
    world.edit(replicas=3)
    # Who leaves is in the plan first, then marked; only who is seen to be marked may go.
    assert [await reconcile_and_list_foreign_events(), await reconcile_and_list_foreign_events()] == [set(), {"Pod"}]
