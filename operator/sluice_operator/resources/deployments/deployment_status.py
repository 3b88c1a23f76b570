"""Reads a Deployment's status: whether it rolls, whether all its pods serve, and why it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.kubernetes.errors import exceeds_quota

if TYPE_CHECKING:
    from sluice_operator.kubernetes.objects import Object


def is_rolling(deployment: Object) -> bool:
    """Whether pods of another template are still to be replaced."""
    status = deployment.get("status") or {}
    is_seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return not is_seen or status.get("updatedReplicas", 0) < status.get("replicas", 0)


def is_whole(deployment: Object) -> bool:
    """Whether all pods of a Deployment serve."""
    return bool((deployment.get("status") or {}).get("readyReplicas", 0) >= deployment["spec"]["replicas"])


def find_pod_refusals(deployment: Object) -> list[Failure]:
    """Finds why Kubernetes could not create a Deployment's pods: a quota, or the namespace's Pod Security."""
    found = []
    for condition in (deployment.get("status") or {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            message = condition.get("message", "")
            reason = Reason.QUOTA_EXCEEDED if exceeds_quota(message) else Reason.FORBIDDEN
            name = deployment["metadata"]["name"]
            found.append(Failure(reason=reason, message=f"deployment {name} cannot create pods: {message}"))
    return found
