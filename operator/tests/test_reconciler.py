"""Reconciles of a cluster on a fake API server, with all that can go wrong."""

from __future__ import annotations

import itertools

import pytest
from cluster_harness import COST, KEY, World
from fake_kubernetes import make_cluster

from sluice.v1 import control_pb2, plan_pb2
from sluice_operator.controller.cluster_state import DEFER_S
from sluice_operator.controller.plan_step import DRAIN_MARGIN_S
from sluice_operator.kubernetes.interface import (
    CLUSTERS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    BusyError,
    ForbiddenError,
    InvalidError,
)


async def test_a_new_cluster_gets_its_children_a_plan_and_roles() -> None:
    world = World()
    await world.settle()
    kinds = sorted((kind, name) for kind, _, name in world.kubernetes.objects if kind != "Pod")
    assert kinds == [
        ("ConfigMap", "tiny-plan"),
        ("Deployment", "tiny-engine"),
        ("Deployment", "tiny-router"),
        ("NetworkPolicy", "tiny-engine"),
        ("NetworkPolicy", "tiny-router"),
        ("PodDisruptionBudget", "tiny-engine"),
        ("PodDisruptionBudget", "tiny-router"),
        ("Service", "tiny-engines"),
        ("Service", "tiny-router"),
        ("Service", "tiny-router-control"),
        ("ServiceAccount", "tiny-engine"),
        ("ServiceAccount", "tiny-router"),
        ("ServingCluster", "tiny"),
    ]
    assert sorted(world.roles.values()) == ["d-heavy", "d-heavy", "p-heavy", "p-heavy"]
    assert world.conditions == {
        "Ready": ("True", "Serving"),
        "Progressing": ("False", "Settled"),
        "Degraded": ("False", "AsExpected"),
        "SpecValid": ("True", "Valid"),
        "EnginesReady": ("True", "AllReady"),
        "RouterReady": ("True", "AllReady"),
        "NetworkReady": ("True", "TCP"),
        "SLOMet": ("Unknown", "NoTraffic"),
        "Autotuned": ("False", "Off"),
    }
    assert world.status["effective"] == {
        "prefillHeavy": 2,
        "decodeHeavy": 2,
        "draining": 0,
        "strategy": "TaiChi",
        "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
    }
    assert world.status["planGeneration"] == world.plan.generation
    assert (world.status["replicas"], world.status["readyReplicas"]) == (4, 4)


async def test_every_child_belongs_to_the_cluster() -> None:
    world = World()
    await world.settle()
    uid = world.kubernetes.find(CLUSTERS, "tiny")["metadata"]["uid"]
    for (kind, _, name), item in world.kubernetes.objects.items():
        if kind not in ("Pod", "ServingCluster"):
            owner = item["metadata"]["ownerReferences"][0]
            assert (owner["uid"], owner["controller"]) == (uid, True), (kind, name)


async def test_a_settled_cluster_causes_no_writes_and_few_reads() -> None:
    world = World()
    await world.settle()
    world.kubernetes.calls.clear()
    await world.reconcile()
    assert world.kubernetes.writes == []
    # The client asks for definitions once in a while only.
    assert len([verb for verb, _ in world.kubernetes.calls if verb != "discover"]) == 8


async def test_a_new_process_finds_everything_as_it_is() -> None:
    world = World()
    await world.settle()
    before = world.snapshot()
    world.start_operator()
    await world.settle()
    assert world.snapshot() == before


@pytest.mark.parametrize(
    ("edit", "roles", "sizes"),
    [
        ({"prefillHeavy": "25%"}, (1, 3), {(1, 512), (2, 64)}),
        ({"prefillHeavy": 3}, (3, 1), {(1, 512), (2, 64)}),
        ({"chunkSizes": {"prefillHeavy": 1024}}, (2, 2), {(1, 1024), (2, 64)}),
        ({"chunkSizes": {"decodeHeavy": 0}}, (2, 2), {(1, 512), (2, 0)}),
        ({"strategy": "Disaggregated"}, (2, 2), {(1, 2048), (2, 0)}),
        ({"strategy": "Aggregated"}, (2, 2), {(1, 512), (2, 512)}),
        ({"slo": {"ttftMilliseconds": 100}}, (2, 2), {(1, 512), (2, 64)}),
        ({"parameters": {"watermarkPercent": 80}}, (2, 2), {(1, 512), (2, 64)}),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else None,
)
async def test_a_live_edit_replaces_no_pod_and_is_one_plan(edit, roles, sizes) -> None:
    world = World()
    await world.settle()
    before, generation = world.engine_uids, world.plan.generation
    template = world.deployment()["spec"]["template"]
    world.edit(**edit)
    await world.settle()
    assert world.engine_uids == before
    assert world.deployment()["spec"]["template"] == template
    assert world.plan.generation == generation + 1
    labels = list(world.roles.values())
    assert (labels.count("p-heavy"), labels.count("d-heavy")) == roles
    assert {(part.role, part.chunk_size_tokens) for part in world.plan.engines} == sizes


async def test_the_plan_is_stored_before_anything_else_is_written() -> None:
    world = World()
    await world.settle()
    world.edit(prefillHeavy=3, router={"replicas": 3})
    world.kubernetes.calls.clear()
    await world.reconcile()
    assert world.kubernetes.writes[0] == ("patch", "configmaps")


async def test_a_slider_is_in_force_whatever_becomes_of_the_children() -> None:
    world = World()
    await world.settle()

    def fail(verb: str, plural: str) -> None:
        if (verb, plural) == ("apply", "deployments"):
            raise BusyError("the API server is busy")

    world.kubernetes.before = fail
    world.edit(chunkSizes={"prefillHeavy": 1024}, router={"replicas": 3})
    await world.reconcile()
    assert world.deployment()["spec"]["replicas"] == 4
    plans = world.routers.plans.values()
    assert plans
    assert all(1024 in {part.chunk_size_tokens for part in plan.engines} for plan in plans)


async def test_a_role_is_labelled_only_after_it_is_acknowledged() -> None:
    world = World()
    await world.settle()
    before = world.roles
    world.routers.is_silent = True
    world.edit(prefillHeavy=3)
    await world.settle()
    assert world.roles == before
    world.routers.is_silent = False
    await world.settle()
    assert sum(role == "p-heavy" for role in world.roles.values()) == 3


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
    limit_s = 30.0 + DRAIN_MARGIN_S
    assert await world.reconcile() == DEFER_S
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
    assert await world.reconcile() == pytest.approx(20.0 + DRAIN_MARGIN_S)


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


async def test_a_bad_image_stops_and_says_why_and_editing_back_heals() -> None:
    world = World()
    world.kubernetes.broken_images.add("broken:1")
    await world.settle()
    template = world.deployment()["spec"]["template"]
    world.edit(engine={"image": "broken:1"})
    await world.settle()
    ready = [pod for pod in world.engines if pod["status"]["phase"] == "Running"]
    assert len(ready) == 3
    assert world.conditions["Ready"] == ("True", "Serving")
    assert world.conditions["Progressing"] == ("False", "RolloutStopped")
    assert world.conditions["Degraded"] == ("True", "ImagePullBackOff")
    assert "broken:1" in world.message("Degraded")
    kept = {pod["metadata"]["uid"] for pod in ready}
    world.edit(engine={"image": None})
    await world.settle()
    assert kept < world.engine_uids
    assert world.deployment()["spec"]["template"] == template
    assert world.conditions["Progressing"] == ("False", "Settled")
    assert world.conditions["Degraded"] == ("False", "AsExpected")


async def test_a_restarting_edit_replaces_every_engine_one_at_a_time() -> None:
    world = World()
    await world.settle()
    before, routers = world.engine_uids, world.deployment("router")["spec"]["template"]
    world.edit(engine={"maxBatchTokens": 4096})
    fewest = len(before)
    for _ in range(40):
        world.kubernetes.run_controllers()
        fewest = min(fewest, sum("deletionTimestamp" not in pod["metadata"] for pod in world.engines))
        await world.reconcile()
    assert not before & world.engine_uids
    assert fewest == 3
    assert world.deployment("router")["spec"]["template"] == routers
    assert sorted(world.roles.values()) == ["d-heavy", "d-heavy", "p-heavy", "p-heavy"]


async def test_a_slider_above_what_old_engines_can_run_is_in_force_as_they_are_replaced() -> None:
    """The plan does not wait for the roll: old engines run as much as they can of it, new ones all."""
    world = World()
    await world.settle()
    sizes = {"prefillHeavy": 4096, "decodeHeavy": 512}
    world.edit(engine={"maxBatchTokens": 4096}, chunkSizes=sizes)
    await world.reconcile()
    await world.reconcile()
    assert world.plan.unnamed_chunk_size_tokens == 512
    assert world.status["effective"]["chunkSizes"] == {"prefillHeavy": 2048, "decodeHeavy": 512}
    await world.settle()
    assert world.status["effective"]["chunkSizes"] == sizes
    assert world.conditions["Progressing"] == ("False", "Settled")
    assert world.conditions["Degraded"] == ("False", "AsExpected")


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


async def test_an_invalid_spec_changes_nothing_and_says_why() -> None:
    world = World()
    await world.settle()
    spec = world.deployment()["spec"]
    world.edit(prefillHeavy=9)
    await world.settle()
    assert world.deployment()["spec"] == spec
    assert world.conditions["SpecValid"] == ("False", "Refused")
    assert "spec.prefillHeavy" in world.message("SpecValid")
    assert world.conditions["Ready"] == ("True", "Serving")
    assert world.conditions["Degraded"] == ("True", "SpecInvalid")
    assert all(plan == world.plan for plan in world.routers.plans.values())


@pytest.mark.parametrize("restarts", [False, True], ids=["the same process", "a new one"])
async def test_while_a_spec_is_refused_the_last_accepted_one_stays_in_force(*, restarts: bool) -> None:
    world = World()
    await world.settle()
    before = world.engine_uids
    world.edit(prefillHeavy=9, slo={"ttftMilliseconds": 1})
    await world.settle()
    if restarts:
        world.start_operator()
    for pod in world.engines:
        world.kubernetes.remove(PODS, "default", pod["metadata"]["name"])
    await world.settle()
    assert not before & world.engine_uids
    # The new pods have the roles and the objectives of the old spec.
    assert {part.engine_id for part in world.plan.engines} == world.engine_uids
    assert sorted(world.roles.values()) == ["d-heavy", "d-heavy", "p-heavy", "p-heavy"]
    assert world.plan.slo_classes[0].ttft_milliseconds > 1
    assert world.conditions["SpecValid"] == ("False", "Refused")
    assert "spec.prefillHeavy" in world.message("Degraded")
    world.edit(prefillHeavy=1)
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")
    assert sorted(world.roles.values()) == ["d-heavy", "d-heavy", "d-heavy", "p-heavy"]
    assert world.plan.slo_classes[0].ttft_milliseconds == 1


async def test_routers_that_start_while_a_spec_is_refused_get_the_plan_in_force() -> None:
    world = World()
    await world.settle()
    world.edit(prefillHeavy=9)
    await world.settle()
    plan = world.plan
    world.start_operator()
    world.routers.plans.clear()
    await world.settle()
    assert len(world.routers.plans) == 2
    assert all(found == plan for found in world.routers.plans.values())
    assert world.conditions["SLOMet"] == ("Unknown", "NoTraffic")


async def test_a_new_process_says_nothing_of_routers_before_they_had_time_to_answer() -> None:
    world = World()
    await world.settle()
    before = world.snapshot()
    world.start_operator()
    world.routers.is_silent = True
    after_s = await world.reconcile()
    assert after_s is not None
    assert world.snapshot() == before
    world.now += after_s
    await world.reconcile()
    assert world.conditions["Progressing"] == ("True", "ApplyingPlan")
    # What was in force stays known.
    assert world.status["effective"]["prefillHeavy"] == 2
    world.routers.is_silent = False
    await world.settle()
    assert world.conditions["Progressing"] == ("False", "Settled")


async def test_forbidden_writes_are_reported_and_the_rest_is_applied() -> None:
    world = World()

    def forbid(verb: str, plural: str) -> None:
        if (verb, plural) == ("apply", "networkpolicies"):
            raise ForbiddenError("networkpolicies is forbidden")

    world.kubernetes.before = forbid
    await world.settle()
    assert world.conditions["Degraded"] == ("True", "Forbidden")
    assert world.conditions["Ready"] == ("True", "Serving")
    assert await world.reconcile() == 30.0


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (("apply", "deployments"), InvalidError("spec.template: unknown"), "PodTemplateRefused"),
        (("apply", "services"), InvalidError("spec.ports: invalid"), "Forbidden"),
        (("apply", "deployments"), ForbiddenError("deployments is forbidden"), "Forbidden"),
        (("apply", "services"), ForbiddenError("exceeded quota: services=1"), "QuotaExceeded"),
        (("apply", "deployments"), InvalidError("exceeded quota: cpu=1"), "QuotaExceeded"),
    ],
    ids=["invalid pods", "invalid service", "forbidden", "quota", "quota of pods"],
)
async def test_each_refused_write_is_reported_by_its_cause(call, error, reason: str) -> None:
    world = World()

    def refuse(*called: str) -> None:
        if called == call:
            raise error

    world.kubernetes.before = refuse
    await world.settle()
    assert world.conditions["Degraded"] == ("True", reason)
    assert str(error) in world.message("Degraded")
    world.kubernetes.before = lambda *_: None
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")


async def test_a_lost_event_is_no_reason_to_reconcile_again() -> None:
    world = World()

    def forbid(verb: str, plural: str) -> None:
        if (verb, plural) == ("create", "events"):
            raise ForbiddenError("events is forbidden")

    world.kubernetes.before = forbid
    await world.settle()
    assert world.kubernetes.events == []
    assert world.conditions["Ready"] == ("True", "Serving")
    assert world.conditions["Degraded"] == ("False", "AsExpected")


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


async def test_the_status_of_one_cluster_is_not_written_to_the_next_of_its_name() -> None:
    world = World()
    await world.settle()
    counters = control_pb2.ClassCounters(num_finished=10, num_met_ttft=9, num_met_tpot=9, num_met_both=8)
    for finished in (0, 10):
        counters.num_finished = finished
        world.routers.counters[:] = [counters]
        for status in world.routers.statuses(KEY).values():
            world.reconciler.record_status(KEY, status)
    world.now += 20.0

    def replace_cluster(verb: str, plural: str) -> None:
        if (verb, plural) == ("patch_status", "servingclusters"):
            world.kubernetes.before = lambda *_: None
            world.kubernetes.remove(CLUSTERS, "default", "tiny")
            world.kubernetes.put(make_cluster())

    world.kubernetes.before = replace_cluster
    assert await world.reconcile() == 0.5
    assert world.status == {}
    world.routers.counters.clear()
    await world.settle()
    # Nor is what the routers of the former one counted.
    assert "attainment" not in world.status


@pytest.mark.parametrize("plural", ["pods", "deployments", "services"])
async def test_a_missing_right_to_list_is_reported(plural) -> None:
    world = World()
    await world.settle()

    def forbid(verb: str, kind: str) -> None:
        if (verb, kind) == ("list", plural):
            raise ForbiddenError(f"{plural} is forbidden")

    world.kubernetes.before = forbid
    for _ in range(3):
        assert await world.reconcile() == 0.5
    assert world.conditions["Degraded"] == ("True", "Forbidden")
    assert plural in world.message("Degraded")
    assert world.conditions["Ready"] == ("True", "Serving")
    assert world.kubernetes.events[-1]["reason"] == "Forbidden"
    world.kubernetes.before = lambda *_: None
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")


@pytest.mark.parametrize("plural", ["services", "configmaps"])
async def test_a_missing_right_to_get_is_reported(plural) -> None:
    world = World()

    def forbid(verb: str, kind: str) -> None:
        if (verb, kind) == ("get", plural):
            raise ForbiddenError(f"{plural} is forbidden")

    world.kubernetes.before = forbid
    assert await world.reconcile() == 0.5
    assert world.conditions["Degraded"] == ("True", "Forbidden")
    assert plural in world.message("Degraded")
    world.kubernetes.before = lambda *_: None
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")


async def test_a_pod_template_that_reaches_the_host_is_refused() -> None:
    world = World()
    await world.settle()
    spec = world.deployment()["spec"]
    world.edit(engine={"podTemplate": {"spec": {"hostNetwork": True}}})
    await world.settle()
    assert world.conditions["SpecValid"] == ("False", "PodTemplateRefused")
    assert world.deployment()["spec"] == spec


async def test_an_affinity_that_reaches_other_namespaces_is_refused() -> None:
    world = World()
    everywhere = {"topologyKey": "kubernetes.io/hostname", "namespaceSelector": {}}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": [everywhere]}
    world.edit(engine={"affinity": {"podAntiAffinity": rule}})
    await world.settle()
    assert world.conditions["SpecValid"] == ("False", "PodTemplateRefused")
    assert "spec.engine.affinity.podAntiAffinity" in world.message("SpecValid")


async def test_a_cluster_whose_only_prefill_engine_fails_makes_another() -> None:
    world = World(prefillHeavy=1)
    await world.settle()
    failed = next(uid for uid, role in world.roles.items() if role == "p-heavy")
    pod = next(pod for pod in world.engines if pod["metadata"]["uid"] == failed)
    change = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    world.kubernetes.edit(PODS, pod["metadata"]["name"], change)
    for _ in range(3):
        await world.reconcile()
    assert {part.engine_id for part in world.plan.engines if part.role == 1} > {failed}


async def test_measurements_are_written_every_fifteen_seconds_and_transitions_at_once() -> None:
    world = World()
    await world.settle()
    written = []

    def note(verb: str, _plural: str) -> None:
        if verb == "patch_status":
            written.append(world.now)

    world.kubernetes.after = note
    started_s = world.now
    for second in range(61):
        world.now = started_s + second
        world.routers.counters[:] = [
            control_pb2.ClassCounters(
                num_finished=10 * second, num_met_ttft=9 * second, num_met_tpot=9 * second, num_met_both=8 * second
            )
        ]
        for status in world.routers.statuses(KEY).values():
            world.reconciler.record_status(KEY, status)
        await world.reconcile()
    assert len(written) <= 5
    assert all(later - earlier >= 15 for earlier, later in itertools.pairwise(written[1:]))
    assert world.status["attainment"]["both"] == "80%"
    assert world.conditions["SLOMet"] == ("False", "Missed")


async def test_events_tell_of_transitions_once() -> None:
    world = World()
    await world.settle()
    reasons = [event["reason"] for event in world.kubernetes.events]
    assert reasons.count("Serving") == 1
    assert all(event["type"] == "Normal" for event in world.kubernetes.events)
    before = len(world.kubernetes.events)
    for _ in range(5):
        await world.reconcile()
    assert len(world.kubernetes.events) == before
    world.edit(prefillHeavy=9)
    await world.settle()
    assert world.kubernetes.events[-1]["type"] == "Warning"
    assert world.kubernetes.events[-1]["reason"] == "Refused"


async def test_monitors_exist_only_where_their_kind_does() -> None:
    world = World()
    world.kubernetes.has_monitors = True
    await world.settle()
    assert {name for kind, _, name in world.kubernetes.objects if kind == "ServiceMonitor"} == {
        "tiny-engine",
        "tiny-router",
    }


OTHER_SOURCE = {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}


@pytest.mark.parametrize(
    "model", [{"name": "other"}, {"revision": "b"}, {"source": OTHER_SOURCE}], ids=["name", "revision", "source"]
)
async def test_another_model_is_refused_once_one_has_served(model) -> None:
    world = World()
    await world.settle()
    before, template, plan = world.engine_uids, world.deployment()["spec"]["template"], world.plan
    world.edit(model=model)
    await world.settle()
    assert world.conditions["SpecValid"] == ("False", "ModelChanged")
    assert "another ServingCluster" in world.message("SpecValid")
    assert world.conditions["Ready"] == ("True", "Serving")
    # A new operator knows it too; no pod is replaced, and routers answer by the name that they had.
    world.start_operator()
    await world.settle()
    assert (world.engine_uids, world.deployment()["spec"]["template"]) == (before, template)
    assert world.plan.served_model_name == plan.served_model_name == "tiny"
    world.edit(model={"name": "tiny", "revision": None, "source": {"persistentVolumeClaim": {"path": "tiny"}}})
    await world.settle()
    assert world.conditions["SpecValid"] == ("True", "Valid")


async def test_a_model_that_never_served_may_be_corrected_and_one_that_does_may_get_another_name_for_clients() -> None:
    world = World(engine={"image": "broken:1"})
    world.kubernetes.broken_images.add("broken:1")
    await world.settle()
    world.edit(model={"name": "other"}, engine={"image": None})
    await world.settle()
    assert world.conditions["SpecValid"] == ("True", "Valid")
    assert world.conditions["Ready"] == ("True", "Serving")
    world.edit(model={"servedName": "mine"})
    await world.settle()
    assert world.conditions["SpecValid"] == ("True", "Valid")
    assert world.plan.served_model_name == "mine"


async def test_a_cluster_whose_traffic_ended_is_not_reconciled_without_a_pause() -> None:
    world = World()
    await world.settle()
    for count in (0, 10):
        counters = control_pb2.ClassCounters(
            num_finished=count, num_met_ttft=count, num_met_tpot=count, num_met_both=count
        )
        world.routers.counters[:] = [counters]
        for status in world.routers.statuses(KEY).values():
            world.reconciler.record_status(KEY, status)
    world.now += 20.0
    await world.reconcile()
    assert "attainment" in world.status
    for _ in range(3):
        # The attainment of five minutes stays as it is, so that nothing is written.
        world.now += 20.0
        after_s = await world.reconcile()
        assert after_s is not None
        assert after_s >= 10.0


async def test_a_drain_whose_end_cannot_be_written_is_tried_again_after_a_pause() -> None:
    world = World()
    await world.settle()
    world.routers.stuck = set(world.engine_uids)
    world.edit(replicas=3)
    for _ in range(3):
        await world.reconcile()

    def forbid(verb: str, plural: str) -> None:
        if (verb, plural) == ("patch", "pods"):
            raise ForbiddenError("pods is forbidden")

    world.kubernetes.before = forbid
    world.now += 30.0 + DRAIN_MARGIN_S
    for _ in range(3):
        after_s = await world.reconcile()
        assert after_s is not None
        assert after_s >= 10.0
