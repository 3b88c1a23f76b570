"""Engines leave nodes that are drained or about to go, before Kubernetes ends their pods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_harness import COST, World
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.records import EngineId
from sluice_operator.api.names import ClusterKey
from sluice_operator.kubernetes.kinds import NODES, PODS
from sluice_operator.planning.node_drains import choose_leaving
from sluice_operator.planning.node_notices import ANNOUNCEMENTS, CORDON, NodeNotices, read_notice
from sluice_operator.resources.pods.pod_status import Pod, read_pod

if TYPE_CHECKING:
    from collections.abc import Sequence

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "node-drains.md"
SPOT = "aws-node-termination-handler/spot-itn"
KARPENTER = "karpenter.sh/disrupted"


def make_node(name: str, *taints: str, unschedulable: bool = False) -> dict[str, Any]:
    spec = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints], "unschedulable": unschedulable}
    return {"apiVersion": "v1", "kind": NODES.name, "metadata": {"name": name}, "spec": spec}


def make_pod(name: str, node: str, *, is_ready: bool = True, is_ending: bool = False, model: str = "") -> Pod:
    content: dict[str, Any] = {
        "metadata": {"name": name, "uid": name, "labels": {"sluice.dev/model": model}},
        "spec": {"nodeName": node},
        "status": {"conditions": [{"type": "Ready", "status": str(is_ready)}]},
    }
    if is_ending:
        content["metadata"]["deletionTimestamp"] = "now"
    return read_pod(content)


def choose(
    pods: Sequence[Pod], *nodes: dict[str, Any], replicas: int = 4, draining: str = "", **loads: int
) -> list[str]:
    notices = NodeNotices()
    for node in nodes:
        notices.take_node(node)
    return sorted(
        choose_leaving(
            pods,
            notices,
            replicas=replicas,
            draining={EngineId(name) for name in draining.split()},
            loads={EngineId(name): load for name, load in loads.items()},
            find_model=lambda pod: pod.model_id,
        )
    )


FLEET = [make_pod(name, node) for name, node in (("a", "n1"), ("b", "n1"), ("c", "n2"), ("d", "n2"))]


# What nodes say.


@pytest.mark.parametrize("key", ANNOUNCEMENTS)
def test_each_taint_of_the_list_is_read(key: str) -> None:
    notice = read_notice(make_node("n", "gpu", key))
    assert notice is not None
    assert (notice.taint, notice.has_deadline) == (key, ANNOUNCEMENTS[key])


@pytest.mark.parametrize(
    "node", [make_node("n"), make_node("n", "gpu", "DeletionCandidateOfClusterAutoscaler"), {"metadata": {"name": "n"}}]
)
def test_other_nodes_announce_nothing(node: dict[str, Any]) -> None:
    assert read_notice(node) is None


def test_the_guide_lists_the_taints() -> None:
    rows = re.findall(r"^\| `(\S+)` \| .* \| (.+) \|$", GUIDE.read_text(), re.MULTILINE)
    assert rows == [(key, "all at once" if late else "one at a time") for key, late in ANNOUNCEMENTS.items()]


def test_a_cordon_counts_before_its_taint_is_there() -> None:
    notice = read_notice(make_node("n", unschedulable=True))
    assert notice is not None
    assert notice.taint == CORDON


def test_a_deadline_counts_more_than_a_cordon() -> None:
    notice = read_notice(make_node("n", CORDON, SPOT))
    assert notice is not None
    assert notice.taint == SPOT


def test_a_change_of_a_node_concerns_the_clusters_that_have_pods_there() -> None:
    notices, first, second = NodeNotices(), ClusterKey("a", "x"), ClusterKey("b", "y")
    notices.take_pod(first, {"spec": {"nodeName": "n1"}})
    notices.take_pod(second, {"spec": {"nodeName": "n2"}})
    notices.take_pod(second, {"spec": {}})
    notices.take_pod(second, {})
    assert notices.take_node(make_node("n1")) == set()
    assert notices.take_node(make_node("n1", CORDON)) == {first}
    # A heartbeat changes a node every few minutes.
    assert notices.take_node(make_node("n1", CORDON, "gpu")) == set()
    assert notices.take_node(make_node("n1")) == {first}
    assert notices.take_node(make_node("n2", SPOT)) == {second}
    assert notices.take_node(make_node("n2", SPOT), is_gone=True) == {second}
    assert notices.find("n2") is None
    # Another one of this name has had no pod yet.
    assert notices.take_node(make_node("n2", SPOT)) == set()


# Who leaves.


@pytest.mark.parametrize(
    ("nodes", "draining", "leaving"),
    [
        ([make_node("n1"), make_node("n2")], "", ""),
        ([make_node("n1", CORDON)], "", "b"),
        ([make_node("n1", CORDON)], "a", "a"),
        ([make_node("n1", KARPENTER), make_node("n2", CORDON)], "", "b"),
        ([make_node("n1", SPOT)], "", "a b"),
        ([make_node("n1", SPOT), make_node("n2", CORDON)], "", "a b"),
        ([make_node("n1", SPOT), make_node("n2", SPOT)], "", ""),
    ],
    ids=["none", "one at a time", "who drains goes on", "the least loaded", "a deadline", "no more", "never all"],
)
def test_who_leaves(nodes: list[dict[str, Any]], draining: str, leaving: str) -> None:
    assert choose(FLEET, *nodes, draining=draining, a=5, b=1, c=2, d=3) == leaving.split()


def test_an_engine_that_nobody_reports_has_nothing_to_hand_over() -> None:
    assert choose(FLEET, make_node("n1", CORDON), a=1) == ["b"]


@pytest.mark.parametrize(
    "others",
    [
        [make_pod("d", "n2", is_ending=True)],
        [make_pod("d", "n2", is_ready=False)],
        [],
    ],
    ids=["one ends", "one loads", "one is missing"],
)
def test_nobody_waits_idle_for_an_eviction_that_the_budget_refuses(others: list[Pod]) -> None:
    assert choose([*FLEET[:3], *others], make_node("n1", CORDON)) == []
    # A machine that ends by itself asks no budget.
    assert choose([*FLEET[:3], *others], make_node("n1", SPOT)) == ["a", "b"]


def test_the_last_engine_of_each_model_stays() -> None:
    pods = [make_pod("a", "n1", model="old"), make_pod("b", "n1", model="new"), make_pod("c", "n2", model="new")]
    assert choose(pods, make_node("n1", SPOT), replicas=3) == ["b"]


def test_a_pod_that_kubernetes_is_about_to_end_leaves_without_a_word_of_its_node() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    ready = {"type": "Ready", "status": "True"}
    pod = read_pod({"metadata": {"name": "a", "uid": "a"}, "spec": {}, "status": {"conditions": [ready, condition]}})
    assert choose([pod, *FLEET[1:]]) == ["a"]
    ended = {**condition, "status": "False"}
    pod = read_pod({"metadata": {"name": "a", "uid": "a"}, "spec": {}, "status": {"conditions": [ready, ended]}})
    assert choose([pod, *FLEET[1:]]) == []


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["n1", "n2", "n3"]), st.booleans()), max_size=8),
    st.lists(st.sampled_from(["", CORDON, SPOT]), min_size=3, max_size=3),
    st.integers(0, 8),
)
def test_some_engine_always_stays_and_only_engines_of_announced_nodes_leave(
    places: list[tuple[str, bool]], taints: list[str], replicas: int
) -> None:
    pods = [make_pod(f"e{number}", node, is_ready=ready) for number, (node, ready) in enumerate(places)]
    nodes = [make_node(f"n{number + 1}", *filter(None, [taint])) for number, taint in enumerate(taints)]
    leaving = choose(pods, *nodes, replicas=replicas)
    serving = {pod.engine_id: taints[int(pod.node[1]) - 1] for pod in pods if pod.is_ready}
    assert all(serving[EngineId(engine)] for engine in leaving)
    assert len(leaving) < len(serving) or not serving
    assert sum(serving[EngineId(engine)] == CORDON for engine in leaving) <= 1


# The whole operator.


async def start(**spec: Any) -> World:
    """Four engines that serve: two on each of two nodes, one of each role."""
    world = World(**spec)
    await world.settle()
    by_role = sorted(world.engines, key=lambda pod: world.roles[pod["metadata"]["uid"]])
    for number, pod in enumerate(by_role):
        world.kubernetes.edit(PODS, pod["metadata"]["name"], {"spec": {"nodeName": f"n{number % 2 + 1}"}})
    await world.settle()
    return world


def list_on(world: World, node: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.engines if pod["spec"].get("nodeName") == node}


def list_draining(world: World) -> set[str]:
    return {part.engine_id for part in world.plan.engines if part.is_draining}


def count_planned(world: World) -> tuple[int, int]:
    """P-heavy and D-heavy engines that stay by the plan."""
    roles = [part.role for part in world.plan.engines if not part.is_draining]
    return roles.count(1), roles.count(2)


async def test_engines_of_a_spot_node_hand_over_at_once_and_come_back_if_it_stays() -> None:
    world = await start()
    before = world.plan
    world.notices.take_node(make_node("n1", SPOT))
    await world.settle()
    assert list_draining(world) == list_on(world, "n1")
    assert count_planned(world) == (1, 1)
    assert world.status["effective"] == {
        **world.status["effective"],
        "prefillHeavy": 1,
        "decodeHeavy": 1,
        "draining": 2,
    }
    assert world.conditions["Progressing"] == ("True", "Draining")
    assert f"node n1 has the taint {SPOT}" in world.message("Progressing")
    # Nothing is deleted, marked or scaled: the pods are their node's.
    assert len(world.engines) == 4
    assert world.deployment()["spec"]["replicas"] == 4
    assert not any(COST in (pod["metadata"].get("annotations") or {}) for pod in world.engines)
    world.notices.take_node(make_node("n1"))
    await world.settle()
    assert list_draining(world) == set()
    assert [part.role for part in world.plan.engines] == [part.role for part in before.engines]
    assert world.conditions["Progressing"] == ("False", "Settled")


async def test_a_drained_node_loses_one_engine_at_a_time_and_roles_stay_right() -> None:
    world = await start()
    world.notices.take_node(make_node("n1", CORDON, unschedulable=True))
    seen = []
    while on_node := list_on(world, "n1"):
        await world.settle()
        (draining,) = list_draining(world)
        assert draining in on_node
        seen.append(count_planned(world))
        # The eviction, its end, and a successor on the other node.
        name = next(pod["metadata"]["name"] for pod in world.engines if pod["metadata"]["uid"] == draining)
        world.kubernetes.edit(PODS, name, {"metadata": {"deletionTimestamp": "now"}})
        await world.reconcile()
        await world.settle()
    assert len(seen) == 2
    assert all(min(counts) >= 1 and sum(counts) == 3 for counts in seen)
    assert list_draining(world) == set()
    assert count_planned(world) == (2, 2)


async def test_a_scale_down_takes_the_engine_that_leaves_anyway() -> None:
    world = await start()
    world.notices.take_node(make_node("n1", CORDON))
    await world.settle()
    (leaving,) = list_draining(world)
    world.routers.loads = {leaving: 50}
    world.edit(replicas=3)
    await world.settle()
    assert leaving not in world.engine_uids
    assert len(world.engines) == 3


async def test_a_new_leader_that_knows_the_nodes_changes_nothing() -> None:
    world = await start()
    world.notices.take_node(make_node("n1", SPOT))
    await world.settle()
    before = world.plan
    world.start_operator()
    await world.settle()
    assert world.plan == before


async def test_a_cluster_of_one_engine_serves_until_its_pod_ends() -> None:
    world = World(replicas=1)
    await world.settle()
    (pod,) = world.engines
    world.kubernetes.edit(PODS, pod["metadata"]["name"], {"spec": {"nodeName": "n1"}})
    world.notices.take_node(make_node("n1", SPOT))
    await world.settle()
    assert list_draining(world) == set()
    assert world.conditions["Progressing"] == ("False", "Settled")
