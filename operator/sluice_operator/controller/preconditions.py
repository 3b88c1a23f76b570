"""Checks whether a ServingCluster can be carried out: its schema, its rules, and what it needs of its environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.condition_types import ConditionType, Failure, Reason
from sluice_operator.api.manifest import ManifestError, check_manifest
from sluice_operator.kubernetes.kinds import CERTIFICATES
from sluice_operator.resources.certificates import uses_cert_manager
from sluice_operator.resources.pods.user_pod_template import find_refused_affinity_terms, find_refused_fields

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.settings import OperatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecVerdict:
    """What to do about a spec.

    Args:
        cluster: The cluster to go by: as it is, or with the spec that was accepted last; None: there is neither.
        accepted_spec: Its spec, as it was written.
        refusal: Why the spec as it is cannot be carried out.
        may_apply: Whether children may be made from ``cluster``.
    """

    cluster: ServingCluster | None
    accepted_spec: Object | None
    refusal: Failure | None = None
    may_apply: bool = True


def judge_spec(
    body: Object, accepted_spec: Object | None, settings: OperatorSettings, *, has_cert_manager: bool
) -> SpecVerdict:
    """Judges a spec; while it is refused, the one that was accepted last stays in force.

    Args:
        body: As it is in the cluster.
        accepted_spec: The spec that was accepted last; None: none was.
        settings: See ``check_cluster``.
        has_cert_manager: See ``check_cluster``.
    """
    cluster, refusal = check_cluster(body, settings, has_cert_manager=has_cert_manager)
    if refusal is None:
        return SpecVerdict(cluster=cluster, accepted_spec=body["spec"])
    if accepted_spec is None:
        return SpecVerdict(cluster=None, accepted_spec=None, refusal=refusal)
    body = {**body, "spec": accepted_spec}
    try:
        accepted = _parse(body)
    except ManifestError:
        return SpecVerdict(cluster=None, accepted_spec=accepted_spec, refusal=refusal)
    # What was allowed then may not be today. Roles and drains go on all the same.
    _, objection = check_cluster(body, settings, has_cert_manager=has_cert_manager)
    return SpecVerdict(cluster=accepted, accepted_spec=accepted_spec, refusal=refusal, may_apply=objection is None)


def has_served(body: Object) -> bool:
    """Whether an engine and a router of a cluster have ever been ready."""
    conditions = (body.get("status") or {}).get("conditions", [])
    ready = next((item for item in conditions if item["type"] == ConditionType.READY), None)
    return ready is not None and ready["reason"] not in (Reason.STARTING, Reason.SPEC_INVALID)


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
        cluster = _parse(body)
    except ManifestError as error:
        return None, Failure(reason=Reason.REFUSED, message="; ".join(str(problem) for problem in error.problems))
    missing = find_unavailable(cluster, settings, has_cert_manager=has_cert_manager)
    if missing:
        return None, Failure(reason=Reason.NOT_AVAILABLE, message="; ".join(missing))
    refused = []
    for component, fields in ((names.ENGINE, cluster.spec.engine), (names.ROUTER, cluster.spec.router)):
        for find, value in ((find_refused_fields, fields.pod_template), (find_refused_affinity_terms, fields.affinity)):
            refused += find(value, component, allow_host_access=settings.allow_host_access)
    if refused:
        return None, Failure(reason=Reason.POD_TEMPLATE_REFUSED, message="; ".join(refused))
    return cluster, None


def _parse(body: Object) -> ServingCluster:
    # The status is the operator's and not checked.
    return check_manifest({name: value for name, value in body.items() if name != "status"})


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
