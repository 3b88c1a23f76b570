"""Whole statuses of clusters whose state is drawn at random, against what was recorded: conditions, messages, numbers.

A message is what users, alerts and the runbook go by. Whoever means to change one records them anew, and reviews the
difference:

    .venv/bin/python operator/tests/test_drawn_statuses.py
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_kubernetes import make_cluster
from test_conditions import FAILURES, QUOTA, RDMA, SECURITY, deployment, make_pod

from sluice.v1 import control_pb2
from sluice_core.records import EngineId, Role
from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.condition_types import REASONS, ConditionType, Failure, Reason
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders
from sluice_operator.autoscaling.condition import ScaleStatus
from sluice_operator.autoscaling.scaler import apply_replicas
from sluice_operator.autoscaling.stored_scale import StoredScale
from sluice_operator.autotune.condition import AutotuneStatus
from sluice_operator.autotune.search_messages import SearchResult
from sluice_operator.controller.events import is_warning, list_transitions
from sluice_operator.controller.status import make_patch, render_status, strip_measurements
from sluice_operator.controller.status_inputs import StatusInputs
from sluice_operator.planning.plan_message import render_plan
from sluice_operator.planning.pod_patches import render_pod_patches
from sluice_operator.planning.rollout_gate import GateDecision
from sluice_operator.planning.scale_down import ScaleDecision
from sluice_operator.resources.rollout_state import RolloutState
from sluice_operator.routers.engine_reports import has_acknowledged, merge_reports, needs_reconcile

RECORDED = Path(__file__).with_name("drawn_statuses.yaml")
NUMBERS = range(150)
# From here on, one trouble at most; autoscaling, refused specs and paused rolls, which are rare among the others.
FIRST_CALM = 90
STATES = (
    control_pb2.ENGINE_STATE_READY,
    control_pb2.ENGINE_STATE_READY,
    control_pb2.ENGINE_STATE_DRAINING,
    control_pb2.ENGINE_STATE_DRAINED,
    control_pb2.ENGINE_STATE_CONNECTING,
    control_pb2.ENGINE_STATE_REFUSED,
)
CLASSES = [{"name": name, "ttftMilliseconds": 9, "tpotMilliseconds": 9} for name in ("chat", "batch")]
GATE = {"durationSeconds": 60}


def maybe(rng: random.Random, share: float, value: Any, other: Any) -> Any:
    return value if rng.random() < share else other


def draw_pods(rng: random.Random, prefix: str, most: int) -> tuple[Any, ...]:
    pods = []
    for number in range(rng.randint(0, most)):
        status = FAILURES[rng.choice(list(FAILURES))][0] if rng.random() < 0.15 else {}
        pod = make_pod(
            f"{prefix}{number}",
            is_ready=rng.random() < 0.8 and not status,
            is_ending=rng.random() < 0.1,
            **{key: list(value) for key, value in status.items()},
        )
        marks = {"has_deletion_cost": rng.random() < 0.2, "goes_next": rng.random() < 0.1}
        since_s = rng.choice((None, 77.5))
        pods.append(replace(pod, role_label=rng.choice(("", "P-heavy", "D-heavy")), draining_since_s=since_s, **marks))
    return tuple(pods)


def draw_engine_status(rng: random.Random, engine_id: str) -> control_pb2.EngineStatus:
    return control_pb2.EngineStatus(
        engine_id=engine_id,
        address=f"10.0.0.{len(engine_id)}",
        state=rng.choice(STATES),
        role=rng.choice((0, 1, 1, 2, 2)),
        chunk_size_tokens=rng.choice((64, 512, 512)),
        acknowledged_generation=rng.choice((6, 7, 7, 7)),
        running_decodes=rng.randrange(5),
        waiting_requests=rng.randrange(3),
        transport=rng.choice(("", "tcp", "rc_mlx5", "cuda_ipc")),
        last_fault=rng.choice(("", "", "broken pipe")),
        serves_other_model=rng.random() < 0.2,
    )


def draw_spec(rng: random.Random) -> dict[str, Any]:
    rollout = {"paused": rng.random() < 0.4, "maxSurge": rng.choice((0, 0, "0%", 1))}
    return {
        "replicas": rng.choice((1, 2, 2, 3)),
        "router": {"replicas": rng.choice((1, 2))},
        "rollout": {**rollout, **maybe(rng, 0.3, {"gate": GATE}, {})},
        "slo": {
            "ttftMilliseconds": 2000,
            "tpotMilliseconds": 200,
            "attainment": "90%",
            "classes": CLASSES[: rng.randrange(3)],
        },
        "autotune": {"mode": rng.choice(("Off", "Recommend"))},
        **maybe(rng, 0.4, RDMA, {}),
    }


def draw_deployments(rng: random.Random) -> dict[str, Any]:
    found = {}
    for component in ("engine", "router"):
        if rng.random() < 0.7:
            status = maybe(rng, 0.3, {"updatedReplicas": 1}, {}) | maybe(rng, 0.1, {"observedGeneration": 1}, {})
            status |= maybe(rng, 0.15, {"conditions": [rng.choice((QUOTA, SECURITY))]}, {})
            found[component] = deployment(**status)
    return found


def draw_counts(rng: random.Random) -> SloCounts:
    finished = rng.choice((10, 1000))
    ttft, tpot = rng.randint(0, finished), rng.randint(0, finished)
    return SloCounts(
        num_finished=finished,
        num_met_ttft=ttft,
        num_met_tpot=tpot,
        num_met_both=rng.choice((min(ttft, tpot), finished * 9 // 10)),
    )


def draw_old_status(rng: random.Random) -> dict[str, Any]:
    conditions = [
        {"type": kind, "status": status, "reason": reason, "lastTransitionTime": "then", "message": "m"}
        for kind, status, reason in (
            ("Ready", rng.choice(("True", "False")), rng.choice(("Serving", "Starting", "EnginesNotReady"))),
            ("Degraded", rng.choice(("True", "False")), rng.choice(("AsExpected", "CrashLoop"))),
            ("SLOMet", "True", "Met"),
        )
    ]
    effective = {"prefillHeavy": 9, "strategy": "Old", "chunkSizes": {"prefillHeavy": 1, "decodeHeavy": 2}}
    return {"conditions": conditions, "planGeneration": 3, "effective": rng.choice(({}, effective))}


def draw(number: int) -> StatusInputs:
    rng = random.Random(f"status {number}")
    body = make_cluster(**draw_spec(rng))
    body["metadata"] |= {"uid": "u", "generation": rng.randint(1, 4)}
    checked = check_manifest(dict(body))
    if rng.random() < 0.7:
        body["status"] = draw_old_status(rng)
    refusal = maybe(rng, 0.15, Failure(reason=Reason.REFUSED, message="spec.replicas: 0 is too few"), None)
    engines, routers = draw_pods(rng, "engine-", 4), draw_pods(rng, "router-", 3)
    roles = {pod.engine_id: rng.choice(list(Role)) for pod in engines}
    statuses = {
        pod.name: control_pb2.GetStatusResponse(
            generation=rng.choice((6, 7, 7, 7)), engines=[draw_engine_status(rng, pod.engine_id) for pod in engines]
        )
        for pod in routers
        if rng.random() < 0.85
    }
    victims = frozenset(pod.engine_id for pod in engines if pod.has_deletion_cost)
    undrained = frozenset(engine for engine in sorted(victims) if rng.random() < 0.5)
    roll = RolloutState(
        target_hash="t",
        good_template={},
        num_passed=rng.randrange(2),
        num_unmeasured=rng.randrange(2),
        failure=rng.choice(("", "", "3 of 9 requests failed")),
    )
    result = SearchResult(
        sliders=Sliders(num_prefill_heavy=1, prefill_heavy_tokens=1024, decode_heavy_tokens=128),
        goodput_rps=3.0,
        attainment=rng.choice((0.9, 0.9999, 0.5004)),
        in_force_goodput_rps=2.0,
        in_force_attainment=0.7,
        least_gain=0.4,
    )
    autotune = AutotuneStatus(
        is_true=rng.random() < 0.5, reason=rng.choice((Reason.OFF, Reason.TUNED)), message="tuned"
    )
    found = StatusInputs(
        body=body,
        cluster=None if refusal and rng.random() < 0.5 else checked,
        refusal=refusal,
        failures=maybe(rng, 0.1, (Failure(reason=Reason.NAME_CONFLICT, message="service x is another's"),), ()),
        engines=engines,
        routers=routers,
        deployments=draw_deployments(rng),
        scale=ScaleDecision(replicas=3, victims=victims, undrained=undrained, drained=victims - undrained),
        plan=maybe(rng, 0.9, render_plan(checked, roles, generation=7, cluster_uid="u", draining=victims), None),
        reports=merge_reports(statuses.values()),
        statuses=statuses,
        refusals=maybe(rng, 0.1, {"router-9": "no such engine", "router-1": "too old"}, {}),
        attainment=maybe(rng, 0.7, {name: draw_counts(rng) for name in ("", "chat", "other")}, {}),
        autotune=maybe(rng, 0.8, autotune, None),
        recommended=maybe(rng, 0.5, result, None),
        rollout=GateDecision(state=maybe(rng, 0.3, roll, None)),
        switching=maybe(rng, 0.15, "the routers switch once 2 engines serve", ""),
        waiting_upgrade=maybe(rng, 0.3, "engine image x waits", ""),
    )
    if number >= FIRST_CALM:
        return vary(rng, calm(found))
    return calm(found) if number % 3 == 0 else found


def vary(rng: random.Random, inputs: StatusInputs) -> StatusInputs:
    """The same where autoscaling says how many engines there are, before the first plan, or with a refused spec."""
    assert inputs.cluster is not None
    cluster, body, engines = inputs.cluster, inputs.body, inputs.engines
    mode = rng.choice(("Disabled", "Recommend", "Apply"))
    body = {**body, "spec": {**body["spec"], **maybe(rng, 0.8, {"autoscaling": {"mode": mode}}, {})}}
    wanted = StoredScale(basis=2, replicas=rng.randrange(4), reason="1.00 requests/s arrive")
    old = {"replicas": rng.randrange(4), "reason": "as it was", "time": "then"}
    if "status" in body and rng.random() < 0.6:
        recommended = {"replicas": rng.choice((2, 3)), "prefillHeavy": 1, "time": "then"}
        body["status"] = {**body["status"], "autoscaling": old, "recommended": recommended}
    if rng.random() < 0.35:
        cluster = apply_replicas(cluster, 0)
        engines = engines[: rng.choice((0, 0, 1))]
    is_refused = rng.random() < 0.25
    reason = rng.choice((Reason.SIZED, Reason.IDLE, Reason.AT_MAXIMUM))
    status = ScaleStatus(is_true=reason is not Reason.AT_MAXIMUM, reason=reason, message="so many engines are wanted")
    rolling = {"engine": deployment(updatedReplicas=1), "router": deployment()}
    return replace(
        inputs,
        body=body,
        cluster=None if is_refused and rng.random() < 0.7 else cluster,
        refusal=Failure(reason=Reason.REFUSED, message="spec.replicas: -1 is too few") if is_refused else None,
        engines=engines,
        routers=inputs.routers if rng.random() < 0.85 else (),
        plan=maybe(rng, 0.6, inputs.plan, None),
        autotune=None if is_refused else inputs.autotune,
        autoscale=None if is_refused or rng.random() < 0.3 else status,
        wanted=maybe(rng, 0.7, wanted, None),
        deployments=maybe(rng, 0.3, rolling, {"engine": deployment(), "router": deployment()}),
        refusals={},
        waiting_upgrade=maybe(rng, 0.2, "engine image x waits", ""),
        switching="",
    )


def calm(inputs: StatusInputs) -> StatusInputs:
    """The same with one trouble at most: what is said first hides the rest otherwise."""
    replicas, routers = inputs.body["spec"]["replicas"], inputs.body["spec"]["router"]["replicas"]
    pods = [
        make_pod(f"{kind}-{number}")
        for kind, count in (("engine", replicas), ("router", routers))
        for number in range(count)
    ]
    sick = [pod for pod in inputs.engines if pod.failure][:1]
    return replace(
        inputs,
        engines=(*pods[: replicas - len(sick)], *sick),
        routers=tuple(pods[replicas:]),
        scale=ScaleDecision(replicas=replicas),
        refusal=None,
        cluster=check_manifest({name: value for name, value in inputs.body.items() if name != "status"}),
        failures=(),
        rollout=GateDecision(state=None),
    )


def describe(number: int) -> dict[str, Any]:
    """Describes a cluster's status, and what follows from what was drawn."""
    inputs = draw(number)
    status = render_status(inputs, "now")
    old = inputs.body.get("status") or {}
    conditions = status.pop("conditions")
    times = {item["type"] for item in conditions if item["lastTransitionTime"] == "then"}
    assert {item["observedGeneration"] for item in conditions} == {inputs.body["metadata"]["generation"]}
    plan = inputs.plan
    return {
        **{item["type"]: f"{item['status']} {item['reason']}: {item['message']}" for item in conditions},
        "unchanged": " ".join(sorted(times)),
        "warnings": " ".join(item["type"] for item in conditions if is_warning(item)),
        "events": " ".join(item["type"] for item in list_transitions(old, {"conditions": conditions})),
        "status": json.dumps(status),
        "reports": [
            f"{engine}: {each.role} {each.chunk_size_tokens} {each.acknowledged_generation} {each.is_drained} "
            f"{each.load} {each.transport} {each.fault}"
            for engine, each in inputs.reports.items()
        ],
        "in force": plan is not None and has_acknowledged(plan, inputs.reports, list(inputs.statuses.values())),
        "patches": [
            json.dumps(each) for each in render_pod_patches(inputs.engines, inputs.scale, inputs.reports, 1234.5)
        ],
    }


RECORDS = yaml.safe_load(RECORDED.read_text()) if RECORDED.exists() else {}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_status_is_as_it_was_recorded(number: int) -> None:
    assert describe(number) == RECORDS[number]


def test_the_drawn_statuses_have_seen_most_reasons() -> None:
    seen = Counter(record[kind].split(":")[0].split()[1] for record in RECORDS.values() for kind in ConditionType)
    missing = {reason.value for reason in Reason} - set(seen)
    of_tuner_and_scaler = {*REASONS[ConditionType.AUTOTUNED], *REASONS[ConditionType.AUTOSCALED]}
    assert missing - of_tuner_and_scaler <= {Reason.POD_TEMPLATE_REFUSED, Reason.NOT_AVAILABLE, Reason.ROLLOUT_PAUSED}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_patch_makes_the_one_status_of_the_other(number: int) -> None:
    """As the API server merges it: null removes a field, maps are merged, the rest is replaced."""
    old, new = render_status(draw(number), "then"), render_status(draw((number + 1) % len(NUMBERS)), "now")
    patch = make_patch(old, new)
    assert merge(old, patch) == new
    assert make_patch(new, new) == {}
    assert all(old.get(name) != new.get(name) for name in patch)
    bare = strip_measurements(new)
    assert bare["attainment"] is None
    assert [item["type"] for item in bare["conditions"]] == [
        item["type"] for item in new["conditions"] if item["type"] != "SLOMet"
    ]


def merge(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


BASE = control_pb2.GetStatusResponse(
    router_id="r",
    generation=7,
    acknowledged_generation=6,
    is_ready=True,
    num_failed=3,
    engines=[control_pb2.EngineStatus(engine_id="e", epoch=4, state=2, role=1, chunk_size_tokens=9)],
)


@pytest.mark.parametrize(
    ("field", "value", "needs"),
    [
        ("router_id", "s", True),
        ("generation", 8, True),
        ("acknowledged_generation", 8, True),
        ("is_ready", False, True),
        ("num_failed", 9, False),
        ("engine_id", "f", True),
        ("epoch", 5, True),
        ("state", 3, True),
        ("role", 2, True),
        ("chunk_size_tokens", 10, True),
        ("transport", "tcp", True),
        ("running_decodes", 10, False),
        ("last_fault", "x", False),
    ],
)
def test_a_status_that_changed_in_something_to_act_on_causes_a_reconcile(
    field: str, value: Any, *, needs: bool
) -> None:
    changed = control_pb2.GetStatusResponse()
    changed.CopyFrom(BASE)
    setattr(changed if hasattr(changed, field) else changed.engines[0], field, value)
    assert needs_reconcile(BASE, changed) is needs
    assert not needs_reconcile(BASE, BASE)
    assert needs_reconcile(None, BASE)
    assert needs_reconcile(BASE, None)
    assert not needs_reconcile(None, None)


def test_engines_that_no_router_has_a_stream_to_have_no_report() -> None:
    lost = control_pb2.EngineStatus(engine_id="e", state=control_pb2.ENGINE_STATE_CONNECTING)
    assert merge_reports([control_pb2.GetStatusResponse(engines=[lost])]) == {}
    nameless = control_pb2.EngineStatus(state=control_pb2.ENGINE_STATE_READY)
    assert merge_reports([control_pb2.GetStatusResponse(engines=[nameless])]) == {}
    assert list(merge_reports([BASE])) == [EngineId("e")]


def write() -> None:
    """Records all statuses."""
    RECORDED.write_text(yaml.safe_dump({number: describe(number) for number in NUMBERS}, sort_keys=False, width=200))


if __name__ == "__main__":
    write()
    sys.stdout.write(f"{len(NUMBERS)} statuses are in {RECORDED}\n")
