"""Exactly what users read when a podTemplate or an affinity is refused: the path of the field, and what to do."""

from __future__ import annotations

import pytest
from test_pod_template import EVERYWHERE, PREFERRED_ELSEWHERE, container, engine, volume

from sluice_operator.api.names import ENGINE
from sluice_operator.resources.pods.pod_isolation import ADVICE, find_isolation_violations
from sluice_operator.resources.pods.user_pod_template import find_refused_affinity_terms, find_refused_fields

POD = "spec.securityContext"
SIDE, OURS = "spec.containers[side]", "spec.containers[engine]"
ESCAPES = "reaches other namespaces; remove it, or have the operator started with --allow-host-access"
LINES = [
    ({"spec": {"hostNetwork": True}}, f"spec.hostNetwork {ADVICE}"),
    ({"spec": {"hostPID": True}}, f"spec.hostPID {ADVICE}"),
    ({"spec": {"hostIPC": True}}, f"spec.hostIPC {ADVICE}"),
    (volume(hostPath={"path": "/"}), f"spec.volumes[x].hostPath {ADVICE}, or bring it as a persistentVolumeClaim"),
    (volume(nfs={"server": "s"}), f"spec.volumes[x].nfs {ADVICE}, or bring it as a persistentVolumeClaim"),
    (
        volume(projected={"sources": [{"configMap": {}}, {"serviceAccountToken": {}}]}),
        "spec.volumes[x] holds a service account's token; engines have none, remove it",
    ),
    (
        volume(ephemeral={"volumeClaimTemplate": {"spec": {"dataSourceRef": {"name": "d", "namespace": "n"}}}}),
        "spec.volumes[x] takes its data from another namespace; remove dataSourceRef.namespace",
    ),
    ({"spec": {POD[5:]: {"runAsNonRoot": None}}}, f"{POD} does not say runAsNonRoot, and root {ADVICE}"),
    ({"spec": {POD[5:]: {"seccompProfile": None}}}, f"{POD} is unconfined by seccomp, which {ADVICE}"),
    ({"spec": {POD[5:]: {"sysctls": [{"name": "a", "value": "1"}]}}}, f"{POD}.sysctls {ADVICE}"),
    ({"spec": {POD[5:]: {"windowsOptions": {"hostProcess": True}}}}, f"{POD}.windowsOptions.hostProcess {ADVICE}"),
    ({"spec": {POD[5:]: {"runAsUser": 0}}}, f"{POD}.runAsUser is root, which {ADVICE}"),
    ({"spec": {POD[5:]: {"seLinuxOptions": {"user": "u"}}}}, f"{POD}.seLinuxOptions {ADVICE}"),
    ({"spec": {POD[5:]: {"seLinuxOptions": {"role": "r"}}}}, f"{POD}.seLinuxOptions {ADVICE}"),
    ({"spec": {POD[5:]: {"seLinuxOptions": {"type": "spc_t"}}}}, f"{POD}.seLinuxOptions {ADVICE}"),
    (container(securityContext={"privileged": True}), f"{SIDE}.securityContext.privileged {ADVICE}"),
    (container(securityContext={"procMount": "Unmasked"}), f"{SIDE}.securityContext.procMount {ADVICE}"),
    (
        container(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
        f"{SIDE}.securityContext.appArmorProfile is unconfined, which {ADVICE}",
    ),
    (
        container(securityContext={"capabilities": {"add": ["SYS_TIME", "IPC_LOCK", "SYS_ADMIN"]}}),
        f"{SIDE}.securityContext.capabilities.add holds SYS_ADMIN, SYS_TIME, which {ADVICE}",
    ),
    (
        container(securityContext={"allowPrivilegeEscalation": True}),
        f"{SIDE}.securityContext.allowPrivilegeEscalation {ADVICE}",
    ),
    (
        container(securityContext={"runAsNonRoot": False}),
        f"{SIDE}.securityContext.runAsNonRoot is false, and root {ADVICE}",
    ),
    (
        container(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        f"{SIDE}.securityContext is unconfined by seccomp, which {ADVICE}",
    ),
    (
        container(ports=[{"containerPort": 1}, {"containerPort": 2, "hostPort": 3}]),
        f"{SIDE}.ports has a hostPort, which {ADVICE}",
    ),
    (container(volumeDevices=[{"name": "x"}]), f"{SIDE}.volumeDevices {ADVICE}"),
    (
        engine(securityContext={"allowPrivilegeEscalation": None}),
        f"{OURS}.securityContext.allowPrivilegeEscalation {ADVICE}",
    ),
    (
        engine(securityContext={"capabilities": {"drop": ["NET_RAW"]}}),
        f"{OURS}.securityContext.capabilities.drop does not hold ALL, which {ADVICE}",
    ),
    (
        {"spec": {"ephemeralContainers": [{"name": "e", "securityContext": {"privileged": True}}]}},
        f"spec.ephemeralContainers[e].securityContext.privileged {ADVICE}",
    ),
    (
        {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/a": "unconfined"}}},
        f"metadata.annotations[container.apparmor.security.beta.kubernetes.io/a] is unconfined, which {ADVICE}",
    ),
    (
        {"spec": {"affinity": EVERYWHERE}},
        f"spec.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution {ESCAPES}",
    ),
    (
        {"spec": {"affinity": PREFERRED_ELSEWHERE}},
        f"spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution {ESCAPES}",
    ),
    ({"kind": "Pod"}, "kind is not a field of a pod template; use metadata or spec"),
    ({"metadata": {"generateName": "x"}}, "metadata.generateName cannot be set; remove it"),
]


@pytest.mark.parametrize(("over", "line"), LINES, ids=[line.partition(" ")[0] for _, line in LINES])
def test_a_refusal_names_the_field_and_what_to_do(over, line: str) -> None:
    assert find_refused_fields(over, "engine", allow_host_access=False) == [f"spec.engine.podTemplate.{line}"]
    is_of_host = ADVICE in line or ESCAPES in line or "service account" in line or "another namespace" in line
    allowed = find_refused_fields(over, "engine", allow_host_access=True)
    assert allowed == ([] if is_of_host else [f"spec.engine.podTemplate.{line}"])


@pytest.mark.parametrize(
    "over",
    [
        volume(projected={"sources": [{"configMap": {}}]}),
        volume(ephemeral={"volumeClaimTemplate": {"spec": {"dataSourceRef": {"name": "d"}}}}),
        volume(emptyDir={}, hostPath=None),
        container(securityContext={"procMount": "Default", "runAsUser": 1}),
        container(securityContext={"seccompProfile": {"type": "Localhost"}}),
        container(securityContext={"appArmorProfile": {"type": "RuntimeDefault"}}),
        container(securityContext={"capabilities": {"add": ["IPC_LOCK", "NET_BIND_SERVICE"]}}),
        container(securityContext={"allowPrivilegeEscalation": None, "capabilities": {"drop": []}}),
        container(ports=None),
        {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/a": "runtime/default"}}},
        {"spec": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": None}}}},
        {
            "spec": {
                "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"namespaces": []}]}}
            }
        },
        engine(env=[{"name": "MINE"}]),
    ],
)
def test_what_stays_in_its_namespace_is_free(over) -> None:
    assert find_refused_fields(over, "engine", allow_host_access=False) == []


def test_other_containers_than_ours_need_not_drop_what_ours_drop() -> None:
    """A container's name decides, in each kind of containers."""
    bare = {"spec": {"securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}}}
    for name, count in ((ENGINE, 2), ("other", 0)):
        template = {"spec": {**bare["spec"], "initContainers": [{"name": name}]}}
        assert len(list(find_isolation_violations(template, {ENGINE}))) == count


@pytest.mark.parametrize("term", [{"namespaces": ["a"]}, {"namespaceSelector": {}}])
@pytest.mark.parametrize("kind", ["podAffinity", "podAntiAffinity"])
def test_an_affinity_that_is_refused_names_its_rule(kind: str, term) -> None:
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    lines = find_refused_affinity_terms({kind: {rule: [{}, term]}}, "router", allow_host_access=False)
    assert lines == [f"spec.router.affinity.{kind}.{rule} {ESCAPES}"]


@pytest.mark.parametrize(
    "over", [{"spec": []}, {"metadata": 1}, {"spec": {"containers": [1]}}, {"spec": {"affinity": 1}}]
)
def test_what_is_no_template_is_refused_with_advice(over) -> None:
    lines = find_refused_fields(over, "router", allow_host_access=False)
    assert lines
    assert all(line.startswith("spec.router.podTemplate") for line in lines)
