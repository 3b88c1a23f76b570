"""Every field of every child, for manifests that use all there is, against what was recorded.

A field that changes replaces the pods of whoever upgrades the operator, or is in a user's way, so none changes unseen.
Whoever means to change one records them anew, and reviews the difference:

    .venv/bin/python operator/tests/test_rendered_children.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from fake_kubernetes import make_cluster

from sluice_operator.api.labels import APPLIED_HASH_ANNOTATION, RESTART_HASH_ANNOTATION, TEMPLATE_ANNOTATION
from sluice_operator.api.manifest import check_manifest
from sluice_operator.resources.children import RenderInputs, render_children
from sluice_operator.resources.rollout_state import RolloutState
from sluice_operator.settings import OperatorSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDED = Path(__file__).with_name("rendered_children.yaml")
SETTINGS = OperatorSettings(
    namespace="sluice-system",
    identity="a",
    engine_image="registry/engine:1",
    router_image="registry/router:1",
    cluster_monitors=True,
    monitor_labels="release=prometheus",
)
SECRET = {"name": "s", "key": "k"}
EVERY_PLACEMENT: dict[str, Any] = {
    "image": "mine:2",
    "imagePullSecrets": ["registry"],
    "nodeSelector": {"pool": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
    "serviceAccountName": "own",
    "env": [
        {"name": "ONE", "value": "1"},
        {"name": "TWO", "valueFrom": {"secretKeyRef": SECRET}},
        {"name": "THREE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ],
    "podTemplate": {
        "metadata": {"annotations": {"team": "a"}, "labels": {"cost": "b"}},
        "spec": {"priorityClassName": "high", "containers": [{"name": "side", "image": "side:1"}]},
    },
}
HUGGING_FACE = {
    "tokenSecretRef": SECRET,
    "cacheClaimName": "cache",
    "endpoint": "https://hub.example.com",
    "proxy": {"httpProxy": "http://proxy:1", "httpsProxy": "http://proxy:2", "noProxy": ["a", "b"]},
    "caBundle": {"configMapKeyRef": SECRET},
}
MANIFESTS: dict[str, dict[str, Any]] = {
    "minimal": {},
    "everywhere": {
        "engine": {
            **EVERY_PLACEMENT,
            "maxBatchTokens": 4096,
            "maxModelLen": 8192,
            "tensorParallelSize": 2,
            "extraArgs": ["--seed", "7"],
            "resources": {"limits": {"memory": "9Gi"}, "requests": {"cpu": "2"}, "claims": [{"name": "c"}]},
            "gpuResourceName": "amd.com/gpu",
            "startupTimeoutSeconds": 77,
            "drainTimeoutSeconds": 78,
            "sharedMemory": "3Gi",
        },
        "router": {
            **EVERY_PLACEMENT,
            "replicas": 3,
            "resources": {"limits": {"cpu": "2"}},
            "drainTimeoutSeconds": 79,
            "service": {"type": "LoadBalancer", "port": 8443, "annotations": {"lb": "internal"}},
            "cors": {"allowedOrigins": ["https://a.example.com"]},
        },
        "rollout": {"maxUnavailable": "25%", "maxSurge": 2, "paused": True},
        "model": {"name": "org/m", "servedName": "m", "revision": "0123456789abcdef" * 2 + "01234567"}
        | {"source": {"huggingFace": HUGGING_FACE}},
    },
    "rdma": {
        "network": {
            "mode": "RDMA",
            "kvPort": 5700,
            "tcpPortRange": "7000-7009",
            "rdma": {
                "fabric": "RoCE",
                "resourceName": "rdma/hca",
                "resourceCount": 2,
                "networks": ["roce-a", "other/roce-b"],
                "netDevices": ["mlx5_0:1"],
                "gidIndex": 3,
                "transports": ["rc"],
                "memlock": "IPCLock",
                "requireRDMA": True,
                "podAnnotations": {"x/y": "z"},
            },
        },
        "model": {"name": "m", "source": {"image": {"reference": "registry/model:1", "path": "weights"}}},
    },
    "claimed devices": {
        "network": {
            "mode": "RDMA",
            "rdma": {"fabric": "EFA", "resourceClaimTemplateName": "efa", "netDevices": ["efa0"]},
        },
        "model": {"name": "org/m", "source": {"huggingFace": {}}},
    },
    "secured": {
        "network": {"tls": {"mode": "CertManager", "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}},
        "router": {
            "tls": {"mode": "CertManager", "issuerRef": {"name": "web"}, "dnsNames": ["a.example.com"]},
            "auth": {
                "mode": "APIKeyOrJWT",
                "apiKey": {"secretName": "keys"},
                "jwt": {
                    "keySetUrl": "https://a/jwks",
                    "issuer": "i",
                    "audience": "us",
                    "ownerClaim": "who",
                    "leewaySeconds": 9,
                },
                "limits": [{"owner": "a", "requestsPerMinute": 7}],
            },
        },
        "model": {
            "name": "org/m",
            "source": {"huggingFace": {"caBundle": {"secretKeyRef": SECRET}, "tokenSecretRef": SECRET}},
        },
    },
    "secrets of one's own": {
        "network": {"tls": {"mode": "SecretRef", "secretName": "peers"}},
        "router": {
            "replicas": 1,
            "tls": {"mode": "SecretRef", "secretName": "web"},
            "auth": {"mode": "JWT", "jwt": {"keySetUrl": "file:///keys", "issuer": "i", "audience": "us"}},
        },
        "engine": {"emulation": {"gpu": "h100-80g", "model": "qwen2.5-14b"}, "gpuResourceName": ""},
        "model": {"name": "org/m", "source": {"huggingFace": {"cacheClaimName": "cache"}}},
    },
    "one engine": {"replicas": 1, "prefillHeavy": 1, "router": {"replicas": 1}},
}
ROLL = RolloutState(target_hash="t", good_template={"spec": {}}, since_s=5, measured_since_s=7, num_unmeasured=1)
INPUTS = {
    "everywhere": {"is_roll_held": True, "roll": ROLL, "router_model": "model-7"},
    "rdma": {"split_unavailable": 1, "has_monitors": False},
    "secured": {"roll": RolloutState(target_hash="t", good_template={"spec": {}}, num_passed=1), "engine_replicas": 9},
    "one engine": {"engine_replicas": 1},
}
HASHES = (APPLIED_HASH_ANNOTATION, RESTART_HASH_ANNOTATION, TEMPLATE_ANNOTATION)


def render(name: str) -> dict[str, Any]:
    """Renders a manifest's children: each field by its path."""
    content = make_cluster(**MANIFESTS[name])
    content["metadata"]["uid"] = "u"
    inputs = RenderInputs(**{"engine_replicas": 4, "has_monitors": True, "live": {}, **INPUTS.get(name, {})})
    children = render_children(check_manifest(content), inputs, SETTINGS)
    fields = {"order": [f"{child['kind']} {child['metadata']['name']}" for child in children]}
    for child in children:
        fields |= dict(list_leaves(child, f"{child['kind']} {child['metadata']['name']}"))
    return fields


def list_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Lists fields by path; items of lists by their name where they have one. Hashes follow from the other fields."""
    if path.endswith(HASHES):
        value = "a hash" if value else value
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from list_leaves(inner, f"{path} > {name}")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            label = item.get("name") if isinstance(item, dict) else None
            yield from list_leaves(item, f"{path} > {label or number}")
    else:
        yield path, value


def describe(name: str) -> dict[str, Any]:
    """Describes a manifest's children: those of the minimal one whole, others by what differs from it."""
    fields, minimal = render(name), render("minimal")
    if name == "minimal":
        return fields
    changed = {path: value for path, value in fields.items() if path not in minimal or minimal[path] != value}
    return {"differs": changed, "lacks": [path for path in minimal if path not in fields]}


RECORDS = yaml.safe_load(RECORDED.read_text()) if RECORDED.exists() else {}


@pytest.mark.parametrize("name", MANIFESTS)
def test_children_are_as_they_were_recorded(name: str) -> None:
    assert describe(name) == RECORDS[name]


def test_hashes_follow_from_what_they_are_of() -> None:
    """Two manifests differ in the hash of a child exactly where they differ in the child."""
    content = make_cluster()
    content["metadata"]["uid"] = "u"
    inputs = RenderInputs(engine_replicas=4, has_monitors=True, live={})
    plain, again = (render_children(check_manifest(content), inputs, SETTINGS) for _ in range(2))
    content["spec"]["router"] = {"replicas": 3}
    edited = render_children(check_manifest(content), inputs, SETTINGS)
    hashes = [
        [child["metadata"]["annotations"][APPLIED_HASH_ANNOTATION] for child in children]
        for children in (plain, again, edited)
    ]
    assert hashes[0] == hashes[1]
    assert all(len(each) == 16 for each in hashes[0])
    differing = [
        one["metadata"]["name"]
        for one, other in zip(plain, edited, strict=True)
        if one["spec" if "spec" in one else "kind"] != other["spec" if "spec" in other else "kind"]
    ]
    changed = [
        child["metadata"]["name"] for child, one, other in zip(plain, hashes[0], hashes[2], strict=True) if one != other
    ]
    assert changed == differing
    assert "tiny-router" in changed


def write() -> None:
    """Records the children of all manifests."""
    RECORDED.write_text(yaml.safe_dump({name: describe(name) for name in MANIFESTS}, sort_keys=False, width=150))


if __name__ == "__main__":
    write()
    sys.stdout.write(f"children of {len(MANIFESTS)} manifests are in {RECORDED}\n")
