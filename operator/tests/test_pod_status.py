"""What is read of a pod: each field from where Kubernetes has it, and why it does not serve, in exact words."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.api.labels import (
    CONTROL_TLS_ANNOTATION,
    DELETION_COST,
    DELETION_COST_ANNOTATION,
    DRAINED_DELETION_COST,
    DRAINING_SINCE_ANNOTATION,
    MODEL_LABEL,
    RESTART_HASH_ANNOTATION,
    ROLE_LABEL,
)
from sluice_operator.resources.pods.pod_status import Pod, read_pod

COMMIT = "0123456789" * 4
CREATED = "2026-01-02T03:04:05Z"


def make_pod(
    *conditions: dict[str, str],
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    node: str | None = None,
    **status: Any,
) -> Pod:
    named = {"name": "p", "uid": "u", "labels": labels, "annotations": annotations, **(metadata or {})}
    return read_pod(
        {
            "metadata": {name: value for name, value in named.items() if value is not None},
            **({"spec": {"nodeName": node}} if node else {}),
            "status": {"conditions": list(conditions), **status},
        }
    )


def condition(kind: str, status: str = "True", **fields: str) -> dict[str, str]:
    return {"type": kind, "status": status, **fields}


BARE = Pod(
    name="p",
    engine_id="u",
    address="",
    role_label="",
    has_deletion_cost=False,
    is_ready=False,
    is_ending=False,
    has_ended=False,
    failure=None,
)


@pytest.mark.parametrize(
    "content", [{}, {"status": None}, {"status": {}, "spec": {}}, {"status": {"conditions": None}}]
)
def test_of_a_pod_that_was_just_made_nothing_is_known(content: dict[str, Any]) -> None:
    pod = read_pod({"metadata": {"name": "p", "uid": "u"}, **content})
    assert pod == BARE
    assert pod.is_present


@pytest.mark.parametrize(
    ("found", "fields"),
    [
        (make_pod(podIP="10.0.0.1"), {"address": "10.0.0.1"}),
        (make_pod(labels={ROLE_LABEL: "p-heavy", MODEL_LABEL: "m"}), {"role_label": "p-heavy", "model_id": "m"}),
        (
            make_pod(annotations={DELETION_COST_ANNOTATION: DELETION_COST, DRAINING_SINCE_ANNOTATION: "1700"}),
            {"has_deletion_cost": True, "draining_since_s": 1700.0},
        ),
        (
            make_pod(annotations={DELETION_COST_ANNOTATION: DRAINED_DELETION_COST}),
            {"has_deletion_cost": True, "goes_next": True},
        ),
        (make_pod(annotations={DELETION_COST_ANNOTATION: "-5", DRAINING_SINCE_ANNOTATION: "soon"}), {}),
        (
            make_pod(annotations={RESTART_HASH_ANNOTATION: "h", CONTROL_TLS_ANNOTATION: "c.n.svc"}),
            {"restart_hash": "h", "control_tls": "c.n.svc"},
        ),
        (make_pod(metadata={"creationTimestamp": CREATED}), {"created": CREATED}),
        (make_pod(metadata={"creationTimestamp": None}), {}),
        (make_pod(metadata={"deletionTimestamp": CREATED}), {"is_ending": True}),
        (make_pod(phase="Failed"), {"has_ended": True}),
        (make_pod(phase="Succeeded"), {"has_ended": True}),
        (make_pod(phase="Running"), {}),
        (make_pod(node="n1"), {"node": "n1"}),
        (make_pod(condition("Ready")), {"is_ready": True}),
        (make_pod(condition("Ready", "False"), condition("ContainersReady")), {}),
        (make_pod(condition("DisruptionTarget")), {"is_disrupted": True}),
        (make_pod(condition("DisruptionTarget", "False")), {}),
    ],
)  # fmt: skip
def test_each_field_is_read_from_its_place(found: Pod, fields: dict[str, Any]) -> None:
    assert {name: getattr(found, name) for name in Pod.__slots__} == {
        **{name: getattr(BARE, name) for name in Pod.__slots__},
        **fields,
    }
    assert found.is_present is not (found.is_ending or found.has_ended)


@pytest.mark.parametrize(
    ("created", "status", "since", "took_s"),
    [
        (CREATED, "True", "2026-01-02T03:05:35Z", 90.0),
        (CREATED, "False", "2026-01-02T03:05:35Z", None),
        (CREATED, "True", None, None),
        (None, "True", "2026-01-02T03:05:35Z", None),
        (CREATED, "True", "a while ago", None),
    ],
)
def test_a_start_took_from_the_creation_until_the_pod_was_ready(created, status, since, took_s) -> None:
    ready = condition("Ready", status, **({"lastTransitionTime": since} if since else {}))
    scheduled = condition("PodScheduled", lastTransitionTime="2026-01-02T03:04:06Z")
    assert make_pod(scheduled, ready, metadata={"creationTimestamp": created}).started_in_s == took_s


@pytest.mark.parametrize(
    ("name", "state", "revision"),
    [
        ("resolve-model", {"terminated": {"message": COMMIT}}, COMMIT),
        ("resolve-model", {"terminated": {"message": f"{COMMIT} and more"}}, ""),
        ("resolve-model", {"terminated": {}}, ""),
        ("resolve-model", {"running": {}}, ""),
        ("resolve-model", None, ""),
        ("fetch-model", {"terminated": {"message": COMMIT}}, ""),
    ],
)
def test_a_revision_is_what_the_container_that_asked_the_hub_ended_with(name, state, revision) -> None:
    first = {"name": "rdma-preflight", "state": {"terminated": {"message": "1" * 40}}}
    assert make_pod(initContainerStatuses=[first, {"name": name, "state": state}]).resolved_revision == revision
    assert make_pod(initContainerStatuses=None).resolved_revision == ""


# --- why it does not serve


def end(code: int | None, *, message: str | None = None, reason: str | None = "Error") -> dict[str, Any]:
    fields = {"exitCode": code, "message": message, "reason": reason}
    return {"terminated": {name: value for name, value in fields.items() if value is not None}}


def wait(reason: str | None = None, message: str | None = None) -> dict[str, Any]:
    fields = {"reason": reason, "message": message}
    return {"waiting": {name: value for name, value in fields.items() if value is not None}}


KEEPS_ENDING = "container {name} of pod p keeps ending ({how}); read `kubectl logs p -c {name} --previous`"
REFUSES = (
    "container engine of pod p refuses to start: {}; it starts when the spec or the model is another; "
    "see EngineRefused in the runbook"
)
PULL = "image i:1 of container engine of pod p cannot be pulled; check its name, and that the node may pull it"
CANNOT = "container engine of pod p cannot start: {}; read `kubectl describe pod p`"
ONCE, OFTEN = {"restartCount": 1}, {"restartCount": 2}
LOOPS = KEEPS_ENDING.format(name="engine", how="OOMKilled, exit code 137")
KILLED = end(137, reason="OOMKilled")


@pytest.mark.parametrize(
    ("container", "reason", "message"),
    [
        ({}, None, ""),
        ({"state": wait("ContainerCreating")}, None, ""),
        ({"lastState": KILLED, **ONCE}, None, ""),
        ({"lastState": KILLED}, None, ""),
        ({"lastState": KILLED, **OFTEN}, Reason.CRASH_LOOP, LOOPS),
        ({"state": KILLED, **OFTEN}, Reason.CRASH_LOOP, LOOPS),
        ({"lastState": KILLED, "state": end(1), **OFTEN}, Reason.CRASH_LOOP, LOOPS),
        ({"lastState": KILLED, **OFTEN, "ready": True}, None, ""),
        (OFTEN, None, ""),
        (
            {"lastState": end(1, reason=None), **OFTEN},
            Reason.CRASH_LOOP,
            KEEPS_ENDING.format(name="engine", how="Error, exit code 1"),
        ),
        (
            {"state": wait("CrashLoopBackOff")},
            Reason.CRASH_LOOP,
            KEEPS_ENDING.format(name="engine", how="it keeps ending"),
        ),
        ({"state": wait("CrashLoopBackOff"), "lastState": KILLED}, Reason.CRASH_LOOP, LOOPS),
        *(
            ({"state": wait(word, "changes all the time")}, Reason.IMAGE_PULL_BACK_OFF, PULL)
            for word in ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")
        ),
        *(
            ({"state": wait(word, "no secret x")}, Reason.MOUNT_FAILED, CANNOT.format("no secret x"))
            for word in ("CreateContainerConfigError", "CreateContainerError")
        ),
        ({"state": wait("CreateContainerError")}, Reason.MOUNT_FAILED, CANNOT.format("CreateContainerError")),
        # It waits until the operator has stored the revision.
        ({"state": wait("CreateContainerConfigError", "no key model-revision-ab in x")}, None, ""),
        (
            {"lastState": end(6, message="KV would go over tcp")},
            Reason.PREFLIGHT_FAILED,
            "container engine of pod p: KV would go over tcp",
        ),
        ({"lastState": end(6)}, Reason.PREFLIGHT_FAILED, "container engine of pod p: exit code 6"),
        ({"lastState": end(6), "ready": True}, None, ""),
        *(({"lastState": end(code)}, Reason.ENGINE_REFUSED, REFUSES.format(f"exit code {code}")) for code in (2, 3, 7)),
        ({"lastState": end(7, message="a window")}, Reason.ENGINE_REFUSED, REFUSES.format("a window")),
        ({"lastState": end(7), "ready": True}, None, ""),
        ({"lastState": end(4)}, None, ""),
        (
            {"name": "rdma-preflight", "lastState": end(1, message="no device")},
            Reason.PREFLIGHT_FAILED,
            "container rdma-preflight of pod p: no device",
        ),
        ({"name": "rdma-preflight", "state": end(0, reason="Completed")}, None, ""),
        (
            {"name": "rdma-preflight", "state": end(0), "lastState": end(9)},
            Reason.PREFLIGHT_FAILED,
            "container rdma-preflight of pod p: exit code 9",
        ),
        ({"name": "side", "lastState": end(7), **ONCE}, None, ""),
        (
            {"name": "side", "lastState": end(7), **OFTEN},
            Reason.CRASH_LOOP,
            KEEPS_ENDING.format(name="side", how="Error, exit code 7"),
        ),
    ],
)
def test_a_container_that_does_not_serve_says_why(
    container: dict[str, Any], reason: Reason | None, message: str
) -> None:
    status = {"name": "engine", "image": "i:1", **container}
    expected = Failure(reason=reason, message=message) if reason else None
    assert make_pod(containerStatuses=[status]).failure == expected
    assert make_pod(initContainerStatuses=[status]).failure == expected
    # Those of a pod that serves come first in what is read, and say nothing.
    fine = {"name": "router", "ready": True, "state": {"running": {}}}
    assert make_pod(containerStatuses=[fine, status]).failure == expected


def test_the_first_trouble_is_said_from_the_node_over_preparations_to_the_program() -> None:
    unschedulable = condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")
    troubles = {
        "initContainerStatuses": [{"name": "rdma-preflight", "state": end(1)}],
        "containerStatuses": [{"name": "engine", "image": "i:1", "state": wait("ErrImagePull")}],
    }
    found = [
        make_pod(unschedulable, **troubles),
        make_pod(**troubles),
        make_pod(containerStatuses=troubles["containerStatuses"]),
    ]
    assert [pod.failure and pod.failure.reason for pod in found] == [
        Reason.UNSCHEDULABLE,
        Reason.PREFLIGHT_FAILED,
        Reason.IMAGE_PULL_BACK_OFF,
    ]
    assert found[0].failure is not None
    assert found[0].failure.message == (
        "pod p fits no node (0/3 nodes); free or add nodes, or ask for less in spec.engine.resources"
    )
