"""What a manifest may ask of Kubernetes that local processes cannot do is refused by field, before anything starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from certificate_files import make_files, mount_secret

from sluice_cli.local_cluster.local_manifest import check_local, describe_local_security, find_model, find_secret
from sluice_operator.api import names
from sluice_operator.api.manifest import check_manifest

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
            {"router": {"tls": {"mode": "CertManager", "issuerRef": {"name": "ca"}}}},
            "spec.router.tls.mode: 'CertManager' needs pods; use SecretRef",
        ),
        (
            {"network": {"tls": {"mode": "CertManager", "issuerRef": {"name": "ca"}}}},
            "spec.network.tls.mode: 'CertManager' needs pods; use SecretRef",
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
    ids=["TLS", "mutual TLS", "RDMA", "value of a pod's field"],
)
def test_what_needs_pods_is_refused_by_field(home: Path, parts: dict[str, Any], problem: str) -> None:
    assert [str(found) for found in check_local(make(**parts), home, {})] == [problem]


def test_a_model_that_is_not_here_is_refused(home: Path) -> None:
    (problem,) = check_local(make({"huggingFace": {}}), home, {})
    assert problem.message.startswith("local clusters read models from volumes only; use persistentVolumeClaim")
    (problem,) = check_local(make(), home / "elsewhere", {})
    assert "is not a directory; put the model there or pass --volume models=DIR" in problem.message


def test_a_model_that_engines_refuse_is_refused_before_any_starts(home: Path) -> None:
    config = home / "volumes" / "models" / "tiny" / "config.json"
    config.write_text('{"mamba_d_state": 16}')
    (problem,) = check_local(make(), home, {})
    assert problem.field == "spec.model.source"
    assert problem.message.startswith(f"{config}: mamba_d_state is 16, so it has state-space layers; models with full")
    assert check_local(make(engine={"extraArgs": ["--hf-overrides={}"]}), home, {}) == []


SECURED = {
    "router": {
        "auth": {"mode": "APIKey", "apiKey": {"secretName": "keys"}},
        "tls": {"mode": "SecretRef", "secretName": "front"},
    },
    "network": {"tls": {"mode": "SecretRef", "secretName": "peers"}},
}
PEERS = ("test-engines.default.svc", "test-router-control.default.svc")


def test_secrets_lie_in_folders(home: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    (home / "secrets" / "keys").mkdir(parents=True)
    mount_secret(home / "secrets" / "front", make_files(authority, "localhost"))
    elsewhere = {"peers": mount_secret(tmp_path / "elsewhere", make_files(authority, *PEERS))}
    manifest = make(**SECURED)
    assert check_local(manifest, home, {}, elsewhere) == []
    security = describe_local_security(manifest, names.ROUTER, lambda name: find_secret(name, home, elsewhere))
    assert security.api_keys == str(home / "secrets" / "keys")
    assert security.front_tls == str(home / "secrets" / "front")
    assert security.peer_tls == str(tmp_path / "elsewhere")
    assert (security.engine_name, security.router_name) == PEERS
    # The launcher has the routers' certificate.
    assert security.control_name == security.router_name


def test_secrets_that_are_not_here_or_of_no_use_are_refused_by_field(home: Path) -> None:
    authority = trustme.CA()
    mount_secret(home / "secrets" / "peers", make_files(authority, PEERS[0]))
    problems = {problem.field: problem.message for problem in check_local(make(**SECURED), home, {})}
    folder = home / "secrets"
    assert problems == {
        "spec.router.auth.apiKey.secretName": (
            f"{folder / 'keys'} is not a directory; put the keys there, a file per owner, or pass --secret keys=DIR"
        ),
        "spec.router.tls.secretName": (
            f"{folder / 'front'}: tls.crt cannot be read: No such file or directory; pass --secret front=DIR if it lies"
            " elsewhere"
        ),
        "spec.network.tls.secretName": (
            f"{folder / 'peers'}: the certificate is not for {PEERS[1]}; pass --secret peers=DIR if it lies elsewhere"
        ),
    }


def test_a_model_of_the_hub_is_not_looked_for_on_this_machine(tmp_path: Path) -> None:
    manifest = SimpleNamespace(
        spec=SimpleNamespace(model=SimpleNamespace(source=SimpleNamespace(persistent_volume_claim=None)))
    )
    with pytest.raises(AssertionError, match="only models on volumes"):
        find_model(manifest, tmp_path, {})  # type: ignore[arg-type]
