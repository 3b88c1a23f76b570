"""Reads a pod."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from sluice_core.records import EngineId
from sluice_operator.api.labels import (
    CONTROL_TLS_ANNOTATION,
    DELETION_COST,
    DELETION_COST_ANNOTATION,
    DRAINED_DELETION_COST,
    DRAINING_SINCE_ANNOTATION,
    MODEL_LABEL,
    RESTART_HASH_ANNOTATION,
    ROLE_LABEL,
)
from sluice_operator.api.model_identity import COMMIT
from sluice_operator.api.router_workers import ROUTER_CONTAINERS
from sluice_operator.kubernetes.objects import annotations_of, labels_of, name_of, uid_of
from sluice_operator.resources.pods.model_volume import RESOLVE_MODEL
from sluice_operator.resources.pods.pod_failures import find_pod_failure

if TYPE_CHECKING:
    from sluice_operator.api.condition_types import Failure
    from sluice_operator.kubernetes.objects import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One engine or router pod.

    Args:
        name: Its name.
        engine_id: Its uid, by which engines go in plans.
        address: Its address; empty before it has one.
        role_label: Value of the role label; empty without one.
        has_deletion_cost: Whether it is marked to leave.
        is_ready: Whether it serves.
        is_ending: Whether it is being deleted.
        has_ended: Whether it failed or completed, and will not come back.
        failure: What is wrong with it.
        created: When it was created, as Kubernetes writes times, which sort as text.
        goes_next: Whether it is marked to go before others that leave.
        draining_since_s: When it began to drain, in seconds since 1970; None: it does not.
        restart_hash: Identifies the template that it was made from.
        control_tls: Name in the certificate of a router's control port; empty: the port is in the open.
        model_id: Of the model that it serves; empty: an operator made it that knew no ids.
        resolved_revision: Commit that its model's revision is by the Hub; empty: it did not ask, or has no answer yet.
        started_in_s: How long it took from its creation until it served; None: it does not serve.
        node: Where it runs; empty before it has a place.
        num_workers: Router processes in it.
        is_disrupted: Whether Kubernetes says that it is about to end it: an eviction, or a node that shuts down.
    """

    name: str
    engine_id: EngineId
    address: str
    role_label: str
    has_deletion_cost: bool
    is_ready: bool
    is_ending: bool
    has_ended: bool
    failure: Failure | None
    created: str = ""
    goes_next: bool = False
    draining_since_s: float | None = None
    restart_hash: str = ""
    control_tls: str = ""
    model_id: str = ""
    resolved_revision: str = ""
    started_in_s: float | None = None
    node: str = ""
    num_workers: int = 1
    is_disrupted: bool = False

    @property
    def is_present(self) -> bool:
        """Whether its Deployment counts it."""
        return not self.is_ending and not self.has_ended

    @property
    def is_serving(self) -> bool:
        """Whether it serves, and is to stay."""
        return self.is_present and self.is_ready


def read_pod(content: Object) -> Pod:
    """Reads a pod."""
    status = content.get("status") or {}
    cost, since = (
        annotations_of(content).get(name, "") for name in (DELETION_COST_ANNOTATION, DRAINING_SINCE_ANNOTATION)
    )
    said = {item["type"] for item in status.get("conditions") or [] if item["status"] == "True"}
    is_ready = "Ready" in said
    return Pod(
        name=name_of(content),
        engine_id=EngineId(uid_of(content)),
        address=status.get("podIP", ""),
        role_label=labels_of(content).get(ROLE_LABEL, ""),
        has_deletion_cost=cost in (DELETION_COST, DRAINED_DELETION_COST),
        is_ready=is_ready,
        is_ending="deletionTimestamp" in content["metadata"],
        has_ended=status.get("phase") in ("Failed", "Succeeded"),
        failure=find_pod_failure(content),
        created=content["metadata"].get("creationTimestamp") or "",
        goes_next=cost == DRAINED_DELETION_COST,
        draining_since_s=float(since) if since.isdecimal() else None,
        restart_hash=annotations_of(content).get(RESTART_HASH_ANNOTATION, ""),
        control_tls=annotations_of(content).get(CONTROL_TLS_ANNOTATION, ""),
        model_id=labels_of(content).get(MODEL_LABEL, ""),
        resolved_revision=_read_revision(status),
        started_in_s=_read_start_s(content["metadata"].get("creationTimestamp"), status) if is_ready else None,
        node=(content.get("spec") or {}).get("nodeName") or "",
        num_workers=_count_workers(content),
        is_disrupted="DisruptionTarget" in said,
    )


def _count_workers(content: Object) -> int:
    names = {container["name"] for container in (content.get("spec") or {}).get("containers") or []}
    return max(1, len(names & ROUTER_CONTAINERS))


def _read_start_s(created: str | None, status: Object) -> float | None:
    """Reads how long a pod took until it was ready; one that was ready before has taken less."""
    ready: Object = next((item for item in status.get("conditions") or [] if item["type"] == "Ready"), {})
    try:
        times = [datetime.fromisoformat(text) for text in (created, ready.get("lastTransitionTime")) if text]
    except ValueError:
        return None
    return (times[1] - times[0]).total_seconds() if len(times) == 2 else None


def _read_revision(status: Object) -> str:
    for container in status.get("initContainerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        if container["name"] == RESOLVE_MODEL and COMMIT.fullmatch(ended.get("message") or ""):
            return str(ended["message"])
    return ""
