"""What helm and the operator render, against the schemas of the three newest minor versions of Kubernetes; no cluster.

Strictly: a field that a version does not know is a fault. What schemas do not say (ranges, fields that depend on each
other, Pod Security) the real API server is asked, in ``test_chart.py`` and ``test_operator.py``.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from chart_values import VALUES
from fake_kubernetes import make_cluster
from testbed.schemas import KUBERNETES, Schemas, load_schemas
from testbed.settings import ROOT
from testbed.toolchain import MODULES

from sluice_operator.desired import Facts, render_children
from sluice_operator.manifest import check_manifest
from sluice_operator.settings import Settings

if TYPE_CHECKING:
    from testbed.helm import Helm

# The first use fetches three modules.
pytestmark = pytest.mark.timeout(600)

Object = dict[str, Any]

RDMA = {
    "fabric": "RoCE",
    "resourceName": "rdma/hca",
    "networks": ["roce-a"],
    "gidIndex": 3,
    "memlock": "IPCLock",
    "requireRDMA": True,
    "podAnnotations": {"example.org/x": "y"},
}
# Manifests by what they use.
MANIFESTS: dict[str, Object] = {
    "as little as possible": {"replicas": 1, "router": {"replicas": 1}},
    "the Hub, with a cache": {
        "model": {
            "name": "org/model",
            "source": {"huggingFace": {"cacheClaimName": "cache", "tokenSecretRef": {"name": "hub", "key": "token"}}},
        }
    },
    "an image as the model": {"model": {"name": "m", "source": {"image": {"reference": "registry.example/m:1"}}}},
    "RDMA": {"network": {"mode": "RDMA", "rdma": RDMA}},
    "RDMA by a claim": {
        "network": {"mode": "RDMA", "rdma": {"fabric": "InfiniBand", "resourceClaimTemplateName": "nic"}}
    },
    "a range of ports": {"network": {"tcpPortRange": "7000-7099"}},
    "all of the engine's fields": {
        "engine": {
            "image": "registry.example/engine:1",
            "env": [
                {"name": "A", "value": "1"},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
                {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            ],
            "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}, "requests": {"cpu": "500m"}},
            "sharedMemory": "8Gi",
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
            "podTemplate": {"spec": {"priorityClassName": "high", "volumes": [{"name": "more", "emptyDir": {}}]}},
        }
    },
    "a Service with annotations": {
        "router": {"service": {"type": "LoadBalancer", "port": 80, "annotations": {"example.org/a": "b"}}}
    },
}

minors = pytest.mark.parametrize("minor", KUBERNETES)


def find_faults(schemas: Schemas, objects: list[Object]) -> list[str]:
    assert objects
    return [fault for item in objects for fault in schemas.find_faults(item)]


def render(spec: Object) -> list[Object]:
    content = make_cluster(**spec)
    content["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    cluster = check_manifest(content)
    facts = Facts(engine_replicas=cluster.spec.replicas, has_monitors=True, live={})
    return render_children(cluster, facts, Settings(namespace="sluice-system", identity="a"))


@minors
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_the_chart_renders_is_known_to_the_version(helm: Helm, minor: str, values: Object) -> None:
    objects = helm.template(values, "--kube-version", f"{minor}.0")
    assert find_faults(load_schemas(minor), objects) == []


@minors
@pytest.mark.parametrize("spec", MANIFESTS.values(), ids=MANIFESTS)
def test_what_the_operator_renders_is_known_to_the_version(minor: str, spec: Object) -> None:
    assert find_faults(load_schemas(minor), render(spec)) == []


@minors
def test_the_definition_by_itself_is_known_to_the_version(minor: str) -> None:
    definition = yaml.safe_load((ROOT / "crds" / "servingclusters.yaml").read_text())
    assert find_faults(load_schemas(minor), [definition]) == []


def change(item: Object, path: str, value: Any) -> Object:
    """A copy in which a field is set."""
    changed = copy.deepcopy(item)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    functools.reduce(lambda part, name: part[name], parents, changed)[last] = value  # type: ignore[index]
    return changed


@minors
@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec.replica", 1),
        ("Deployment", "spec.replicas", "two"),
        ("Deployment", "spec.selector", None),
        ("Deployment", "spec.template.spec.containers.0.imagePull", "Always"),
        ("Deployment", "spec.template.spec.containers.0.ports.0.containerPort", "8000"),
        ("Deployment", "spec.template.spec.securityContext.runAsNonRoot", "true"),
        ("Service", "spec.ports.0.targetPort", 1.5),
        ("NetworkPolicy", "spec.ingress.0.ports.0.number", 1),
        ("PodDisruptionBudget", "apiVersion", "policy/v1beta1"),
        ("ServiceMonitor", "spec.endpoints.0.prt", "metrics"),
        ("ServiceAccount", "metadata.label", {}),
    ],
)
def test_nonsense_is_seen(minor: str, kind: str, path: str, value: Any) -> None:
    item = next(child for child in render({}) if child["kind"] == kind)
    assert load_schemas(minor).find_faults(item) == []
    assert load_schemas(minor).find_faults(change(item, path, value))


def test_the_versions_follow_one_another_up_to_that_of_the_test_cluster() -> None:
    found = [tuple(map(int, minor.split("."))) for minor in KUBERNETES]
    assert found == [(1, found[0][1] - age) for age in range(3)]
    newest = KUBERNETES[next(iter(KUBERNETES))].module.partition("@")[2]
    assert f"\tk8s.io/kubernetes {newest}\n" in (MODULES / "kubernetes" / "go.mod").read_text()
