"""What a manifest means on this machine: where its model lies, and what only a Kubernetes cluster can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.manifest import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sluice_operator.spec import ServingCluster


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


def check_local(manifest: ServingCluster, home: Path, volumes: Mapping[str, Path]) -> list[Problem]:
    """Finds what local processes cannot do.

    Args:
        manifest: The manifest.
        home: Sluice's directory.
        volumes: Directories of claims that lie elsewhere.
    """
    spec = manifest.spec
    problems = []
    if spec.model.source.persistent_volume_claim is None:
        problems.append(
            Problem(
                field="spec.model.source",
                message="local clusters read models from volumes only; use persistentVolumeClaim, and --volume NAME=DIR",
            )
        )
    elif not (directory := find_model(manifest, home, volumes)).is_dir():
        claim = spec.model.source.persistent_volume_claim.claim_name
        hint = f"put the model there or pass --volume {claim}=DIR (`make model` makes the tiny one)"
        problems.append(Problem(field="spec.model.source", message=f"{directory} is not a directory; {hint}"))
    modes = (
        ("network.mode", spec.network.mode, "TCP"),
        ("network.tls.mode", spec.network.tls.mode, "Disabled"),
        ("router.auth.mode", spec.router.auth.mode, "None"),
        ("router.tls.mode", spec.router.tls.mode, "Disabled"),
    )
    problems += [
        Problem(field=f"spec.{field}", message=f"{mode!r} needs pods; use {local}")
        for field, mode, local in modes
        if mode != local
    ]
    return problems + [
        Problem(field=f"spec.engine.env[{index}].valueFrom", message="needs pods; use value")
        for index, variable in enumerate(spec.engine.env)
        if variable.value_from is not None
    ]
