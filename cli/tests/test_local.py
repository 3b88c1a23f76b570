"""What a manifest may ask of Kubernetes that local processes cannot do is refused by field, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sluice_cli.local import check_local, find_model
from sluice_operator.manifest import check_manifest

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}}


def make(source: dict[str, Any] = SOURCE, **parts: Any) -> Any:
    slo = {"ttftMilliseconds": 500, "tpotMilliseconds": 50}
    return check_manifest(
        {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "ServingCluster",
            "metadata": {"name": "test"},
            "spec": {"slo": slo, "model": {"name": "m", "source": source}, **parts},
        }
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Sluice's directory, with the model on its volume."""
    (tmp_path / "volumes" / "models" / "tiny").mkdir(parents=True)
    return tmp_path


def test_a_local_manifest_is_accepted(home: Path) -> None:
    assert check_local(make(), home, {}) == []
    assert find_model(make(), home, {}) == home / "volumes" / "models" / "tiny"


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            {"router": {"auth": {"mode": "APIKey", "apiKey": {"secretName": "keys"}}}},
            "spec.router.auth.mode: 'APIKey' needs pods; use None",
        ),
        (
            {"router": {"tls": {"mode": "SecretRef", "secretName": "tls"}}},
            "spec.router.tls.mode: 'SecretRef' needs pods; use Disabled",
        ),
        (
            {"network": {"tls": {"mode": "CertManager", "issuerRef": {"name": "ca"}}}},
            "spec.network.tls.mode: 'CertManager' needs pods; use Disabled",
        ),
        (
            {"network": {"mode": "RDMA", "rdma": {"fabric": "InfiniBand", "resourceName": "rdma/ib"}}},
            "spec.network.mode: 'RDMA' needs pods; use TCP",
        ),
        (
            {"engine": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}},
            "spec.engine.env[0].valueFrom: needs pods; use value",
        ),
    ],
    ids=["keys", "TLS", "mutual TLS", "RDMA", "value of a pod's field"],
)
def test_what_needs_pods_is_refused_by_field(home: Path, parts: dict[str, Any], problem: str) -> None:
    assert [str(found) for found in check_local(make(**parts), home, {})] == [problem]


def test_a_model_that_is_not_here_is_refused(home: Path) -> None:
    (problem,) = check_local(make({"huggingFace": {}}), home, {})
    assert problem.message.startswith("local clusters read models from volumes only; use persistentVolumeClaim")
    (problem,) = check_local(make(), home / "elsewhere", {})
    assert "is not a directory; put the model there or pass --volume models=DIR" in problem.message
