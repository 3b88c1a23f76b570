"""The escape hatch: what it may say, and what it may not."""

from __future__ import annotations

import pytest

from sluice_operator.resources.pods.user_pod_template import (
    find_refused_affinity_terms,
    find_refused_fields,
    strategic_merge,
)

RENDERED = {
    "metadata": {"labels": {"a": "b"}},
    "spec": {
        "containers": [
            {"name": "engine", "image": "i", "env": [{"name": "A", "value": "1"}], "command": ["python"]},
        ],
        "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "m"}}],
        "tolerations": [{"key": "x"}],
    },
}


def test_maps_and_keyed_lists_are_merged_and_other_lists_replaced() -> None:
    over = {
        "metadata": {"annotations": {"n": "v"}},
        "spec": {
            "priorityClassName": "high",
            "containers": [
                {"name": "engine", "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]},
                {"name": "side", "image": "s"},
            ],
            "volumes": [{"name": "more", "emptyDir": {}}],
            "tolerations": [{"key": "y"}],
        },
    }
    assert strategic_merge(RENDERED, over) == {
        "metadata": {"labels": {"a": "b"}, "annotations": {"n": "v"}},
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "image": "i",
                    "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}],
                    "command": ["python"],
                },
                {"name": "side", "image": "s"},
            ],
            "volumes": [
                {"name": "model", "persistentVolumeClaim": {"claimName": "m"}},
                {"name": "more", "emptyDir": {}},
            ],
            "tolerations": [{"key": "y"}],
            "priorityClassName": "high",
        },
    }


def test_nothing_merged_is_nothing_changed() -> None:
    assert strategic_merge(RENDERED, {}) == RENDERED
    assert find_refused_fields({}, "engine", allow_host_access=False) == []


def container(**fields):
    return {"spec": {"containers": [{"name": "side", **fields}]}}


def engine(**fields):
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def volume(**source):
    return {"spec": {"volumes": [{"name": "x", **source}]}}


ELSEWHERE = {"topologyKey": "kubernetes.io/hostname", "namespaceSelector": {}}
EVERYWHERE = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [ELSEWHERE]}}
PREFERRED_ELSEWHERE = {
    "podAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname", "namespaces": ["kube-system"]}}
        ]
    }
}
OWNED = {
    "unknown": {"kind": "Pod"},
    "generated-name": {"metadata": {"generateName": "x"}},
    "not-a-template": {"spec": {"containers": "engine"}},
    "not-a-map": {"spec": []},
    "no-init-containers": {"spec": {"initContainers": None}},
}
HOST = {
    "network": {"spec": {"hostNetwork": True}},
    "pid": {"spec": {"hostPID": True}},
    "ipc": {"spec": {"hostIPC": True}},
    "path": {"spec": {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}},
    "token-volume": volume(projected={"sources": [{"serviceAccountToken": {"path": "token"}}]}),
    "privileged": container(securityContext={"privileged": True}),
    "escalation": container(securityContext={"allowPrivilegeEscalation": True}),
    "capability": container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
    "root": container(securityContext={"runAsUser": 0}),
    "pod-root": {"spec": {"securityContext": {"runAsNonRoot": False}}},
    # Kubernetes wants a user namespace with it.
    "proc": {
        "spec": {
            "hostUsers": False,
            "containers": [{"name": "side", "securityContext": {"procMount": "Unmasked"}}],
        }
    },
    "seccomp": container(securityContext={"seccompProfile": {"type": "Unconfined"}}),
    "sysctl": {"spec": {"securityContext": {"sysctls": [{"name": "kernel.x", "value": "1"}]}}},
    "port": container(ports=[{"containerPort": 1, "hostPort": 1}]),
    "device": {
        "spec": {
            "volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "c"}}],
            "containers": [{"name": "side", "volumeDevices": [{"devicePath": "/dev/sda", "name": "x"}]}],
        }
    },
    "drivers-of-the-node": volume(flexVolume={"driver": "x/y"}),
    "another-machine-s-files": volume(nfs={"server": "s", "path": "/"}),
    "replaced-volume": {"spec": {"volumes": [{"name": "tmp", "emptyDir": None, "hostPath": {"path": "/"}}]}},
    "another-namespace-s-data": volume(
        ephemeral={
            "volumeClaimTemplate": {
                "spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "1Gi"}},
                    "dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "d", "namespace": "n"},
                }
            }
        }
    ),
    "other-pods": {"spec": {"affinity": EVERYWHERE}},
    "other-pods-preferred": {"spec": {"affinity": PREFERRED_ELSEWHERE}},
    "selinux": container(securityContext={"seLinuxOptions": {"type": "spc_t"}}),
    "selinux-role": {"spec": {"securityContext": {"seLinuxOptions": {"role": "sysadm_r"}}}},
    "apparmor": container(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
    "apparmor-annotation": {
        "metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}}
    },
    # To take a limit away is to ask for what it keeps away.
    "pod-root-by-omission": {"spec": {"securityContext": {"runAsNonRoot": None}}},
    "pod-seccomp-by-omission": {"spec": {"securityContext": {"seccompProfile": None}}},
    "escalation-by-omission": engine(securityContext={"allowPrivilegeEscalation": None}),
    "capabilities-by-omission": engine(securityContext={"capabilities": {"drop": []}}),
    "capabilities-in-preparation": {
        "spec": {"initContainers": [{"name": "fetch-model", "securityContext": {"capabilities": None}}]}
    },
    "init": {"spec": {"initContainers": [{"name": "i", "securityContext": {"privileged": True}}]}},
}
FREE = {
    "sidecar": container(image="x", resources={"limits": {"cpu": "1"}}),
    "runtime-class": {"spec": {"runtimeClassName": "nvidia", "priorityClassName": "p", "schedulerName": "s"}},
    "locked-memory": engine(securityContext={"capabilities": {"add": ["IPC_LOCK"]}}),
    "volume": {"spec": {"volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "c"}}]}},
    "mount": engine(volumeMounts=[{"name": "x", "mountPath": "/x"}]),
    "labels": {"metadata": {"labels": {"team": "a"}, "annotations": {"n": "v"}}},
    "own-pods": {
        "spec": {
            "affinity": {
                "nodeAffinity": {},
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]},
            }
        }
    },
    "generic-volume": volume(ephemeral={"volumeClaimTemplate": {"spec": {"storageClassName": "fast"}}}),
    "confined-selinux": container(securityContext={"seLinuxOptions": {"type": "container_t", "level": "s0:c1"}}),
    "sidecar-s-own-capabilities": container(securityContext={"capabilities": {"drop": ["NET_RAW"]}}),
    "group": {"spec": {"securityContext": {"fsGroup": 1000, "runAsUser": 1000}}},
}


COMPONENTS = pytest.mark.parametrize("component", ["engine", "router"])


def rename(over, component):
    """Says of a component's container what the tables say of the engine's."""
    spec = over.get("spec")
    containers = spec.get("containers", []) if isinstance(spec, dict) else []
    if not isinstance(containers, list):
        return over
    renamed = [{**item, "name": component} if item["name"] == "engine" else item for item in containers]
    return {**over, "spec": {**spec, "containers": renamed}} if renamed else over


@COMPONENTS
@pytest.mark.parametrize("over", OWNED.values(), ids=OWNED)
@pytest.mark.parametrize("allow_host_access", [False, True])
def test_what_is_ours_is_refused_always(over, allow_host_access, component) -> None:
    lines = find_refused_fields(rename(over, component), component, allow_host_access=allow_host_access)
    assert len(lines) == 1
    assert lines[0].startswith(f"spec.{component}.podTemplate")


@COMPONENTS
@pytest.mark.parametrize("over", HOST.values(), ids=HOST)
def test_host_access_is_refused_unless_the_administrator_allows_it(over, component) -> None:
    over = rename(over, component)
    assert len(find_refused_fields(over, component, allow_host_access=False)) == 1
    assert find_refused_fields(over, component, allow_host_access=True) == []


@COMPONENTS
@pytest.mark.parametrize("over", FREE.values(), ids=FREE)
def test_the_rest_is_free(over, component) -> None:
    assert find_refused_fields(rename(over, component), component, allow_host_access=False) == []


@COMPONENTS
@pytest.mark.parametrize(
    "affinity",
    [EVERYWHERE, {"podAffinity": 1}, {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": 1}}],
    ids=["namespaces", "no-affinity", "no-terms"],
)
def test_affinity_stays_in_its_namespace(affinity, component) -> None:
    (line,) = find_refused_affinity_terms(affinity, component, allow_host_access=False)
    assert line.startswith(f"spec.{component}.affinity")
    assert find_refused_affinity_terms(affinity, component, allow_host_access=True) == []


@pytest.mark.parametrize(
    ("over", "line"),
    [
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.volumes[0] has no name"),
        ({"spec": {"containers": [{"image": "side:1"}]}}, "spec.containers[0] has no name"),
        (
            {"spec": {"containers": [{"name": "side", "volumeMounts": [{"name": "data"}]}]}},
            "spec.containers[0].volumeMounts[0] has no mountPath",
        ),
        ({"spec": {"imagePullSecrets": ["registry"]}}, "spec.imagePullSecrets[0] has no name"),
        (
            {"spec": {"initContainers": None}},
            "spec.initContainers is not a list; write it as `kubectl explain pod.spec.init",
        ),
    ],
    ids=["volume", "container", "mount", "text", "no-list"],
)
def test_an_element_without_the_field_by_which_lists_are_merged_is_refused(over, line) -> None:
    found = find_refused_fields(over, "engine", allow_host_access=True)
    assert [text.startswith(f"spec.engine.podTemplate.{line}") for text in found] == [True]


def test_an_item_that_is_no_map_is_kept_beside_those_that_are_merged_by_their_key() -> None:
    """So that what refuses it finds it."""
    merged = strategic_merge(
        [{"name": "a", "value": "1"}, {"name": "b"}], ["a name", {"name": "a", "value": "2"}], "env"
    )
    assert merged == [{"name": "a", "value": "2"}, {"name": "b"}, "a name"]


def test_a_text_in_a_keyed_list_is_refused_even_if_it_names_the_key() -> None:
    for item in ("a name", "name", 7, None):
        (line,) = find_refused_fields({"spec": {"volumes": [item]}}, "engine", allow_host_access=True)
        assert line.startswith("spec.engine.podTemplate.spec.volumes[0]")
