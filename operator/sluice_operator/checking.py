"""Whether a ServingCluster can be carried out: its schema, its rules, and what this version does not have yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.conditions import Reason
from sluice_operator.manifest import ManifestError, check_manifest
from sluice_operator.pod_template import find_refused, find_refused_affinity
from sluice_operator.pods import Trouble

if TYPE_CHECKING:
    from sluice_operator.kubernetes_port import Object
    from sluice_operator.settings import Settings
    from sluice_operator.spec import ServingCluster


def check_cluster(body: Object, settings: Settings) -> tuple[ServingCluster | None, Trouble | None]:
    """Checks a ServingCluster.

    Args:
        body: As it is in the cluster.
        settings: Whether the host may be reached.

    Returns:
        The cluster, or why it cannot be carried out.
    """
    try:
        # The status is ours, and no part of what is wanted.
        cluster = check_manifest({name: value for name, value in body.items() if name != "status"})
    except ManifestError as error:
        return None, Trouble(reason=Reason.REFUSED, message="; ".join(str(problem) for problem in error.problems))
    missing = find_unavailable(cluster)
    if missing:
        return None, Trouble(reason=Reason.NOT_AVAILABLE, message="; ".join(missing))
    engine = cluster.spec.engine
    refused = [
        *find_refused(engine.pod_template, allow_host_access=settings.allow_host_access),
        *find_refused_affinity(engine.affinity, allow_host_access=settings.allow_host_access),
    ]
    if refused:
        return None, Trouble(reason=Reason.POD_TEMPLATE_REFUSED, message="; ".join(refused))
    return cluster, None


def find_unavailable(cluster: ServingCluster) -> list[str]:
    """Finds what the schema knows and pods cannot do yet; to serve without it would be less safe than asked for."""
    spec = cluster.spec
    modes = {
        "spec.network.tls.mode": (spec.network.tls.mode, "Disabled"),
        "spec.router.tls.mode": (spec.router.tls.mode, "Disabled"),
        "spec.router.auth.mode": (spec.router.auth.mode, "None"),
    }
    return [
        f"{field}: {mode} is not available yet; use {instead}"
        for field, (mode, instead) in modes.items()
        if mode != instead
    ]
