"""The conditions: the failures of pods, and each condition's reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_kubernetes import make_cluster

from sluice.v1 import control_pb2, plan_pb2
from sluice_core.records import Role
from sluice_core.slo_attainment import SloCounts
from sluice_engine.errors import ModelRefusedError, RdmaError, SettingsError, UnsupportedVllmError
from sluice_operator.api.condition_types import REASONS, ConditionType, Failure, Reason
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune.search_messages import SearchResult
from sluice_operator.controller.conditions import decide_conditions, is_tcp
from sluice_operator.controller.events import is_warning, list_transitions, render_event
from sluice_operator.controller.status import make_patch, render_status
from sluice_operator.controller.status_inputs import StatusInputs
from sluice_operator.planning.scale_down import ScaleDecision
from sluice_operator.resources.pods.pod_failures import ENGINE_REFUSAL_EXIT_CODES, NO_RDMA_EXIT_CODE
from sluice_operator.resources.pods.pod_status import read_pod
from sluice_operator.routers.engine_reports import EngineReport


def make_pod(name: str = "p", *, is_ready: bool = True, is_ending: bool = False, **status: Any) -> Any:
    conditions = [{"type": "Ready", "status": str(is_ready)}, *status.pop("conditions", [])]
    metadata = {"name": name, "uid": name, "labels": {}, **({"deletionTimestamp": "now"} if is_ending else {})}
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
    "engine-refuses-its-model": (
        waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 7, "message": "sliding_window is 4096"}}),
        Reason.ENGINE_REFUSED,
        "sliding_window is 4096",
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


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_is_in_force_is_not_said_to_match_a_spec_that_is_refused(*, is_refused: bool) -> None:
    found = find(refusal=REFUSAL if is_refused else None)
    (message,) = [item.message for item in decide_conditions(found) if item.type == "Progressing"]
    assert message == "everything matches the spec" + " that was accepted last; see SpecValid" * is_refused


def test_the_exit_codes_of_refusals_are_the_engines() -> None:
    refusals = (SettingsError, UnsupportedVllmError, ModelRefusedError)
    assert {error.exit_status for error in refusals} == ENGINE_REFUSAL_EXIT_CODES
    assert RdmaError.exit_status == NO_RDMA_EXIT_CODE


REPORT = EngineReport(
    role=None, chunk_size_tokens=0, acknowledged_generation=7, is_drained=False, load=0, transport="tcp", fault=""
)
REFUSAL = Failure(reason=Reason.REFUSED, message="spec.replicas: 0 is too few")
# The engine's second process waits; the pod's status keeps saying how the first one ended.
ENDED = {"terminated": {"exitCode": 7, "message": "sliding_window is 4096"}}
WAITING_AFTER_REFUSAL = {
    "containerStatuses": [
        {"name": "engine", "ready": False, "restartCount": 4, "state": {"running": {}}, "lastState": ENDED}
    ]
}
APPLYING = ("True", "ApplyingPlan")


def find(old: Any = None, **fields: Any) -> StatusInputs:
    """The inputs of a cluster of two engines and a router that serve."""
    body = make_cluster(replicas=2, router={"replicas": 1}, **fields.pop("spec", {}))
    body["metadata"] |= {"uid": "u", "generation": 3}
    if old:
        body["status"] = old
    values: dict[str, Any] = {
        "engines": (make_pod("e1"), make_pod("e2")),
        "routers": (make_pod("r1"),),
        "plan": plan_pb2.Plan(
            generation=7, attainment_percent=90, strategy="taichi", engines=[plan_pb2.EnginePlan(engine_id="e1")]
        ),
        "reports": {"e1": REPORT, "e2": REPORT},
        "statuses": {"r1": control_pb2.GetStatusResponse(generation=7)},
        "scale": ScaleDecision(replicas=2),
        "cluster": check_manifest({k: v for k, v in body.items() if k != "status"}),
        **fields,
    }
    return StatusInputs(body=body, **values)


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
TRANSPORTED = replace(REPORT, transport="rc_mlx5")
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
    "scaling-with-a-bad-image": (
        {"engines": (make_pod("e1"), make_pod("e2", is_ready=False, **waiting("ErrImagePull")))},
        "Progressing",
        ("True", "Scaling"),
    ),
    "refused": ({"cluster": None, "refusal": REFUSAL}, "Progressing", ("False", "Settled")),
    "refused-at-first": ({"cluster": None, "refusal": REFUSAL, "engines": ()}, "Ready", ("False", "SpecInvalid")),
    "refused-while-it-serves": ({"cluster": None, "refusal": REFUSAL}, "Ready", ("True", "Serving")),
    "refused-while-it-starts": (
        {"cluster": None, "refusal": REFUSAL, "engines": (make_pod("e1", is_ready=False),)},
        "Ready",
        ("False", "Starting"),
    ),
    "refusal": ({"cluster": None, "refusal": REFUSAL}, "SpecValid", ("False", "Refused")),
    "late-engine": ({"reports": {"e1": replace(REPORT, acknowledged_generation=6)}}, "Progressing", APPLYING),
    "late-engine-that-is-in-no-plan": (
        {"reports": {"e1": REPORT, "e2": replace(REPORT, acknowledged_generation=6)}},
        "Progressing",
        ("False", "Settled"),
    ),
    "failed-and-ending": (
        {"engines": (make_pod("e1"), make_pod("e2", is_ready=False, is_ending=True, **waiting("ErrImagePull")))},
        "Degraded",
        ("False", "AsExpected"),
    ),
    "failed": (
        {"routers": (make_pod("r1", is_ready=False, **waiting("ErrImagePull")),)},
        "Degraded",
        ("True", "ImagePullBackOff"),
    ),
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
    refused = render_status(find(cluster=None, refusal=REFUSAL, engines=()), "t0")
    assert describe_conditions(find(old=refused, engines=()))["Ready"] == ("False", "Starting")


def test_messages_count_and_name_the_objects_concerned() -> None:
    fallen = {name: replace(REPORT, transport=f"tcp,{name}") for name in ("e1", "e2")}
    messages = {item.type: item.message for item in decide_conditions(find(spec=RDMA, reports=fallen))}
    assert messages["NetworkReady"].startswith("engine e1 and 1 more transfer KV over tcp,e1;")
    waits = find(engines=(make_pod("e1"), make_pod("e2", is_ready=False), make_pod("e3", is_ready=False)))
    messages = {item.type: item.message for item in decide_conditions(waits)}
    assert messages["EnginesReady"] == "1 of 2 engines are ready; see pod e2"
    assert messages["Progressing"] == "2 engines wanted, 1 ready"
    late = find(statuses={"r1": control_pb2.GetStatusResponse(generation=6)})
    messages = {item.type: item.message for item in decide_conditions(late)}
    assert messages["Progressing"] == "waits for 1 routers and 0 engines to take the plan"


def test_a_message_is_no_longer_than_the_definition_allows() -> None:
    status = render_status(find(failures=(Failure(reason=Reason.FORBIDDEN, message="x" * 9999),)), "t")
    assert max(len(item["message"]) for item in status["conditions"]) == 4096


@pytest.mark.parametrize(
    ("url", "where"),
    [("", "see EngineRefused in the runbook"), ("https://x/runbook.md", "see https://x/runbook.md#enginerefused")],
    ids=["no address", "an address"],
)
def test_a_refused_engine_is_said_with_a_link_to_the_runbook(url: str, where: str) -> None:
    pod = make_pod("e1", is_ready=False, **WAITING_AFTER_REFUSAL)
    status = render_status(find(engines=(pod,), runbook_url=url), "t")
    (degraded,) = (item for item in status["conditions"] if item["type"] == "Degraded")
    assert degraded["reason"] == "EngineRefused"
    assert degraded["message"] == (
        "container engine of pod e1 refuses to start: sliding_window is 4096; "
        f"it starts when the spec or the model is another; {where}"
    )


def test_every_condition_says_which_generation_it_is_about() -> None:
    old = render_status(find(), "t0")
    assert {item["observedGeneration"] for item in old["conditions"]} == {3} == {old["observedGeneration"]}
    newer = find(old=old)
    newer.body["metadata"]["generation"] = 4
    new = render_status(newer, "t1")
    assert {item["observedGeneration"] for item in new["conditions"]} == {4} == {new["observedGeneration"]}


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


def test_the_status_counts_pods_that_stay_and_selects_engines() -> None:
    ending = make_pod("old", is_ending=True)
    pods = find(engines=(make_pod("e1"), make_pod("e2", is_ready=False), ending), routers=(make_pod("r1"), ending))
    status = render_status(pods, "t")
    counts = {name: status[name] for name in ("replicas", "readyReplicas", "routerReplicas", "readyRouterReplicas")}
    assert counts == {"replicas": 2, "readyReplicas": 1, "routerReplicas": 1, "readyRouterReplicas": 1}
    assert status["selector"] == "app.kubernetes.io/component=engine,sluice.dev/cluster=tiny"


@pytest.mark.parametrize(
    ("generations", "number", "strategy"),
    [((7, 7), 7, "TaiChi"), ((7, 6), 6, "Aggregated"), ((7,), 3, "TaiChi"), ((), 3, "Aggregated")],
    ids=["all", "one late", "one silent", "all silent"],
)
def test_a_plan_is_in_force_once_every_router_has_it(generations, number: int, strategy: str) -> None:
    old = {"planGeneration": 3, "effective": {"strategy": "Aggregated"}}
    statuses = {f"r{n}": control_pb2.GetStatusResponse(generation=item) for n, item in enumerate(generations)}
    status = render_status(find(old=old, routers=(make_pod("r0"), make_pod("r1")), statuses=statuses), "t")
    assert (status["planGeneration"], status["effective"]["strategy"]) == (number, strategy)


def test_a_plan_is_in_force_once_every_worker_of_a_router_pod_has_it() -> None:
    pod = replace(make_pod("r0"), num_workers=2)
    answer = control_pb2.GetStatusResponse(generation=7)
    one, both = ({"r0": answer}, {"r0": answer, "r0-1": answer})
    assert "planGeneration" not in render_status(find(routers=(pod,), statuses=one), "t")
    assert render_status(find(routers=(pod,), statuses=both), "t")["planGeneration"] == 7


def test_sliders_in_force_are_those_of_engines_that_stay() -> None:
    prefill = replace(REPORT, role=Role.PREFILL_HEAVY, chunk_size_tokens=512)
    decode = replace(REPORT, role=Role.DECODE_HEAVY, chunk_size_tokens=64)
    reports = {"e1": prefill, "e2": decode, "e3": replace(decode, chunk_size_tokens=128)}
    leaving = ScaleDecision(replicas=3, victims=frozenset({"e3"}), undrained=frozenset({"e3"}))
    effective = render_status(find(reports=reports, scale=leaving), "t")["effective"]
    assert {**effective, "strategy": ""} == {
        "prefillHeavy": 1,
        "decodeHeavy": 1,
        "draining": 1,
        "strategy": "",
        "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
    }
    # While engines differ, the size that was in force last stays.
    old = {"effective": {"chunkSizes": {"decodeHeavy": 32}}}
    sizes = render_status(find(old=old, reports=reports), "t")["effective"]["chunkSizes"]
    assert sizes == {"prefillHeavy": 512, "decodeHeavy": 32}


def test_attainment_is_that_of_all_requests_and_of_the_classes_that_the_spec_names() -> None:
    slo_class = {"name": "batch", "ttftMilliseconds": 1, "tpotMilliseconds": 1}
    slo = {"slo": {"ttftMilliseconds": 1, "tpotMilliseconds": 1, "classes": [slo_class]}}
    counts = SloCounts(num_finished=10, num_met_ttft=9, num_met_tpot=8, num_met_both=7)
    attainment = {"": counts, "batch": counts, "gone": counts}
    assert render_status(find(spec=slo, attainment=attainment), "t")["attainment"] == {
        "requests": 30,
        "ttft": "90%",
        "tpot": "80%",
        "both": "70%",
        "classes": [{"name": "batch", "requests": 10, "ttft": "90%", "tpot": "80%", "both": "70%"}],
    }


def test_a_recommendation_keeps_its_time_until_it_changes() -> None:
    result = SearchResult(
        sliders=Sliders(num_prefill_heavy=1, prefill_heavy_tokens=512, decode_heavy_tokens=64),
        goodput_rps=3.0,
        attainment=0.9344,
        in_force_goodput_rps=2.0,
        in_force_attainment=0.5,
        least_gain=0.4,
    )
    first = render_status(find(recommended=result), "t0")
    assert (first["recommended"]["time"], first["recommended"]["predictedAttainment"]) == ("t0", "93.4%")
    assert render_status(find(old=first, recommended=result), "t1")["recommended"] == first["recommended"]
    assert render_status(find(old=first), "t1")["recommended"] == first["recommended"]
    other = render_status(find(old=first, recommended=replace(result, attainment=0.95)), "t1")
    assert other["recommended"] == {**first["recommended"], "predictedAttainment": "95%", "time": "t1"}


def test_an_event_names_the_cluster_and_what_changed() -> None:
    body = find().body
    condition = {"type": "Degraded", "status": "True", "reason": "PlanRefused", "message": "x" * 2000}
    event = render_event(body, condition, "pod-1", "2026-01-02T03:04:05Z")
    assert event["note"] == f"Degraded is True: {'x' * 2000}"[:1024]
    assert {**event, "note": ""} == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": "tiny-", "namespace": "default"},
        "eventTime": "2026-01-02T03:04:05.000000Z",
        "type": "Warning",
        "reason": "PlanRefused",
        "action": "Degraded",
        "note": "",
        "reportingController": "sluice.dev/sluice-operator",
        "reportingInstance": "pod-1",
        "regarding": {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "ServingCluster",
            "name": "tiny",
            "namespace": "default",
            "uid": "u",
        },
    }


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
    # A new cluster makes news of what is good, and not of what is normal at first.
    assert [item["type"] for item in list_transitions({}, calm)] == [
        "Ready",
        "EnginesReady",
        "RouterReady",
        "NetworkReady",
    ]


@pytest.mark.parametrize(
    ("subject", "status", "reason", "verdict"),
    [
        ("Ready", "False", "EnginesNotReady", True),
        ("Ready", "True", "Serving", False),
        ("Ready", "False", "Starting", False),
        ("Degraded", "False", "AsExpected", False),
        ("Degraded", "True", "CrashLoop", True),
        ("Progressing", "False", "Settled", False),
        ("Progressing", "False", "RolloutStopped", True),
        ("Autotuned", "False", "Off", False),
        ("Autotuned", "False", "SearchFailed", True),
        ("Autoscaled", "False", "AtMaximum", True),
        ("Autoscaled", "False", "Off", False),
        ("NetworkReady", "Unknown", "NoReport", False),
    ],
)
def test_a_warning_says_that_something_is_wrong(subject: str, status: str, reason: str, *, verdict: bool) -> None:
    assert is_warning({"type": subject, "status": status, "reason": reason}) is verdict


@pytest.mark.parametrize(("transport", "is_slow"), [("tcp", True), ("UCX TCP", True), ("rc_mlx5", False), ("", False)])
def test_tcp_is_told_from_rdma_however_it_is_written(transport: str, *, is_slow: bool) -> None:
    assert is_tcp(transport) is is_slow
