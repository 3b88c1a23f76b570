"""A plan in its ConfigMap: what is written comes back, and each write replaces the version that it was made from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_kubernetes import FakeKubernetes, make_cluster
from test_planning_rules import HAS_SWITCHED, PLAN, TUNED

from sluice_operator.api.condition_types import Reason
from sluice_operator.api.manifest import check_manifest
from sluice_operator.autoscaling.stored_scale import StoredScale
from sluice_operator.kubernetes.errors import BusyError, ConflictError, ForbiddenError
from sluice_operator.kubernetes.kinds import CONFIG_MAPS
from sluice_operator.kubernetes.own_writes import OwnWrites, read_version
from sluice_operator.planning.plan_store import StoredPlan, read_plan, store_plan
from sluice_operator.resources.apply import ChildApplier

WHOLE = StoredPlan(
    plan=PLAN,
    generation=7,
    tuned=TUNED,
    scale=StoredScale(basis=4, replicas=3, reason="so much arrives", start_s=77.0),
    accepted_spec={"replicas": 3, "model": {"name": "m"}},
    switch=HAS_SWITCHED,
    revisions={"m": "0" * 40, "n": "1" * 40},
)
LABELS = {
    "app.kubernetes.io/component": "router",
    "app.kubernetes.io/managed-by": "sluice-operator",
    "app.kubernetes.io/name": "sluice",
    "sluice.dev/cluster": "tiny",
}


class Store:
    """A store of plans, the API server behind it, and what is refused."""

    def __init__(self) -> None:
        self.kubernetes = FakeKubernetes()
        self.own_writes = OwnWrites()
        body = make_cluster()
        body["metadata"]["uid"] = "u"
        self.cluster = check_manifest(body)
        self.failures: list[tuple[Reason, str]] = []

    async def store(self, stored: StoredPlan, live: Any) -> bool:
        applier = ChildApplier(self.kubernetes, self.cluster, {})
        is_stored = await store_plan(applier, live, stored, self.own_writes)
        self.failures = [(failure.reason, failure.message) for failure in applier.failures]
        return is_stored

    @property
    def live(self) -> Any:
        return self.kubernetes.objects.get(("ConfigMap", "default", "tiny-plan"))

    def read(self) -> StoredPlan:
        return read_plan(self.live, "u")


async def test_all_that_is_stored_comes_back_and_the_next_plan_takes_its_place() -> None:
    store = Store()
    assert await store.store(WHOLE, None) is True
    assert store.read() == WHOLE
    assert store.live["metadata"]["labels"] == LABELS
    (owner,) = store.live["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("u", True)
    assert json.loads(store.live["data"]["accepted-spec.json"]) == WHOLE.accepted_spec
    # What is not there any more is not there after the next write either; revisions stay.
    less = replace(WHOLE, tuned=None, scale=None, switch=None, accepted_spec={"replicas": 2})
    assert await store.store(less, store.live) is True
    assert store.read() == less
    assert store.kubernetes.calls == [("get", "configmaps"), ("create", "configmaps"), ("patch", "configmaps")]
    assert store.failures == []


async def test_the_event_of_a_plan_that_replaced_another_one_needs_no_reconcile() -> None:
    store = Store()
    await store.store(WHOLE, None)
    assert not store.own_writes.includes(read_version(store.live))
    await store.store(replace(WHOLE, generation=8), store.live)
    assert store.own_writes.includes(read_version(store.live))


@pytest.mark.parametrize("precondition", ["uid", "resourceVersion"])
async def test_a_plan_replaces_the_version_that_its_number_was_counted_from_and_no_other(precondition: str) -> None:
    store = Store()
    await store.store(WHOLE, None)
    seen = json.loads(json.dumps(store.live))
    seen["metadata"][precondition] = "another"
    with pytest.raises(ConflictError):
        await store.store(replace(WHOLE, scale=None), seen)
    assert store.read() == WHOLE


async def test_of_two_operators_that_find_no_plan_one_stores_its_own() -> None:
    store = Store()

    def be_faster(verb: str, _plural: str) -> None:
        if verb == "create":
            store.kubernetes.before = lambda _verb, _plural: None
            with pytest.raises(StopIteration):
                store.store(replace(WHOLE, scale=None), None).send(None)

    store.kubernetes.before = be_faster
    with pytest.raises(ConflictError):
        await store.store(WHOLE, None)
    assert store.read().scale is None


async def test_a_plan_that_lost_its_labels_gets_them_back_and_is_read_before_another_one_is_stored() -> None:
    store = Store()
    await store.store(WHOLE, None)
    store.kubernetes.edit(CONFIG_MAPS, "tiny-plan", {"metadata": {"labels": dict.fromkeys(LABELS)}})
    uid = store.live["metadata"]["uid"]
    with pytest.raises(ConflictError, match="ConfigMap tiny-plan had lost its labels"):
        await store.store(replace(WHOLE, scale=None), None)
    assert store.live["metadata"]["labels"] == LABELS
    assert (store.read(), store.live["metadata"]["uid"]) == (WHOLE, uid)

    def take(verb: str, _plural: str) -> None:
        if verb == "patch":
            store.kubernetes.remove(CONFIG_MAPS, "default", "tiny-plan")
            store.kubernetes.put({**seen, "data": {}})

    seen = json.loads(json.dumps(store.live))
    del seen["metadata"]["uid"]
    store.kubernetes.before = take
    with pytest.raises(ConflictError, match=r"^(?!.*had lost)"):
        await store.store(WHOLE, None)
    assert store.live["data"] == {}, "another object of this name is not written"


async def test_a_foreign_plan_is_left_alone() -> None:
    store = Store()
    metadata = {"name": "tiny-plan", "namespace": "default"}
    store.kubernetes.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"mine": "1"}})
    assert await store.store(WHOLE, None) is False
    assert store.live["data"] == {"mine": "1"}
    assert [reason for reason, _ in store.failures] == [Reason.NAME_CONFLICT]
    assert store.kubernetes.writes == []


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_refusal_is_a_failure_and_anything_else_is_tried_again(*, is_first: bool) -> None:
    store = Store()
    if not is_first:
        await store.store(WHOLE, None)
    live = store.live

    def fail(verb: str, _plural: str) -> None:
        if verb != "get":
            raise error

    store.kubernetes.before = fail
    error: Exception = ForbiddenError("no right")
    assert await store.store(replace(WHOLE, scale=None), live) is False
    assert store.failures == [(Reason.FORBIDDEN, "ConfigMap tiny-plan: no right")]
    error = BusyError("503")
    with pytest.raises(BusyError):
        await store.store(replace(WHOLE, scale=None), live)
