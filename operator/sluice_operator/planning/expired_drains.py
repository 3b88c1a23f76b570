"""How long engines that leave may drain (``engine.drainTimeoutSeconds``), and whose time is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sluice_core.records import EngineId
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.resources.pods.pod_status import Pod

# An engine ends its own drain by its timeout; the routers' reports of that may be late.
DRAIN_MARGIN_S = 5.0


def drain_limit_s(cluster: ServingCluster) -> float:
    """Longest time that a victim may drain before its pod goes anyway, in seconds."""
    return cluster.spec.engine.drain_timeout_seconds + DRAIN_MARGIN_S


def find_drain_starts(
    pods: Iterable[Pod], noticed_s: Mapping[EngineId, float], *, limit_s: float, now: float, wall_s: float
) -> dict[EngineId, float]:
    """Finds when each drain began, in monotonic seconds of this process.

    A drain that an earlier process began counts from then; while this one runs, by its own clock.

    Args:
        pods: Engine pods; the annotation of one that leaves says when its drain began.
        noticed_s: Drains whose beginning this process saw.
        limit_s: Longest time of a drain.
        now: Monotonic seconds.
        wall_s: The time, in seconds since 1970.
    """
    began = {pod.engine_id: pod.draining_since_s for pod in pods if pod.draining_since_s is not None}
    inherited = {engine_id: now - min(max(wall_s - since_s, 0.0), limit_s) for engine_id, since_s in began.items()}
    return {**inherited, **noticed_s}


def find_expired(started_s: Mapping[EngineId, float], *, limit_s: float, now: float) -> set[EngineId]:
    """Finds the engines that have had their time to drain."""
    return {engine_id for engine_id, since_s in started_s.items() if now - since_s >= limit_s}
