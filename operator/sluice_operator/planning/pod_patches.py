"""Patches of running engine pods: the role label in force, and the deletion cost of scale-down victims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_operator.api.labels import (
    DELETION_COST,
    DELETION_COST_ANNOTATION,
    DRAINED_DELETION_COST,
    DRAINING_SINCE_ANNOTATION,
    ROLE_LABEL,
    ROLE_VALUES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sluice_core.records import EngineId
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.planning.scale_down import ScaleDecision
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.routers.engine_reports import EngineReport


def render_pod_patches(
    pods: Sequence[Pod], scale: ScaleDecision, reports: Mapping[EngineId, EngineReport], wall_s: float
) -> Iterator[Object]:
    """Yields the patch of each pod whose role label or deletion cost is not right.

    Args:
        pods: Engine pods.
        scale: Who leaves.
        reports: What routers say; a role counts once the engine has acknowledged its chunk size.
        wall_s: The time, in seconds since 1970.
    """
    for pod in pods:
        if not pod.is_present:
            continue
        metadata: dict[str, Any] = {}
        report = reports.get(pod.engine_id)
        role = ROLE_VALUES[report.role] if report and report.role else pod.role_label
        if role != pod.role_label:
            metadata["labels"] = {ROLE_LABEL: role}
        if annotations := _render_marks(pod, scale, wall_s):
            metadata["annotations"] = annotations
        if metadata:
            yield {"metadata": {"name": pod.name, "uid": str(pod.engine_id), **metadata}}


def _render_marks(pod: Pod, scale: ScaleDecision, wall_s: float) -> dict[str, str | None]:
    """Renders the annotations of a pod that leaves, or stays after all, as far as they are not right."""
    is_victim, is_drained = pod.engine_id in scale.victims, pod.engine_id in scale.drained
    if (is_victim, is_drained) == (pod.has_deletion_cost, pod.goes_next):
        return {}
    if not is_victim:
        return {DELETION_COST_ANNOTATION: None, DRAINING_SINCE_ANNOTATION: None}
    since_s = wall_s if pod.draining_since_s is None else pod.draining_since_s
    return {
        DELETION_COST_ANNOTATION: DRAINED_DELETION_COST if is_drained else DELETION_COST,
        DRAINING_SINCE_ANNOTATION: str(int(since_s)),
    }
