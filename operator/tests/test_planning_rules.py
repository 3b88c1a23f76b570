"""Rules of planning one by one: models that replace one another, revisions, roles in a stored plan, a roll's edges."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_kubernetes import make_cluster

from sluice.v1 import control_pb2, plan_pb2
from sluice_core.records import EngineId, Role
from sluice_operator.api import names
from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
from sluice_operator.api.fields_and_defaults.rollout_gate_spec import RolloutGateSpec
from sluice_operator.api.labels import GENERATION_ANNOTATION, TUNED_ANNOTATION
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.model_identity import REVISION_KEY_PREFIX, identify_model
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune.stored_sliders import StoredSliders
from sluice_operator.planning.model_switch import (
    ModelSwitch,
    choose_router_model,
    count_ready,
    decide_switch,
    has_routers,
    is_split,
)
from sluice_operator.planning.plan import make_plan, resolve_revisions
from sluice_operator.planning.plan_store import StoredPlan, read_plan, write_plan, write_switch
from sluice_operator.planning.rollout_gate import RollFacts, decide_gate
from sluice_operator.resources.pods.pod_status import Pod
from sluice_operator.resources.rollout_state import RolloutState
from sluice_operator.routers.engine_outcomes import Outcomes

SOURCE = {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}}
OLD, NEW = ModelSpec(name="old", source=SOURCE), ModelSpec(name="new", source=SOURCE)
OLD_ID, NEW_ID = identify_model(OLD), identify_model(NEW)
POD = Pod(
    name="p",
    engine_id=EngineId("p"),
    address="",
    role_label="",
    has_deletion_cost=False,
    is_ready=True,
    is_ending=False,
    has_ended=False,
    failure=None,
)


def make_pods(*models: str, **changes: Any) -> list[Pod]:
    return [
        replace(POD, name=f"p{number}", engine_id=EngineId(f"p{number}"), model_id=model, **changes)
        for number, model in enumerate(models)
    ]


# --- one model replaces another ------------------------------------------------------------------------------------

SERVES_OLD, SERVES_NEW = ModelSwitch(served=OLD), ModelSwitch(served=NEW)
HAS_SWITCHED = ModelSwitch(served=NEW, replaced=OLD)


@pytest.mark.parametrize(
    ("switch", "target", "engines", "routers", "may_return", "follows"),
    [
        (SERVES_OLD, OLD, [OLD_ID], [OLD_ID], False, SERVES_OLD),
        (SERVES_OLD, NEW, [OLD_ID, NEW_ID], [OLD_ID], False, SERVES_OLD),
        (SERVES_OLD, NEW, [NEW_ID, NEW_ID], [OLD_ID], False, HAS_SWITCHED),
        (HAS_SWITCHED, NEW, [NEW_ID] * 2, [OLD_ID, NEW_ID], False, HAS_SWITCHED),
        (HAS_SWITCHED, NEW, [NEW_ID] * 2, [], False, HAS_SWITCHED),
        (HAS_SWITCHED, NEW, [NEW_ID] * 2, [NEW_ID], False, SERVES_NEW),
        (HAS_SWITCHED, NEW, [], [NEW_ID], False, SERVES_NEW),
        (HAS_SWITCHED, NEW, [NEW_ID] * 2, [NEW_ID], True, HAS_SWITCHED),
        (HAS_SWITCHED, OLD, [OLD_ID, OLD_ID], [NEW_ID], False, ModelSwitch(served=OLD, replaced=NEW)),
        # A pod that an older operator made serves the older model.
        (HAS_SWITCHED, NEW, [NEW_ID], ["", NEW_ID], False, HAS_SWITCHED),
        (SERVES_OLD, OLD, [], [""], False, SERVES_OLD),
    ],
    ids=[
        "nothing to do",
        "too few engines",
        "enough engines",
        "old routers are left",
        "no router yet",
        "old routers are gone",
        "whatever the engines do",
        "the roll may go back",
        "and back again",
        "a router without an id",
        "a fleet without ids",
    ],
)
def test_routers_switch_with_enough_engines_and_forget_the_old_model_with_its_last_router(
    switch, target, engines, routers, may_return, follows
) -> None:
    found = decide_switch(switch, target, make_pods(*engines), make_pods(*routers), num_needed=2, may_return=may_return)
    assert found == follows


@pytest.mark.parametrize("changes", [{"is_ready": False}, {"is_ending": True}, {"has_ended": True}])
def test_engines_count_that_serve_and_stay(changes) -> None:
    pods = [*make_pods(NEW_ID), *make_pods(NEW_ID, NEW_ID, **changes)]
    assert count_ready(SERVES_OLD, NEW, pods) == 1
    assert decide_switch(SERVES_OLD, NEW, pods, [], num_needed=2) == SERVES_OLD
    assert count_ready(SERVES_OLD, OLD, make_pods("", OLD_ID, NEW_ID)) == 2


def test_a_served_model_may_change_its_name_for_clients_at_any_time() -> None:
    renamed = NEW.model_copy(update={"served_name": "another"})
    found = decide_switch(HAS_SWITCHED, renamed, [], make_pods(OLD_ID), num_needed=9)
    assert found == ModelSwitch(served=renamed, replaced=OLD)


def test_a_router_counts_until_its_last_stream_has_ended_and_a_new_one_when_it_serves() -> None:
    for changes, has_ended in (({"is_ending": True}, False), ({"is_ready": False}, False), ({"has_ended": True}, True)):
        routers = [*make_pods(OLD_ID, **changes), *make_pods(NEW_ID)]
        assert has_routers(HAS_SWITCHED, OLD_ID, routers) is not has_ended
        assert is_split(HAS_SWITCHED, NEW, routers) is not has_ended
    starting = make_pods(NEW_ID, is_ready=False)
    assert decide_switch(HAS_SWITCHED, NEW, [], starting, num_needed=1) == HAS_SWITCHED


@pytest.mark.parametrize(
    ("switch", "target", "routers", "splits"),
    [
        (SERVES_OLD, OLD, [OLD_ID], False),
        (SERVES_OLD, NEW, [OLD_ID], True),
        (HAS_SWITCHED, NEW, [OLD_ID], True),
        (HAS_SWITCHED, NEW, [NEW_ID], False),
        (SERVES_NEW, NEW, [OLD_ID], False),
    ],
)
def test_a_fleet_is_split_until_the_old_models_routers_are_gone(switch, target, routers, splits) -> None:
    assert is_split(switch, target, make_pods(*routers)) is splits


@pytest.mark.parametrize(
    ("switch", "routers", "chosen"),
    [
        (HAS_SWITCHED, [(OLD_ID, {}), (NEW_ID, {})], NEW_ID),
        (HAS_SWITCHED, [(OLD_ID, {}), (NEW_ID, {"is_ready": False})], OLD_ID),
        (HAS_SWITCHED, [(OLD_ID, {}), (NEW_ID, {"is_ending": True})], OLD_ID),
        (HAS_SWITCHED, [(OLD_ID, {"is_ending": True}), (NEW_ID, {"is_ready": False})], ""),
        (HAS_SWITCHED, [("", {})], ""),
        (SERVES_OLD, [(OLD_ID, {}), (NEW_ID, {})], OLD_ID),
        (SERVES_OLD, [(NEW_ID, {})], ""),
    ],
)
def test_new_connections_go_to_the_served_model_once_a_router_of_it_serves(switch, routers, chosen) -> None:
    pods = [pod for model, changes in routers for pod in make_pods(model, **changes)]
    assert choose_router_model(switch, pods) == chosen


# --- what is stored ------------------------------------------------------------------------------------------------

CLUSTER = check_manifest(
    {**make_cluster(replicas=3, prefillHeavy=1), "metadata": {"name": "tiny", "namespace": "default", "uid": "u"}}
)
TUNED = StoredSliders(
    basis="b",
    replicas=4,
    sliders=Sliders(num_prefill_heavy=1, prefill_heavy_tokens=512, decode_heavy_tokens=64),
)


def store(plan: plan_pb2.Plan, *, generation: str = "", **data: str) -> dict[str, Any]:
    annotations = {GENERATION_ANNOTATION: generation, TUNED_ANNOTATION: TUNED.to_json()}
    return {
        "metadata": {"name": "plan", "annotations": annotations},
        "data": {names.PLAN_FILE: write_plan(plan), **data},
    }


PLAN = plan_pb2.Plan(
    cluster_uid="u",
    generation=7,
    engines=[
        plan_pb2.EnginePlan(engine_id="a", role=plan_pb2.ROLE_PREFILL_HEAVY),
        plan_pb2.EnginePlan(engine_id="b", role=plan_pb2.ROLE_DECODE_HEAVY),
        plan_pb2.EnginePlan(engine_id="c"),
    ],
)


def test_a_stored_plan_is_read_with_all_that_is_beside_it() -> None:
    accepted = {"replicas": 3}
    files = {
        names.ACCEPTED_SPEC_FILE: json.dumps(accepted),
        names.MODELS_FILE: write_switch(HAS_SWITCHED),
        f"{REVISION_KEY_PREFIX}m": "0" * 40,
        "else": "x",
    }
    stored = read_plan(store(PLAN, generation="9", **files), "u")
    assert stored == StoredPlan(
        plan=PLAN,
        generation=9,
        tuned=TUNED,
        accepted_spec=accepted,
        switch=HAS_SWITCHED,
        revisions={"m": "0" * 40},
    )
    # An engine whose role is of another release has none.
    assert stored.roles == {"a": Role.PREFILL_HEAVY, "b": Role.DECODE_HEAVY}
    assert StoredPlan().roles == {}


@pytest.mark.parametrize(("generation", "number"), [("", 7), ("6", 7), ("8", 8), ("-1", 7), ("x", 7)])
def test_the_higher_of_the_two_numbers_counts(generation: str, number: int) -> None:
    assert read_plan(store(PLAN, generation=generation), "u").generation == number


def test_a_plan_that_is_another_clusters_or_cannot_be_read_leaves_its_number() -> None:
    assert read_plan(None, "u") == StoredPlan()
    assert read_plan(store(PLAN, generation="9"), "v") == StoredPlan(generation=9)
    broken = store(PLAN, generation="9", **{names.PLAN_FILE: "{"})
    assert read_plan(broken, "u") == StoredPlan(generation=9)
    assert read_plan({"metadata": {"name": "p"}}, "u") == StoredPlan()
    later = json.loads(write_plan(PLAN)) | {"field_of_tomorrow": 1}
    assert read_plan(store(PLAN, **{names.PLAN_FILE: json.dumps(later)}), "u").plan == PLAN


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", '[{"name": 1}]', "3"])
def test_models_or_a_spec_that_somebody_edited_are_not_there(text: str) -> None:
    files = {names.MODELS_FILE: text, names.ACCEPTED_SPEC_FILE: text}
    stored = read_plan(store(PLAN, **files), "u")
    assert (stored.switch, stored.accepted_spec) == (None, None)
    assert stored.plan == PLAN


def test_what_is_stored_is_written_in_one_order() -> None:
    """Another order would be a write of the ConfigMap."""
    hub = {"tokenSecretRef": {"name": "s", "key": "k"}, "endpoint": "https://h", "cacheClaimName": "c"}
    of_the_hub = ModelSwitch(served=ModelSpec(name="hub", source={"huggingFace": hub}))
    for text in (write_plan(PLAN), write_switch(HAS_SWITCHED), write_switch(of_the_hub)):
        assert text == json.dumps(json.loads(text), sort_keys=True)
    assert [model["name"] for model in json.loads(write_switch(HAS_SWITCHED))] == ["new", "old"]
    assert json.loads(write_switch(SERVES_NEW)) == [{"name": "new", "source": SOURCE}]


def test_the_first_pods_answer_for_an_unpinned_revision_counts_for_all() -> None:
    pods = [
        replace(POD, name="b", created="2", model_id="m", resolved_revision="later"),
        replace(POD, name="c", created="1", model_id="m", resolved_revision="third"),
        replace(POD, name="a", created="1", model_id="m", resolved_revision="first"),
        replace(POD, name="d", created="0", model_id="m", resolved_revision=""),
        replace(POD, name="e", created="0", model_id="", resolved_revision="nobody's"),
        replace(POD, name="f", created="3", model_id="known", resolved_revision="new"),
    ]
    assert resolve_revisions({"known": "old"}, pods) == {"m": "first", "known": "old"}


# --- the plan ------------------------------------------------------------------------------------------------------


def test_a_plan_names_who_serves_and_who_leaves_with_their_roles() -> None:
    pods = make_pods("", "", "", "", "")
    pods[3] = replace(pods[3], is_ending=True)
    pods[4] = replace(pods[4], is_ending=True)
    stored = StoredPlan(
        plan=plan_pb2.Plan(
            generation=3,
            engines=[
                plan_pb2.EnginePlan(engine_id="p1", role=plan_pb2.ROLE_PREFILL_HEAVY),
                plan_pb2.EnginePlan(engine_id="p3", role=plan_pb2.ROLE_PREFILL_HEAVY),
            ],
        ),
        generation=3,
    )
    plan = make_plan(CLUSTER, stored, pods, victims={EngineId("p2")}, reports={}, statuses=[])
    found = {each.engine_id: (each.role, each.is_draining, each.chunk_size_tokens) for each in plan.engines}
    prefill, decode = plan_pb2.ROLE_PREFILL_HEAVY, plan_pb2.ROLE_DECODE_HEAVY
    # p4 ends and never had a role: no plan has named it. p2 never had one, and drains as a D-heavy engine.
    assert found == {
        "p0": (decode, False, 64),
        "p1": (prefill, False, 512),
        "p2": (decode, True, 64),
        "p3": (prefill, True, 512),
    }
    assert [each.engine_id for each in plan.engines] == sorted(found)
    assert (plan.generation, plan.cluster_uid, plan.num_routers) == (4, "u", 2)
    again = make_plan(
        CLUSTER, StoredPlan(plan=plan, generation=4), pods, victims={EngineId("p2")}, reports={}, statuses=[]
    )
    assert again is plan


@pytest.mark.parametrize(
    ("stored", "statuses", "generation"),
    [(3, [], 4), (3, [("u", 9)], 10), (3, [("v", 9)], 4), (11, [("u", 9), ("u", 2)], 12)],
)
def test_a_number_is_above_all_that_this_clusters_routers_have_seen(stored, statuses, generation) -> None:
    seen = [control_pb2.GetStatusResponse(cluster_uid=uid, generation=number) for uid, number in statuses]
    plan = make_plan(CLUSTER, StoredPlan(generation=stored), [], victims=set(), reports={}, statuses=seen)
    assert plan.generation == generation


def test_each_model_has_its_roles_and_names() -> None:
    pods = [*make_pods(OLD_ID, OLD_ID, NEW_ID, NEW_ID)]
    plan = make_plan(CLUSTER, StoredPlan(), pods, victims=set(), reports={}, statuses=[], switch=HAS_SWITCHED)
    roles = {each.engine_id: each.role for each in plan.engines}
    for first, second in (("p0", "p1"), ("p2", "p3")):
        assert {roles[first], roles[second]} == {plan_pb2.ROLE_PREFILL_HEAVY, plan_pb2.ROLE_DECODE_HEAVY}
    assert [(each.model_id, each.served_name) for each in plan.served_models] == [(NEW_ID, "new"), (OLD_ID, "old")]
    assert plan.served_model_name == "old"


# --- a roll --------------------------------------------------------------------------------------------------------

STATE = RolloutState(target_hash="t", good_template={}, since_s=1000, num_passed=1)
FACTS = RollFacts(
    num_new=2,
    num_new_ready=2,
    num_old=2,
    replicas=4,
    refusal="",
    figures=Outcomes(num_ended=20, num_met=18),
    num_ended_on_new=20,
    watched_s=1e9,
    start_limit_s=300.0,
)
GATE = RolloutGateSpec(durationSeconds=60, minAttainment="90%", maxErrorRate="5%", minRequests=20, timeoutSeconds=600)


def test_an_engine_that_starts_is_waited_for_exactly_as_long_as_it_may_take() -> None:
    starting = replace(FACTS, num_new_ready=1)
    for wall_s, left_s in ((1000.0, 300.0), (1299.5, 0.5)):
        waits = decide_gate(STATE, starting, GATE, wall_s)
        assert (waits.state, waits.is_held, waits.wake_in_s) == (STATE, False, left_s)
    late = decide_gate(STATE, starting, GATE, 1300.0)
    assert late.state is not None
    assert late.state.failure == "1 engines did not serve within 300 s"
    # What serves beyond those that have passed waits for its verdict.
    part = decide_gate(STATE, replace(FACTS, num_new=3, num_new_ready=2), GATE, 1000.0)
    assert (part.is_held, part.wake_in_s) == (True, 300.0)
    first = decide_gate(replace(STATE, since_s=None), starting, GATE, 1234.7)
    assert (first.state, first.wake_in_s) == (replace(STATE, since_s=1234), pytest.approx(299.3))


def test_a_batch_is_measured_from_when_all_of_it_serves() -> None:
    begun = decide_gate(STATE, FACTS, GATE, 1055.9)
    assert begun.state == replace(STATE, measured_since_s=1055)
    assert (begun.is_held, begun.wake_in_s) == (True, 5.0)
    early = decide_gate(begun.state, FACTS, GATE, 1055 + 59.9)
    assert (early.state, early.is_held, early.wake_in_s) == (begun.state, True, 5.0)
    passed = decide_gate(begun.state, FACTS, GATE, 1055 + 60.0)
    assert passed.state == replace(STATE, since_s=None, num_passed=2)
    assert (passed.is_held, passed.wake_in_s) == (False, None)


@pytest.mark.parametrize(
    ("figures", "at_s", "failure"),
    [
        (Outcomes(20, 18, 1), 60, ""),
        (Outcomes(20, 17, 1), 60, "17 of 20 requests met their objectives, less than rollout.gate.minAttainment 90%"),
        (Outcomes(20, 0, 1), 59, ""),
        (Outcomes(20, 18, 2), 0, "2 of 20 requests failed, more than rollout.gate.maxErrorRate 5%"),
        (Outcomes(19, 0, 19), 60, ""),
        (Outcomes(40, 36, 2), 60, ""),
        (None, 599, ""),
        (None, 600, "no router reported for 600 s"),
    ],
)
def test_a_roll_goes_back_for_errors_at_once_and_for_attainment_after_its_time(figures, at_s, failure) -> None:
    measured = replace(STATE, measured_since_s=2000)
    found = decide_gate(measured, replace(FACTS, figures=figures), GATE, 2000.0 + at_s)
    assert found.state is not None
    assert found.state.failure == failure
    assert (found.state.measured_since_s is None) is (bool(failure) or found.state.num_passed == 2)


def test_a_batch_without_traffic_passes_after_its_time_and_is_counted() -> None:
    measured = replace(STATE, measured_since_s=2000, num_unmeasured=1)
    few = replace(FACTS, figures=Outcomes(19, 0, 19))
    assert decide_gate(measured, few, GATE, 2599.9).state == measured
    after = decide_gate(measured, few, GATE, 2600.0)
    assert after.state == replace(STATE, since_s=None, num_passed=2, num_unmeasured=2)
    # What this process has not seen does not count.
    assert decide_gate(measured, replace(few, watched_s=599.0), GATE, 9000.0).state == measured


def test_a_roll_ends_when_all_engines_are_new_and_serve() -> None:
    done = replace(STATE, num_passed=4)
    whole = replace(FACTS, num_new=4, num_new_ready=4, num_old=0)
    assert decide_gate(done, whole, GATE, 0.0).state is None
    for changes in ({"num_old": 1}, {"num_new_ready": 3}):
        assert decide_gate(done, replace(whole, **changes), GATE, 0.0).state == done
    fewer = decide_gate(done, replace(whole, num_new=3, num_new_ready=3), GATE, 0.0)
    assert fewer.state == replace(done, num_passed=3)


def test_what_failed_stays_failed_and_a_refusal_is_a_failure() -> None:
    measured = replace(STATE, measured_since_s=2000)
    refused = decide_gate(measured, replace(FACTS, refusal="no"), GATE, 0.0)
    assert refused.state == replace(STATE, failure="no")
    again = decide_gate(replace(measured, failure="first"), replace(FACTS, refusal="second"), GATE, 0.0)
    assert again.state == replace(STATE, failure="first")
