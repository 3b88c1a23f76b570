"""Reconciles of a cluster on a fake API server, with all that can go wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_harness import KEY, World
from fake_kubernetes import make_cluster
from test_conditions import find

from sluice.v1 import control_pb2
from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.kubernetes.errors import BusyError, ForbiddenError
from sluice_operator.kubernetes.kinds import CLUSTERS, PODS
from sluice_operator.planning.rollout_gate import GateDecision
from sluice_operator.planning.scale_down import ScaleDecision


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
        "Autoscaled": ("False", "Off"),
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
    world.now += 35.0
    for _ in range(3):
        after_s = await world.reconcile()
        assert after_s is not None
        assert after_s >= 10.0


@pytest.mark.parametrize("is_ending", [True, False])
async def test_of_a_cluster_that_is_gone_nothing_is_kept(*, is_ending: bool) -> None:
    world = World()
    await world.settle()
    recorded: list[tuple[Any, ...]] = []
    world.reconciler._record_conditions = lambda *call: recorded.append(call)
    state = world.reconciler._states[KEY]
    ended: list[str] = []
    state.tuner.stop = lambda: ended.append("tuner")
    state.scaler.stop = lambda: ended.append("scaler")
    writes = list(world.kubernetes.writes)
    if is_ending:
        world.kubernetes.edit(CLUSTERS, "tiny", {"metadata": {"deletionTimestamp": "now"}})
    else:
        world.kubernetes.remove(CLUSTERS, "default", "tiny")
    assert world.reconciler.is_known(KEY)
    assert await world.reconcile() is None
    assert not world.reconciler.is_known(KEY)
    assert recorded == [("default", "tiny", ())]
    assert world.routers.addresses[KEY] == {}
    assert ended == ["tuner", "scaler"]
    assert world.kubernetes.writes == writes
    assert await world.reconcile() is None
    assert len(recorded) == 2


async def test_a_cluster_made_anew_under_the_same_name_begins_anew() -> None:
    world = World()
    await world.settle()
    before = world.reconciler._states[KEY]
    ended: list[str] = []
    before.tuner.stop = lambda: ended.append("tuner")
    before.scaler.stop = lambda: ended.append("scaler")
    world.kubernetes.remove(CLUSTERS, "default", "tiny")
    world.kubernetes.collect_garbage()
    world.kubernetes.put(make_cluster(replicas=2))
    await world.reconcile()
    after = world.reconciler._states[KEY]
    assert after is not before
    assert ended == ["tuner", "scaler"]
    assert after.uid == world.kubernetes.find(CLUSTERS, "tiny")["metadata"]["uid"] != before.uid
    assert after.first_reconcile_s == world.now
    await world.settle()
    assert len(world.engines) == 2


@pytest.mark.parametrize("seen_with", ["servingclusters", "networkpolicies"])
async def test_an_edit_during_a_reconcile_puts_children_and_status_off_for_a_second_at_most(seen_with: str) -> None:
    """It waits for a short reconcile only, and edits without end do not starve the status."""
    world = World()
    await world.settle()
    is_edited = False

    def see(_verb: str, plural: str) -> None:
        nonlocal is_edited
        is_edited = is_edited or plural == seen_with

    world.kubernetes.before = see
    world.reconciler._is_edited = lambda key: key == KEY and is_edited
    world.edit(engine={"maxBatchTokens": 4096})
    began = len(world.kubernetes.calls)
    ends = []
    for _ in range(6):
        is_edited = False
        ends.append(await world.reconcile())
        world.now += 0.3
    calls = world.kubernetes.calls[began:]
    # 1.2 s after the first one the status is written all the same.
    assert ends[:4] == [0.2] * 4
    assert ends[4] != 0.2
    assert calls.count(("patch_status", "servingclusters")) == 1
    assert (("apply", "deployments") in calls[: len(calls) // 2]) == (seen_with == "networkpolicies")


FAILURE = Failure(reason=Reason.NAME_CONFLICT, message="service x is another's")
UNAVAILABLE, REFUSED = (Failure(reason=reason, message="no") for reason in (Reason.NOT_AVAILABLE, Reason.REFUSED))
UNDRAINED = ScaleDecision(replicas=2, victims=frozenset({"e1", "e2"}), undrained=frozenset({"e1", "e2"}))


@pytest.mark.parametrize(
    ("fields", "is_pending", "wake_s"),
    [
        ({}, False, None),
        ({"failures": (FAILURE,)}, False, 30.0),
        ({"refusal": UNAVAILABLE}, False, 30.0),
        ({"refusal": REFUSED}, False, None),
        ({}, True, 11.0),
        ({"attainment": {"": SloCounts(num_finished=1)}}, False, 11.0),
        ({"rollout": GateDecision(state=None, wake_in_s=3.0)}, False, 3.0),
        ({"waiting_upgrade": "an image waits"}, False, 30.0),
        # Of two that drain the older one, which began 5 s ago.
        ({"scale": UNDRAINED}, False, 30.0),
        ({"scale": UNDRAINED, "cluster": None}, False, None),
        ({"failures": (FAILURE,), "rollout": GateDecision(state=None, wake_in_s=3.0)}, True, 3.0),
        ({"failures": (FAILURE,), "rollout": GateDecision(state=None, wake_in_s=300.0)}, True, 11.0),
    ],
    ids=[
        "nothing",
        "a failure",
        "something is missing",
        "a refusal",
        "measurements wait",
        "measurements change",
        "a roll",
        "an upgrade",
        "drains",
        "drains without a spec",
        "a roll before measurements and a failure",
        "measurements before a failure and a roll",
    ],
)
def test_the_next_reconcile_comes_when_the_first_of_all_reasons_asks_for_it(
    fields: dict[str, Any], wake_s: float | None, *, is_pending: bool
) -> None:
    world = World()
    inputs = replace(find(spec={"engine": {"drainTimeoutSeconds": 30}}), **fields)
    state: Any = SimpleNamespace(measured_s=world.now - 4.0, drain_started_s={"e1": world.now, "e2": world.now - 5.0})
    found = world.reconciler._compute_requeue_s(inputs, state, has_pending_measurements=is_pending)
    assert found == wake_s


def test_a_drain_whose_time_is_over_is_looked_at_again() -> None:
    world = World()
    inputs = replace(find(spec={"engine": {"drainTimeoutSeconds": 30}}), scale=UNDRAINED)
    state: Any = SimpleNamespace(measured_s=0.0, drain_started_s={"e1": world.now, "e2": world.now - 500.0})
    found = world.reconciler._compute_requeue_s(inputs, state, has_pending_measurements=False)
    assert found == 30.0
