"""Each field that isolates a pod, in each place where it may be, with values that Pod Security allows and refuses."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from children_harness import engine_template

from sluice_operator.resources.pods.pod_isolation import find_isolation_violations

OURS = frozenset({"engine", "fetch-model"})
LIMITED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
TEMPLATE: dict[str, Any] = {
    "metadata": {},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "engine", "securityContext": LIMITED}, {"name": "side"}],
        "initContainers": [{"name": "fetch-model", "securityContext": LIMITED}],
    },
}
POD = ("securityContext",)
ENGINE, SIDE, FETCH = (
    ("containers", 0, "securityContext"),
    ("containers", 1, "securityContext"),
    ("initContainers", 0, "securityContext"),
)
CONTAINERS = (ENGINE, SIDE, FETCH)
EVERYWHERE = (POD, *CONTAINERS)
# Field, values that are refused, values that are allowed, where.
FIELDS: list[tuple[str, list[Any], list[Any], tuple[Any, ...]]] = [
    ("privileged", [True], [False, None], CONTAINERS),
    ("procMount", ["Unmasked"], ["Default", None], CONTAINERS),
    ("sysctls", [[{"name": "a", "value": "1"}]], [[], None], (POD,)),
    ("windowsOptions", [{"hostProcess": True}], [{"hostProcess": False}, {}, None], EVERYWHERE),
    ("runAsUser", [0], [1, 65532, None], EVERYWHERE),
    (
        "appArmorProfile",
        [{"type": "Unconfined"}],
        [{"type": "RuntimeDefault"}, {"type": "Localhost"}, {}, None],
        EVERYWHERE,
    ),
    (
        "seLinuxOptions",
        [{"type": "spc_t"}, {"user": "u"}, {"role": "r"}, {"type": "container_t", "role": "r"}],
        [{"type": "container_t"}, {"type": "container_kvm_t"}, {"type": ""}, {"level": "s0"}, {}, None],
        EVERYWHERE,
    ),
    ("allowPrivilegeEscalation", [True], [False], CONTAINERS),
    ("allowPrivilegeEscalation", [None], [], (ENGINE, FETCH)),
    ("allowPrivilegeEscalation", [], [None], (SIDE,)),
    ("runAsNonRoot", [False], [True], EVERYWHERE),
    ("runAsNonRoot", [None], [], (POD,)),
    ("runAsNonRoot", [], [None], CONTAINERS),
    (
        "seccompProfile",
        [{"type": "Unconfined"}, {"type": "Other"}],
        [{"type": "RuntimeDefault"}, {"type": "Localhost"}],
        EVERYWHERE,
    ),
    ("seccompProfile", [None, {}], [], (POD,)),
    ("seccompProfile", [], [None, {}], CONTAINERS),
    (
        "capabilities",
        [{"drop": ["ALL"], "add": ["SYS_ADMIN"]}, {"drop": ["ALL"], "add": ["IPC_LOCK", "NET_RAW"]}],
        [{"drop": ["ALL"], "add": ["IPC_LOCK", "NET_BIND_SERVICE"]}, {"drop": ["ALL"]}, {"drop": ["X", "ALL"]}],
        CONTAINERS,
    ),
    ("capabilities", [{"drop": []}, {"drop": ["NET_RAW"]}, {"drop": None}, {}, None], [], (ENGINE, FETCH)),
    ("capabilities", [], [{"drop": []}, {"add": ["IPC_LOCK"]}, {}, None], (SIDE,)),
]
CASES = [
    (place, field, value, is_refused)
    for field, refused, allowed, places in FIELDS
    for place in places
    for values, is_refused in ((refused, True), (allowed, False))
    for value in values
]


def find(template: dict[str, Any]) -> list[str]:
    return list(find_isolation_violations(template, OURS))


def test_what_is_rendered_is_isolated() -> None:
    assert find(TEMPLATE) == []
    assert list(find_isolation_violations(engine_template(), frozenset({"engine"}))) == []


@pytest.mark.parametrize(("place", "field", "value", "is_refused"), CASES)
def test_a_security_context_is_bound_field_by_field(place: Any, field: str, value: Any, *, is_refused: bool) -> None:
    template = deepcopy(TEMPLATE)
    where: Any = template["spec"]
    for name in place[:-1]:
        where = where[name]
    context = {**where.get(place[-1], {}), field: value}
    where[place[-1]] = {name: each for name, each in context.items() if name != field or each is not None}
    found = find(template)
    assert len(found) == is_refused
    if found:
        assert field in found[0] or field == "seccompProfile"
    # A field that is written and empty is as one that is absent.
    where[place[-1]] = context
    assert len(find(template)) == is_refused


@pytest.mark.parametrize(
    ("fields", "num_refused"),
    [
        ({"ports": [{"containerPort": 1}]}, 0),
        ({"ports": [{"containerPort": 1, "hostPort": 0}]}, 0),
        ({"ports": [{"containerPort": 1}, {"containerPort": 2, "hostPort": 2}]}, 1),
        ({"ports": None}, 0),
        ({"volumeDevices": [{"name": "d"}]}, 1),
        ({"volumeDevices": []}, 0),
    ],
)
@pytest.mark.parametrize("kind", ["containers", "initContainers", "ephemeralContainers"])
def test_containers_of_each_kind_reach_neither_ports_nor_devices_of_the_host(
    kind: str, fields: Any, num_refused: int
) -> None:
    template = deepcopy(TEMPLATE)
    template["spec"].setdefault(kind, []).append({"name": "more", **fields})
    assert len(find(template)) == num_refused


@pytest.mark.parametrize("field", ["hostNetwork", "hostPID", "hostIPC"])
def test_the_host_s_namespaces_are_closed(field: str) -> None:
    for value, num_refused in ((True, 1), (False, 0), (None, 0)):
        assert len(find({**TEMPLATE, "spec": {**TEMPLATE["spec"], field: value}})) == num_refused


@pytest.mark.parametrize(
    ("volume", "num_refused"),
    [
        *(({kind: {}}, 0) for kind in ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image")),
        *(({kind: {}}, 0) for kind in ("persistentVolumeClaim", "projected", "secret")),
        *(({kind: {}}, 1) for kind in ("hostPath", "nfs", "flexVolume", "iscsi", "awsElasticBlockStore")),
        ({"projected": {"sources": [{"secret": {}}, {"configMap": {}}]}}, 0),
        ({"projected": {"sources": [{"secret": {}}, {"serviceAccountToken": {}}]}}, 1),
        ({"projected": {"sources": None}}, 0),
        ({"ephemeral": {"volumeClaimTemplate": {"spec": {"dataSourceRef": {"name": "d"}}}}}, 0),
        ({"ephemeral": {"volumeClaimTemplate": {"spec": {"dataSourceRef": {"namespace": "n"}}}}}, 1),
        ({"ephemeral": {"volumeClaimTemplate": {"spec": None}}}, 0),
    ],
)
def test_volumes_stay_within_the_namespace(volume: Any, num_refused: int) -> None:
    spec = {**TEMPLATE["spec"], "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "x", **volume}]}
    assert len(find({**TEMPLATE, "spec": spec})) == num_refused
