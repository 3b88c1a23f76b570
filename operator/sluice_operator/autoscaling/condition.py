"""What the condition Autoscaled says: reason and message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.api.condition_types import Reason

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingClusterSpec
    from sluice_operator.autoscaling.stored_scale import StoredScale


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleStatus:
    """What the condition Autoscaled says.

    Args:
        is_true: As many engines are asked for as what arrives needs.
        reason: Why.
        message: The same for people.
    """

    is_true: bool
    reason: Reason
    message: str


def describe_scale(
    spec: ServingClusterSpec,
    scale: StoredScale,
    *,
    is_over: bool,
    failure: str,
    missing: tuple[Reason, str] | None,
) -> ScaleStatus:
    """Describes the scaling.

    Args:
        spec: The spec.
        scale: The number in force.
        is_over: Whether more arrives than ``maxReplicas`` serve.
        failure: Why the newest search failed; empty: it did not.
        missing: Why there is no search: reason and message.
    """

    def status(reason: Reason, message: str, *, is_true: bool = False) -> ScaleStatus:
        return ScaleStatus(is_true=is_true, reason=reason, message=message)

    if failure:
        return status(Reason.SEARCH_FAILED, failure)
    if not scale.replicas:
        return status(Reason.IDLE, "no engine is wanted until a request arrives", is_true=True)
    if scale.capacity is None:
        return status(*(missing or (Reason.SEARCHING, "a search for what engines serve runs")))
    most = spec.autoscaling.max_replicas
    if is_over:
        return status(Reason.AT_MAXIMUM, f"more arrives than maxReplicas, {most}, serve; raise it")
    if spec.autoscaling.mode == "Recommend" and scale.replicas != spec.replicas:
        message = f"{scale.replicas} engines are wanted; put them into spec.replicas, or set autoscaling.mode: Apply"
        return status(Reason.RECOMMENDED, message)
    return status(Reason.SIZED, f"{scale.replicas} engines are wanted, and asked for", is_true=True)
