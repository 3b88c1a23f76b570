"""Upgrades of the operator: clusters that name no image keep theirs until it is their turn."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_harness import World
from fake_kubernetes import make_cluster
from test_conditions import find

from sluice_operator.api.names import ClusterKey
from sluice_operator.kubernetes.kinds import CLUSTERS, DEPLOYMENTS, PODS
from sluice_operator.planning.upgrades import UpgradePlaces
from sluice_operator.resources.deployments.deployment_status import is_whole

OLD, NEW = "sluice-engine:0.1.0", "sluice-engine:2"
# Not taken from the code, so that a change of it shows.
SETTLE_S = 30.0
ALLOWED = {"metadata": {"annotations": {"sluice.dev/upgrade": "allowed"}}}


def images(world: World) -> tuple[str, str]:
    """Images of the Deployments of engines and routers."""
    templates = [world.deployment(part)["spec"]["template"] for part in ("engine", "router")]
    engine, router = (template["spec"]["containers"][0]["image"] for template in templates)
    return engine, router


async def upgrade(world: World, limit: int = 1) -> None:
    """Starts an operator with other default images, and reconciles once."""
    update = {"engine_image": NEW, "router_image": "sluice-router:2", "max_concurrent_upgrades": limit}
    world.settings = world.settings.model_copy(update=update)
    world.start_operator()
    await world.settle()


@pytest.mark.parametrize("is_legacy", [False, True], ids=["image kept", "image of an earlier operator"])
async def test_a_new_default_image_replaces_no_pod_before_its_turn(*, is_legacy: bool) -> None:
    world = World()
    await world.settle()
    if is_legacy:
        gone = {"metadata": {"annotations": {"sluice.dev/default-image": None}}}
        for name in ("tiny-engine", "tiny-router"):
            world.kubernetes.edit(DEPLOYMENTS, name, gone)
    before = world.engine_uids
    await upgrade(world)
    assert world.engine_uids == before
    assert images(world) == (OLD, "sluice-router:0.1.0")
    assert world.conditions["Progressing"] == ("False", "UpgradeWaiting")
    assert f"{OLD} to {NEW}" in world.message("Progressing")
    assert world.conditions["Degraded"] == ("False", "AsExpected")
    after_s = await world.reconcile()
    assert after_s is not None
    assert after_s <= SETTLE_S
    world.now += SETTLE_S
    await world.settle()
    assert images(world) == (NEW, "sluice-router:2")
    assert not before & world.engine_uids
    assert world.conditions["Progressing"] == ("False", "Settled")


async def test_an_edit_that_restarts_engines_keeps_the_image_until_the_upgrade_is_allowed() -> None:
    world = World()
    await world.settle()
    before = world.engine_uids
    await upgrade(world, limit=0)
    world.now += SETTLE_S
    world.edit(engine={"maxBatchTokens": 4096})
    await world.settle()
    assert not before & world.engine_uids
    assert images(world)[0] == OLD
    world.kubernetes.edit(CLUSTERS, "tiny", ALLOWED)
    await world.settle()
    assert images(world)[0] == NEW


async def test_an_image_that_the_spec_names_waits_for_nobody() -> None:
    world = World(engine={"image": "mine:1"}, router={"image": "mine:2"})
    await world.settle()
    await upgrade(world, limit=0)
    assert world.conditions["Progressing"] == ("False", "Settled")
    world.edit(engine={"image": "mine:3"})
    await world.settle()
    assert images(world) == ("mine:3", "mine:2")
    # Nothing is kept of an image that was named: what the operator has now follows it.
    world.edit(engine={"image": None})
    await world.settle()
    assert images(world)[0] == NEW


async def test_a_paused_cluster_does_not_upgrade_and_holds_no_place() -> None:
    world = World(rollout={"paused": True})
    await world.settle()
    await upgrade(world)
    world.now += SETTLE_S
    await world.settle()
    assert world.conditions["Progressing"] == ("False", "UpgradeWaiting")
    assert images(world)[0] == OLD


@pytest.mark.parametrize("hindrance", ["paused", "refused"])
async def test_a_cluster_that_is_hindered_while_it_waits_hands_its_turn_on(hindrance: str) -> None:
    tls = {"mode": "CertManager", "issuerRef": {"kind": "ClusterIssuer", "name": "ca"}, "dnsNames": ["llm.example.com"]}
    world, second = World(router={"tls": tls}), ClusterKey("default", "second")
    world.kubernetes.has_cert_manager = True
    world.kubernetes.put(make_cluster("second"))
    for _ in range(5):
        world.run_controllers()
        await world.reconcile()
        await world.reconciler.reconcile(second)
    await upgrade(world)
    await world.reconciler.reconcile(second)
    world.now += SETTLE_S
    if hindrance == "paused":
        world.edit(rollout={"paused": True})
    # Without cert-manager, the spec cannot be carried out any more.
    world.kubernetes.has_cert_manager = hindrance == "paused"
    world.enqueued.clear()
    await world.reconcile()
    assert second in world.enqueued


async def test_a_cluster_that_cannot_start_keeps_no_other_one_waiting() -> None:
    world, second = World(), ClusterKey("default", "second")
    world.kubernetes.broken_images.add("mine:1")
    world.kubernetes.put(make_cluster("second", router={"image": "mine:1"}))

    async def reconcile_second() -> None:
        # The first reconcile may end with a new plan.
        for _ in range(3):
            world.run_controllers()
            await world.reconciler.reconcile(second)

    await reconcile_second()
    await world.settle()
    await upgrade(world)
    world.now += SETTLE_S
    # Its turn comes first.
    await reconcile_second()
    await world.settle()
    assert images(world)[0] == NEW
    assert second in world.enqueued
    await reconcile_second()
    deployment = world.kubernetes.find(DEPLOYMENTS, "second-engine")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == NEW


A, B, C = (ClusterKey("n", name) for name in "abc")
BODY: dict[str, Any] = {"metadata": {}}


class Places:
    """Places on a clock of the test's own, and who was enqueued."""

    def __init__(self, limit: int) -> None:
        self.now = 0.0
        self.enqueued: list[ClusterKey] = []
        self.places = UpgradePlaces(limit, now=lambda: self.now, enqueue=self.enqueued.append)
        self.now = SETTLE_S

    def may_upgrade(self, key: ClusterKey, body: dict[str, Any] = BODY, *, is_whole: bool = True) -> bool:
        return self.places.may_upgrade(key, body, is_whole=is_whole)


def test_at_most_so_many_clusters_upgrade_at_once() -> None:
    found = Places(2)
    assert [found.may_upgrade(key) for key in (A, B, C)] == [True, True, False]
    # Whoever holds a place keeps it until all its pods serve.
    assert found.may_upgrade(A)
    found.places.note_progress(A, is_rolling=True, is_whole=False)
    found.places.note_progress(A, is_rolling=False, is_whole=False)
    assert (found.may_upgrade(C), found.enqueued) == (False, [])
    found.places.note_progress(A, is_rolling=False, is_whole=True)
    assert found.enqueued == [C]
    assert found.may_upgrade(C)


def test_a_deleted_cluster_gives_its_place_back() -> None:
    found = Places(1)
    assert found.may_upgrade(A)
    assert not found.may_upgrade(B)
    found.places.forget(A)
    assert found.enqueued == [B]
    assert found.may_upgrade(B)


def test_an_annotated_cluster_takes_no_place() -> None:
    found = Places(0)
    assert not found.may_upgrade(A)
    assert found.may_upgrade(A, ALLOWED)
    assert not found.may_upgrade(A, {"metadata": {"annotations": {"sluice.dev/upgrade": "yes"}}})


def test_a_cluster_that_waited_and_is_annotated_waits_no_more() -> None:
    found = Places(1)
    assert [found.may_upgrade(key) for key in (A, B, C)] == [True, False, False]
    assert found.may_upgrade(B, ALLOWED)
    found.places.note_progress(A, is_rolling=False, is_whole=True)
    assert found.enqueued == [C]


def test_a_cluster_that_waited_and_begins_waits_no_more() -> None:
    found = Places(1)
    assert [found.may_upgrade(key) for key in (A, B, C)] == [True, False, False]
    found.places.forget(A)
    assert found.may_upgrade(B)
    found.places.forget(B)
    assert found.enqueued == [B, C]


def test_a_cluster_that_waited_and_runs_the_newest_or_is_gone_waits_no_more() -> None:
    found = Places(1)
    assert [found.may_upgrade(key) for key in (A, B, C)] == [True, False, False]
    found.places.note_progress(B, is_rolling=False, is_whole=False)
    found.places.forget(C)
    found.places.forget(A)
    assert found.enqueued == []


def test_a_new_leader_counts_upgrades_under_way_before_it_begins_others() -> None:
    found = Places(1)
    found.now = 0.0
    assert not found.may_upgrade(A)
    found.places.note_progress(B, is_rolling=True, is_whole=False)
    found.now = SETTLE_S
    assert not found.may_upgrade(A)
    found.places.note_progress(B, is_rolling=False, is_whole=True)
    assert found.enqueued == [A]
    assert found.may_upgrade(A)


def test_clusters_that_do_not_serve_come_last_and_keep_nobody_waiting() -> None:
    found = Places(1)
    found.now = 0.0
    assert not any(found.may_upgrade(key, is_whole=key is C) for key in (A, B, C))
    found.now = SETTLE_S
    assert not found.may_upgrade(A, is_whole=False)
    assert found.enqueued == [C]
    assert found.may_upgrade(C)
    # The image may be at fault as long as the one that serves has not taken it.
    assert not found.may_upgrade(B, is_whole=False)
    found.places.note_progress(C, is_rolling=False, is_whole=True)
    assert found.enqueued == [C, A, B]
    assert all(found.may_upgrade(key, is_whole=False) for key in (A, B))
    found.places.note_progress(A, is_rolling=True, is_whole=False)
    assert found.may_upgrade(C)


def test_a_cluster_that_begins_to_serve_is_among_the_others_at_once() -> None:
    found = Places(1)
    assert found.may_upgrade(A)
    assert not any(found.may_upgrade(key, is_whole=False) for key in (B, C))
    assert not found.may_upgrade(C)
    found.places.forget(A)
    assert found.enqueued == [C]


def test_a_cluster_that_serves_no_longer_hands_its_turn_on() -> None:
    found = Places(1)
    assert [found.may_upgrade(key) for key in (A, B, C)] == [True, False, False]
    found.places.forget(A)
    assert found.enqueued == [B]
    assert not found.may_upgrade(B, is_whole=False)
    assert found.enqueued == [B, C]


def test_clusters_that_do_not_serve_wait_for_the_annotation_where_all_do() -> None:
    found = Places(0)
    assert not found.may_upgrade(A, is_whole=False)
    assert found.may_upgrade(A, ALLOWED, is_whole=False)


def test_a_roll_of_another_kind_takes_no_place() -> None:
    found = Places(1)
    found.places.note_progress(A, is_rolling=True, is_whole=False)
    assert found.may_upgrade(B)


@pytest.mark.parametrize(
    ("replicas", "status", "is_whole_then"),
    [
        (2, {"readyReplicas": 2}, True),
        (2, {"readyReplicas": 3}, True),
        (2, {"readyReplicas": 1}, False),
        (2, {}, False),
        (2, None, False),
        (0, {}, True),
    ],
)
def test_a_deployment_is_whole_when_all_its_pods_serve(replicas: int, status: Any, *, is_whole_then: bool) -> None:
    assert is_whole({"metadata": {}, "spec": {"replicas": replicas}, "status": status}) is is_whole_then


async def test_the_next_cluster_upgrades_when_all_pods_of_the_last_one_serve() -> None:
    world, second = World(replicas=2), ClusterKey("default", "second")
    world.kubernetes.put(make_cluster("second", replicas=2))

    async def run(num_steps: int) -> None:
        for _ in range(num_steps):
            world.run_controllers()
            await world.reconcile()
            await world.reconciler.reconcile(second)
            world.now += 1.0

    def list_engines(name: str) -> list[tuple[str, str]]:
        pods = [pod for pod in world.engines if pod["metadata"]["name"].startswith(name)]
        return [(pod["spec"]["containers"][0]["image"], pod["status"]["phase"]) for pod in pods]

    await run(10)
    world.settings = world.settings.model_copy(update={"engine_image": NEW, "max_concurrent_upgrades": 1})
    world.start_operator()
    world.now += SETTLE_S
    # The last engine of the first cluster does not serve, though all its pods are of the new template.
    while (NEW, "Running") not in list_engines("tiny"):
        await run(1)
    world.kubernetes.broken_images.add(NEW)
    await run(8)
    assert sorted(list_engines("tiny")) == [(NEW, "Pending"), (NEW, "Running")]
    assert list_engines("second") == [(OLD, "Running")] * 2
    world.kubernetes.broken_images.clear()
    for pod in world.engines:
        if pod["status"]["phase"] == "Pending":
            world.kubernetes.remove(PODS, "default", pod["metadata"]["name"])
    world.enqueued.clear()
    await run(12)
    assert second in world.enqueued
    assert list_engines("second") == [(NEW, "Running")] * 2


def test_an_upgrade_that_waits_for_its_turn_is_woken_and_does_not_ask() -> None:
    world = World()
    inputs = replace(find(), waiting_upgrade="an image waits")
    state: Any = SimpleNamespace(measured_s=0.0, drain_started_s={})
    for after_s, wake_s in ((0.0, SETTLE_S), (SETTLE_S - 1.0, 1.0), (1.0, None)):
        world.now += after_s
        assert world.reconciler._compute_requeue_s(inputs, state, has_pending_measurements=False) == wake_s
