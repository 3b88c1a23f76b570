"""Checks whether a ServingCluster can be carried out: its schema, its rules, and what it needs of its environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api.condition_types import Reason
from sluice_operator.api.manifest import ManifestError, check_manifest
from sluice_operator.kubernetes.interface import CERTIFICATES
from sluice_operator.resources.certificates import uses_cert_manager
from sluice_operator.resources.pods.pod_status import Failure
from sluice_operator.resources.pods.pod_template import find_refused_affinity_terms, find_refused_fields

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.interface import Object
    from sluice_operator.settings import OperatorSettings


def check_cluster(
    body: Object, settings: OperatorSettings, *, has_cert_manager: bool = False
) -> tuple[ServingCluster | None, Failure | None]:
    """Checks a ServingCluster.

    Args:
        body: As it is in the cluster.
        settings: Whether the host may be reached, and whether the operator has a certificate.
        has_cert_manager: Whether the Kubernetes cluster knows Certificates.

    Returns:
        The cluster, or why it cannot be carried out.
    """
    try:
        # The status is the operator's and not checked.
        cluster = check_manifest({name: value for name, value in body.items() if name != "status"})
    except ManifestError as error:
        return None, Failure(reason=Reason.REFUSED, message="; ".join(str(problem) for problem in error.problems))
    missing = find_unavailable(cluster, settings, has_cert_manager=has_cert_manager)
    if missing:
        return None, Failure(reason=Reason.NOT_AVAILABLE, message="; ".join(missing))
    engine = cluster.spec.engine
    refused = [
        *find_refused_fields(engine.pod_template, allow_host_access=settings.allow_host_access),
        *find_refused_affinity_terms(engine.affinity, allow_host_access=settings.allow_host_access),
    ]
    if refused:
        return None, Failure(reason=Reason.POD_TEMPLATE_REFUSED, message="; ".join(refused))
    return cluster, None


def find_unavailable(cluster: ServingCluster, settings: OperatorSettings, *, has_cert_manager: bool) -> list[str]:
    """Finds what the spec requires and this installation lacks; serving without would be less secure than asked."""
    missing = []
    if cluster.spec.network.tls.mode != "Disabled" and not settings.peer_tls:
        missing.append(
            "spec.network.tls: the operator has no certificate for the routers' control ports; install the chart with "
            "tls.mode SecretRef or CertManager, or use Disabled"
        )
    if not has_cert_manager:
        missing += [
            f"{field}: cert-manager's Certificates ({CERTIFICATES.plural}.{CERTIFICATES.group}) are not known to this "
            "Kubernetes cluster; install cert-manager, or use SecretRef"
            for field in uses_cert_manager(cluster)
        ]
    return missing
