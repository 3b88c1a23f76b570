"""Reads a manifest for this machine: where its model and Secrets are, and which fields need a Kubernetes cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.certificates import CertificateError, read_certificates
from sluice_core.model_support import find_refusal
from sluice_operator.api import names
from sluice_operator.api.manifest import ManifestProblem
from sluice_operator.resources.pods.secrets import describe_security

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.resources.command_lines import Security


def find_model(manifest: ServingCluster, home: Path, volumes: Mapping[str, Path]) -> Path:
    """Directory of a checked manifest's model.

    Args:
        manifest: The manifest.
        home: Sluice's directory; a claim NAME lies in ``volumes/NAME`` there.
        volumes: Directories of claims that lie elsewhere.
    """
    claim = manifest.spec.model.source.persistent_volume_claim
    if claim is None:
        raise AssertionError("check_local has passed only models on volumes")
    return (volumes.get(claim.claim_name, home / "volumes" / claim.claim_name) / claim.path).absolute()


def find_secret(name: str, home: Path, secrets: Mapping[str, Path]) -> Path:
    """Directory of a Secret's entries.

    Args:
        name: The Secret's name.
        home: Sluice's directory; a Secret NAME lies in ``secrets/NAME`` there.
        secrets: Directories of Secrets that lie elsewhere.
    """
    return secrets.get(name, home / "secrets" / name).absolute()


def describe_local_security(manifest: ServingCluster, component: str, locate: Callable[[str], Path]) -> Security:
    """Says where a local program finds keys and certificates.

    The launcher presents the routers' certificate to control ports.

    Args:
        manifest: The manifest.
        component: Engines or routers.
        locate: Directory of a Secret.
    """
    control_name = names.name_router_peer(manifest.metadata)
    return describe_security(manifest, component, lambda _, secret: str(locate(secret)), control_name)


def check_local(
    manifest: ServingCluster, home: Path, volumes: Mapping[str, Path], secrets: Mapping[str, Path] | None = None
) -> list[ManifestProblem]:
    """Finds fields that local processes cannot follow.

    Args:
        manifest: The manifest.
        home: Sluice's directory.
        volumes: Directories of claims that lie elsewhere.
        secrets: Directories of Secrets that lie elsewhere.
    """
    spec = manifest.spec
    problems = []
    if spec.model.source.persistent_volume_claim is None:
        problems.append(
            ManifestProblem(
                field="spec.model.source",
                message="local clusters read models from volumes only;"
                " use persistentVolumeClaim, and --volume NAME=DIR",
            )
        )
    elif not (directory := find_model(manifest, home, volumes)).is_dir():
        claim = spec.model.source.persistent_volume_claim.claim_name
        hint = f"put the model there or pass --volume {claim}=DIR (`make model` makes the tiny one)"
        problems.append(ManifestProblem(field="spec.model.source", message=f"{directory} is not a directory; {hint}"))
    elif refusal := find_refusal(directory, spec.engine.extra_args):
        problems.append(ManifestProblem(field="spec.model.source", message=refusal))
    modes = (
        ("network.mode", spec.network.mode, "RDMA", "TCP"),
        ("network.tls.mode", spec.network.tls.mode, "CertManager", "SecretRef"),
        ("router.tls.mode", spec.router.tls.mode, "CertManager", "SecretRef"),
    )
    problems += [
        ManifestProblem(field=f"spec.{field}", message=f"{mode!r} needs pods; use {local}")
        for field, mode, remote, local in modes
        if mode == remote
    ]
    problems += _check_secrets(manifest, lambda name: find_secret(name, home, secrets or {}))
    return problems + [
        ManifestProblem(field=f"spec.{part}.env[{index}].valueFrom", message="needs pods; use value")
        for part, fields in (("engine", spec.engine), ("router", spec.router))
        for index, variable in enumerate(fields.env)
        if variable.value_from is not None
    ]


def _check_secrets(manifest: ServingCluster, locate: Callable[[str], Path]) -> Iterator[ManifestProblem]:
    """Finds Secrets that are not here, and certificates that could not be used."""
    router, network = manifest.spec.router, manifest.spec.network
    if router.auth.api_key is not None:
        name = router.auth.api_key.secret_name
        if not locate(name).is_dir():
            hint = f"put the keys there, a file per owner, or pass --secret {name}=DIR"
            message = f"{locate(name)} is not a directory; {hint}"
            yield ManifestProblem(field="spec.router.auth.apiKey.secretName", message=message)
    peers = (names.name_engine_peer(manifest.metadata), names.name_router_peer(manifest.metadata))
    for field, secret, wanted in (
        ("router", router.tls.secret_name, ()),
        ("network", network.tls.secret_name, peers),
    ):
        if secret is not None:
            fault = _find_fault(locate(secret), wanted)
            if fault:
                message = f"{fault}; pass --secret {secret}=DIR if it lies elsewhere"
                yield ManifestProblem(field=f"spec.{field}.tls.secretName", message=message)


def _find_fault(folder: Path, wanted: tuple[str, ...]) -> str:
    """Says why a certificate cannot be used for these names; without names, clients check the name themselves."""
    try:
        found = read_certificates(folder, is_mutual=bool(wanted))
    except CertificateError as error:
        return str(error)
    missing = [name for name in wanted if name not in found.names]
    return f"{folder}: the certificate is not for {' and '.join(missing)}" if missing else ""
