"""The conditions: the failures of pods, and each condition's reason."""

from __future__ import annotations

from typing import Any

import pytest
from fake_kubernetes import make_cluster

from sluice.v1 import control_pb2, plan_pb2
from sluice_core.slo import SloCounts
from sluice_operator.api.condition_types import REASONS, ConditionType, Reason
from sluice_operator.api.manifest import check_manifest
from sluice_operator.controller.conditions import decide_conditions, is_warning, list_transitions
from sluice_operator.controller.status import make_patch, render_status
from sluice_operator.controller.status_inputs import StatusInputs
from sluice_operator.planning.scale_down import ScaleDecision
from sluice_operator.resources.pods.pod_status import read_pod
from sluice_operator.routers.engine_reports import EngineReport


def make_pod(name: str = "p", *, is_ready: bool = True, **status: Any) -> Any:
    conditions = [{"type": "Ready", "status": str(is_ready)}, *status.pop("conditions", [])]
    metadata = {"name": name, "uid": name, "labels": {}}
    return read_pod({"metadata": metadata, "status": {"conditions": conditions, **status}})


def waiting(reason: str, **fields: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "said by the kubelet"}}
    return {"containerStatuses": [{"name": "engine", "image": "i:1", "ready": False, "state": state, **fields}]}


TERMINATED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "no RDMA device"}}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
FAILURES: dict[str, tuple[dict[str, Any], Reason | None, str]] = {
    "none": ({}, None, ""),
    "starting": (waiting("ContainerCreating"), None, ""),
    "image": (waiting("ErrImagePull"), Reason.IMAGE_PULL_BACK_OFF, "image i:1"),
    "back-off": (waiting("ImagePullBackOff"), Reason.IMAGE_PULL_BACK_OFF, "image i:1"),
    "crash-loop": (waiting("CrashLoopBackOff", lastState=TERMINATED), Reason.CRASH_LOOP, "exit code 1"),
    "between-crashes": (
        {"containerStatuses": [{"name": "engine", "ready": False, "restartCount": 3, "lastState": TERMINATED}]},
        Reason.CRASH_LOOP,
        "--previous",
    ),
    "one-crash": (
        {"containerStatuses": [{"name": "engine", "ready": False, "restartCount": 1, "lastState": TERMINATED}]},
        None,
        "",
    ),
    "secret": (waiting("CreateContainerConfigError"), Reason.MOUNT_FAILED, "said by the kubelet"),
    "no-node": ({"conditions": [UNSCHEDULABLE]}, Reason.UNSCHEDULABLE, "0/3 nodes"),
    "preflight": (
        {"initContainerStatuses": [{"name": "rdma-preflight", "ready": False, "state": TERMINATED}]},
        Reason.PREFLIGHT_FAILED,
        "no RDMA device",
    ),
    "engine-without-rdma": (
        waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 6, "message": "KV would go over tcp"}}),
        Reason.PREFLIGHT_FAILED,
        "KV would go over tcp",
    ),
    "engine-has-rdma-again": (
        {
            "containerStatuses": [
                {"name": "engine", "ready": True, "lastState": {"terminated": {"exitCode": 6, "message": "tcp"}}}
            ]
        },
        None,
        "",
    ),
}


@pytest.mark.parametrize(("status", "reason", "words"), FAILURES.values(), ids=FAILURES)
def test_a_pods_trouble_is_one_word_and_names_the_pod(status, reason, words) -> None:
    failure = make_pod("engine-1", is_ready=False, **status).failure
    assert (failure.reason if failure else None) == reason
    if failure:
        assert words in failure.message
        assert "engine-1" in failure.message


def find(old: Any = None, **fields: Any) -> StatusInputs:
    """The inputs of a cluster of two engines and a router that serve."""
    body = make_cluster(replicas=2, router={"replicas": 1}, **fields.pop("spec", {}))
    body["metadata"] |= {"uid": "u", "generation": 3}
    if old:
        body["status"] = old
    report = EngineReport(
        role=None,
        chunk_size_tokens=0,
        acknowledged_generation=7,
        is_drained=False,
        load=0,
        transport="tcp",
        fault="",
    )
    values: dict[str, Any] = {
        "engines": (make_pod("e1"), make_pod("e2")),
        "routers": (make_pod("r1"),),
        "plan": plan_pb2.Plan(
            generation=7, attainment_percent=90, strategy=1, engines=[plan_pb2.EnginePlan(engine_id="e1")]
        ),
        "reports": {"e1": report, "e2": report},
        "statuses": {"r1": control_pb2.GetStatusResponse(generation=7)},
        "scale": ScaleDecision(replicas=2),
        **fields,
    }
    return StatusInputs(body=body, cluster=check_manifest({k: v for k, v in body.items() if k != "status"}), **values)


def describe_conditions(found: StatusInputs) -> dict[str, tuple[str, str]]:
    return {item.type: (item.status, item.reason) for item in decide_conditions(found)}


def deployment(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "tiny-engine", "generation": 2},
        "status": {"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2, **status},
    }


QUOTA = {"type": "ReplicaFailure", "status": "True", "message": 'pods "x" is forbidden: exceeded quota: q'}
SECURITY = {"type": "ReplicaFailure", "status": "True", "message": "violates PodSecurity"}
RDMA = {"network": {"mode": "RDMA", "rdma": {"fabric": "RoCE", "resourceName": "a/b"}}}
TRANSPORTED = EngineReport(
    role=None,
    chunk_size_tokens=0,
    acknowledged_generation=7,
    is_drained=False,
    load=0,
    transport="rc_mlx5",
    fault="",
)
CASES: dict[str, tuple[dict[str, Any], str, tuple[str, str]]] = {
    "serving": ({}, "Ready", ("True", "Serving")),
    "first-start": ({"engines": ()}, "Ready", ("False", "Starting")),
    "settled": ({}, "Progressing", ("False", "Settled")),
    "draining": (
        {"scale": ScaleDecision(replicas=2, victims=frozenset({"e1"}), undrained=frozenset({"e1"}))},
        "Progressing",
        ("True", "Draining"),
    ),
    "rolling": ({"deployments": {"engine": deployment(updatedReplicas=1)}}, "Progressing", ("True", "RollingOut")),
    "unseen": ({"deployments": {"engine": deployment(observedGeneration=1)}}, "Progressing", ("True", "RollingOut")),
    "stopped": (
        {
            "deployments": {"engine": deployment(updatedReplicas=1)},
            "engines": (make_pod("e1"), make_pod("e2", is_ready=False, **waiting("ErrImagePull"))),
        },
        "Progressing",
        ("False", "RolloutStopped"),
    ),
    "scaling": ({"engines": (make_pod("e1"),)}, "Progressing", ("True", "Scaling")),
    "late-router": (
        {"statuses": {"r1": control_pb2.GetStatusResponse(generation=6)}},
        "Progressing",
        ("True", "ApplyingPlan"),
    ),
    "silent-router": ({"statuses": {}}, "Progressing", ("True", "ApplyingPlan")),
    "quota": (
        {"deployments": {"engine": deployment(conditions=[QUOTA])}},
        "Degraded",
        ("True", "QuotaExceeded"),
    ),
    "security": ({"deployments": {"engine": deployment(conditions=[SECURITY])}}, "Degraded", ("True", "Forbidden")),
    "plan-refused": ({"refusals": {"r1": "chunk"}}, "Degraded", ("True", "PlanRefused")),
    "stranger": (
        {
            "statuses": {
                "r1": control_pb2.GetStatusResponse(
                    generation=7,
                    engines=[control_pb2.EngineStatus(engine_id="x", state=control_pb2.ENGINE_STATE_REFUSED)],
                )
            }
        },
        "Degraded",
        ("True", "EngineFault"),
    ),
    "no-engine": ({"engines": (make_pod("e1", is_ready=False),)}, "EnginesReady", ("False", "NoneReady")),
    "some-engines": (
        {"engines": (make_pod("e1"), make_pod("e2", is_ready=False))},
        "EnginesReady",
        ("False", "SomeNotReady"),
    ),
    "tcp": ({}, "NetworkReady", ("True", "TCP")),
    "fallback": ({"spec": RDMA}, "NetworkReady", ("False", "RDMAFallback")),
    "rdma": ({"spec": RDMA, "reports": {"e1": TRANSPORTED}}, "NetworkReady", ("True", "RDMA")),
    "no-report": ({"spec": RDMA, "reports": {}}, "NetworkReady", ("Unknown", "NoReport")),
    "preflight": (
        {"engines": (make_pod("e1", is_ready=False, **FAILURES["preflight"][0]),)},
        "NetworkReady",
        ("False", "PreflightFailed"),
    ),
    "met": ({"attainment": {"": SloCounts(num_finished=10, num_met_both=9)}}, "SLOMet", ("True", "Met")),
    "missed": ({"attainment": {"": SloCounts(num_finished=100, num_met_both=89)}}, "SLOMet", ("False", "Missed")),
    "no-traffic": ({}, "SLOMet", ("Unknown", "NoTraffic")),
}


@pytest.mark.parametrize(("fields", "subject", "verdict"), CASES.values(), ids=CASES)
def test_each_condition_says_why(fields, subject, verdict) -> None:
    assert describe_conditions(find(**fields))[subject] == verdict


def test_a_cluster_that_served_once_says_what_is_missing() -> None:
    served = render_status(find(), "t0")
    assert describe_conditions(find(old=served, engines=()))["Ready"] == ("False", "EnginesNotReady")
    assert describe_conditions(find(old=served, routers=()))["Ready"] == ("False", "RouterNotReady")


def test_every_condition_is_there_with_a_reason_that_is_known() -> None:
    described = describe_conditions(find())
    assert set(described) == set(ConditionType)
    assert all(reason in REASONS[subject] for subject, (_, reason) in described.items())


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = render_status(find(), "t0")
    second = render_status(find(old=first, scale=ScaleDecision(replicas=2)), "t1")
    assert {item["lastTransitionTime"] for item in second["conditions"]} == {"t0"}
    third = render_status(find(old=second, engines=()), "t2")
    times = {item["type"]: item["lastTransitionTime"] for item in third["conditions"]}
    assert times["Ready"] == "t2"
    assert times["SpecValid"] == "t0"


def test_what_was_in_force_stays_known_while_no_router_answers() -> None:
    old = {**render_status(find(), "t0"), "effective": {"prefillHeavy": 1, "strategy": "TaiChi"}, "planGeneration": 7}
    status = render_status(find(old=old, statuses={}), "t1")
    assert status["effective"] == old["effective"]
    assert status["planGeneration"] == 7


def test_a_patch_holds_what_differs_and_nothing_else() -> None:
    old = {"a": 1, "b": {"c": 1, "d": 2}, "gone": 1, "list": [1]}
    new = {"a": 1, "b": {"c": 3}, "list": [1, 2]}
    assert make_patch(old, new) == {"b": {"c": 3, "d": None}, "gone": None, "list": [1, 2]}
    assert make_patch(new, new) == {}
    assert make_patch(None, {"effective": {}}) == {"effective": {}}


def test_transitions_make_events_and_measurements_do_not() -> None:
    calm, busy = render_status(find(), "t0"), render_status(find(refusals={"r1": "chunk"}), "t1")
    missed = render_status(find(attainment={"": SloCounts(num_finished=9)}), "t1")
    assert [item["type"] for item in list_transitions(calm, busy)] == ["Degraded"]
    assert is_warning(list_transitions(calm, busy)[0])
    assert list_transitions(calm, missed) == []
    assert list_transitions(calm, calm) == []
