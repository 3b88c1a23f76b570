"""Reconciles beside other writers: foreign, edited and deleted children, and clusters that come and go."""

from __future__ import annotations

import pytest
from cluster_harness import KEY, World
from fake_kubernetes import make_cluster

from sluice_operator.kubernetes.kinds import CLUSTERS, CONFIG_MAPS, DEPLOYMENTS, DISRUPTION_BUDGETS, SERVICES


async def test_a_foreign_child_with_our_name_is_refused_and_left_alone() -> None:
    world = World()
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "tiny-router", "namespace": "default"},
        "spec": {"ports": [{"port": 1}]},
    }
    world.kubernetes.put(foreign)
    version = world.kubernetes.find(SERVICES, "tiny-router")["metadata"]["resourceVersion"]
    await world.settle()
    assert world.kubernetes.find(SERVICES, "tiny-router")["metadata"]["resourceVersion"] == version
    assert world.conditions["Degraded"] == ("True", "NameConflict")
    assert "tiny-router" in world.message("Degraded")
    assert len(world.engines) == 4
    world.kubernetes.remove(SERVICES, "default", "tiny-router")
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")


async def test_a_foreign_plan_is_refused_and_left_alone() -> None:
    world = World()
    world.kubernetes.put(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tiny-plan"}, "data": {"mine": "1"}}
    )
    await world.settle()
    assert world.kubernetes.find(CONFIG_MAPS, "tiny-plan")["data"] == {"mine": "1"}
    assert world.conditions["Degraded"] == ("True", "NameConflict")


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"replicas": 9}},
        {"spec": {"strategy": {"rollingUpdate": {"maxSurge": 3}}}},
        {"metadata": {"labels": {"sluice.dev/cluster": None}}},
        {"metadata": {"labels": {"sluice.dev/cluster": "other"}}},
    ],
    ids=["replicas", "strategy", "label-removed", "label-changed"],
)
async def test_a_child_edited_by_hand_is_set_right(change) -> None:
    world = World()
    await world.settle()
    spec, labels = world.deployment()["spec"], world.deployment()["metadata"]["labels"]
    world.kubernetes.edit(DEPLOYMENTS, "tiny-engine", change)
    await world.reconcile()
    await world.settle()
    assert world.deployment()["spec"] == spec
    assert world.deployment()["metadata"]["labels"] == labels


async def test_a_child_deleted_by_hand_comes_back() -> None:
    world = World()
    await world.settle()
    world.kubernetes.remove(SERVICES, "default", "tiny-engines")
    await world.settle()
    assert world.kubernetes.find(SERVICES, "tiny-engines")


@pytest.mark.parametrize("damage", ["deleted", "emptied", "garbled", "unlabelled", "edited"])
async def test_a_plan_damaged_by_hand_is_made_again_and_its_number_grows(damage) -> None:
    world = World()
    await world.settle()
    generation, engines = world.plan.generation, world.engine_uids
    match damage:
        case "deleted":
            world.kubernetes.remove(CONFIG_MAPS, "default", "tiny-plan")
        case "emptied":
            world.kubernetes.edit(CONFIG_MAPS, "tiny-plan", {"data": {"plan.json": None}})
        case "garbled":
            world.kubernetes.edit(CONFIG_MAPS, "tiny-plan", {"data": {"plan.json": "{"}})
        case "edited":
            text = world.kubernetes.find(CONFIG_MAPS, "tiny-plan")["data"]["plan.json"]
            world.kubernetes.edit(CONFIG_MAPS, "tiny-plan", {"data": {"plan.json": text.replace("512", "511")}})
        case "unlabelled":
            world.kubernetes.edit(CONFIG_MAPS, "tiny-plan", {"metadata": {"labels": None}})
    await world.reconcile()
    await world.settle()
    assert world.plan.generation == generation + (damage != "unlabelled")
    assert {part.engine_id for part in world.plan.engines} == engines
    assert all(plan == world.plan for plan in world.routers.plans.values())


@pytest.mark.parametrize("text", [None, "{"], ids=["emptied", "garbled"])
async def test_the_number_of_a_damaged_plan_is_known_without_the_routers(text: str | None) -> None:
    world = World()
    await world.settle()
    generation = world.plan.generation
    world.routers.is_silent = True
    world.kubernetes.edit(CONFIG_MAPS, "tiny-plan", {"data": {"plan.json": text}})
    await world.reconcile()
    assert world.plan.generation == generation + 1


async def test_a_cluster_deleted_while_it_is_created_leaves_nothing() -> None:
    world = World()
    num_applied = 0

    def delete_in_the_middle(verb: str, _plural: str) -> None:
        nonlocal num_applied
        num_applied += verb == "apply"
        if num_applied == 4 and ("ServingCluster", "default", "tiny") in world.kubernetes.objects:
            world.kubernetes.remove(CLUSTERS, "default", "tiny")

    world.kubernetes.after = delete_in_the_middle
    await world.reconcile()
    await world.reconcile()
    world.kubernetes.collect_garbage()
    assert world.kubernetes.objects == {}
    assert world.routers.addresses[KEY] == {}


async def test_a_cluster_that_is_on_its_way_out_is_left_alone() -> None:
    world = World()
    await world.settle()
    world.kubernetes.edit(CLUSTERS, "tiny", {"metadata": {"deletionTimestamp": "now"}})
    world.kubernetes.calls.clear()
    await world.reconcile()
    assert world.kubernetes.writes == []
    assert world.routers.addresses[KEY] == {}


async def test_a_cluster_made_anew_under_its_old_name_waits_for_the_old_children_to_go() -> None:
    world = World()
    await world.settle()
    old = world.engine_uids
    world.kubernetes.remove(CLUSTERS, "default", "tiny")
    world.kubernetes.put(make_cluster())
    versions = world.snapshot()
    await world.reconcile()
    # Nothing of the old cluster is adopted or edited while the collector is late.
    assert {address: version for address, version in world.snapshot().items() if address in versions} == versions
    await world.settle()
    assert not old & world.engine_uids
    assert world.conditions["Ready"] == ("True", "Serving")
    assert world.plan.cluster_uid == world.kubernetes.find(CLUSTERS, "tiny")["metadata"]["uid"]


async def test_a_foreign_object_that_carries_our_labels_is_not_deleted() -> None:
    world = World()
    await world.settle()
    labels = world.kubernetes.find(DISRUPTION_BUDGETS, "tiny-engine")["metadata"]["labels"]
    foreign = {
        "apiVersion": DISRUPTION_BUDGETS.api_version,
        "kind": DISRUPTION_BUDGETS.name,
        "metadata": {"name": "mine", "namespace": "default", "labels": labels},
    }
    world.kubernetes.put(foreign)
    world.edit(replicas=1)
    await world.settle()
    names = [item["metadata"]["name"] for item in world.kubernetes.select(DISRUPTION_BUDGETS)]
    assert names == ["mine", "tiny-router"]


async def test_an_object_that_takes_a_childs_name_meanwhile_is_left_alone() -> None:
    world = World()
    await world.settle()
    is_taken = False

    def take(verb: str, plural: str) -> None:
        nonlocal is_taken
        if (verb, plural) == ("apply", "services") and not is_taken:
            is_taken = True
            world.kubernetes.remove(SERVICES, "default", "tiny-router")
            world.kubernetes.put(
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "metadata": {"name": "tiny-router", "namespace": "default"},
                    "spec": {"mine": 1},
                }
            )

    world.kubernetes.before = take
    world.edit(router={"service": {"type": "NodePort"}})
    await world.settle()
    assert is_taken
    assert world.kubernetes.find(SERVICES, "tiny-router")["spec"] == {"mine": 1}
    assert world.conditions["Degraded"] == ("True", "NameConflict")


async def test_a_field_that_the_spec_drops_is_dropped_from_the_child() -> None:
    world = World(router={"replicas": 2, "service": {"annotations": {"a/b": "c"}}})
    await world.settle()
    assert world.kubernetes.find(SERVICES, "tiny-router")["metadata"]["annotations"]["a/b"] == "c"
    world.edit(router={"service": None})
    await world.settle()
    assert "a/b" not in world.kubernetes.find(SERVICES, "tiny-router")["metadata"]["annotations"]
