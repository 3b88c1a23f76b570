"""Patches of running engine pods: the role label in force, and the deletion cost of scale-down victims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_operator.api.names import DELETION_COST_ANNOTATION, ROLE_LABEL, ROLE_VALUES
from sluice_operator.resources.pods.pod_status import DELETION_COST

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sluice_core.records import EngineId
    from sluice_operator.kubernetes.interface import Object
    from sluice_operator.planning.scale_down import ScaleDecision
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.routers.engine_reports import EngineReport


def render_pod_patches(
    pods: Sequence[Pod], scale: ScaleDecision, reports: Mapping[EngineId, EngineReport]
) -> Iterator[Object]:
    """Yields the patch of each pod whose role label or deletion cost is not right.

    Args:
        pods: Engine pods.
        scale: Who leaves.
        reports: What routers say; a role counts once the engine has acknowledged its chunk size.
    """
    for pod in pods:
        if not pod.is_present:
            continue
        metadata: dict[str, Any] = {}
        report = reports.get(pod.engine_id)
        role = ROLE_VALUES[report.role] if report and report.role else pod.role_label
        if role != pod.role_label:
            metadata["labels"] = {ROLE_LABEL: role}
        is_victim = pod.engine_id in scale.victims
        if is_victim != pod.has_deletion_cost:
            metadata["annotations"] = {DELETION_COST_ANNOTATION: DELETION_COST if is_victim else None}
        if metadata:
            yield {"metadata": {"name": pod.name, "uid": str(pod.engine_id), **metadata}}
