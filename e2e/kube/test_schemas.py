"""What helm and the operator render, against the schemas of the newest Kubernetes versions and of the oldest supported.

Unknown fields are refused. Other rules (ranges, fields that depend on each other, Pod Security) are tested on the real
API server, in ``test_chart.py`` and ``test_operator.py``.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from chart_values import VALUES
from fake_kubernetes import make_cluster
from testbed.helm import CHART
from testbed.kubernetes_build import MODULES
from testbed.kubernetes_choice import VERSIONS
from testbed.schemas import KUBERNETES, Schemas, load_schemas
from testbed.settings import ROOT

from sluice_operator.api.manifest import check_manifest
from sluice_operator.resources.children import RenderInputs, render_children
from sluice_operator.settings import OperatorSettings

if TYPE_CHECKING:
    from testbed.helm import Helm

# The first use fetches five Go modules.
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
# Manifests by the features that they use.
MANIFESTS: dict[str, Object] = {
    "as little as possible": {"replicas": 1, "router": {"replicas": 1}},
    "the Hub, with a cache": {
        "model": {
            "name": "org/model",
            "source": {"huggingFace": {"cacheClaimName": "cache", "tokenSecretRef": {"name": "hub", "key": "token"}}},
        }
    },
    "a bucket, with keys and a cache": {
        "model": {
            "name": "org/model",
            "source": {
                "objectStorage": {
                    "uri": "s3://models/m",
                    "endpoint": "http://minio:9000",
                    "secretName": "s3",
                    "cacheClaimName": "cache",
                }
            },
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
    "keys and certificates": {
        "router": {
            "auth": {"mode": "APIKey", "apiKey": {"secretName": "keys"}},
            "tls": {"mode": "CertManager", "issuerRef": {"name": "ca"}, "dnsNames": ["llm.example.com"]},
        },
        "network": {"tls": {"mode": "CertManager", "issuerRef": {"kind": "ClusterIssuer", "name": "ca"}}},
    },
    "certificates of one's own": {
        "router": {"tls": {"mode": "SecretRef", "secretName": "front"}},
        "network": {"tls": {"mode": "SecretRef", "secretName": "peers"}},
    },
    "a Service with annotations": {
        "router": {"service": {"type": "LoadBalancer", "port": 80, "annotations": {"example.org/a": "b"}}}
    },
}

# Features that the oldest version does not have yet, as docs/guides/install.md says.
TOO_NEW = {("1.30", "an image as the model"): "'image'", ("1.30", "RDMA by a claim"): "'resourceClaimTemplateName'"}

minors = pytest.mark.parametrize("minor", KUBERNETES)


def find_faults(schemas: Schemas, objects: list[Object]) -> list[str]:
    assert objects
    return [fault for item in objects for fault in schemas.find_faults(item)]


def render(spec: Object) -> list[Object]:
    content = make_cluster(**spec)
    content["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    cluster = check_manifest(content)
    facts = RenderInputs(engine_replicas=cluster.spec.replicas, has_monitors=True, live={})
    return render_children(cluster, facts, OperatorSettings(namespace="sluice-system", identity="a"))


@minors
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_version_knows_every_field_of_the_chart(helm: Helm, minor: str, values: Object) -> None:
    objects = helm.template(values, "--kube-version", f"{minor}.0")
    assert find_faults(load_schemas(minor), objects) == []


@minors
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_version_knows_every_field_of_the_operators_objects(minor: str, name: str) -> None:
    faults = find_faults(load_schemas(minor), render(MANIFESTS[name]))
    if (minor, name) in TOO_NEW:
        assert faults
        assert all(TOO_NEW[minor, name] in fault for fault in faults)
    else:
        assert faults == []


@minors
def test_the_version_knows_every_field_of_the_crd(minor: str) -> None:
    definition = yaml.safe_load((ROOT / "crds" / "servingclusters.yaml").read_text())
    assert find_faults(load_schemas(minor), [definition]) == []


def change(item: Object, path: str, value: Any) -> Object:
    """Returns a copy of an object with one field set."""
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
def test_an_invalid_field_is_reported(minor: str, kind: str, path: str, value: Any) -> None:
    item = next(child for child in render({}) if child["kind"] == kind)
    assert load_schemas(minor).find_faults(item) == []
    assert load_schemas(minor).find_faults(change(item, path, value))


def test_the_versions_are_the_newest_three_and_the_oldest_supported() -> None:
    *newest, oldest = [tuple(map(int, minor.split("."))) for minor in KUBERNETES]
    assert newest == [(1, newest[0][1] - age) for age in range(3)]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == ">={}.{}.0-0".format(*oldest)
    for minor, source in KUBERNETES.items():
        assert source.module.startswith(f"k8s.io/kubernetes@v{minor}.")
    # The test cluster's version is one of them.
    modules = (MODULES / "kubernetes" / "go.mod").read_text()
    assert any(f"\t{source.module.replace('@', ' ')}\n" in modules for source in KUBERNETES.values())


def test_the_other_versions_that_run_are_the_newest_and_the_oldest_supported() -> None:
    newest, *_, oldest = KUBERNETES
    assert {path.name for path in VERSIONS.iterdir()} == {newest, oldest}
    for minor in (newest, oldest):
        modules = (VERSIONS / minor / "go.mod").read_text()
        assert f"\t{KUBERNETES[minor].module.replace('@', ' ')}\n" in modules
