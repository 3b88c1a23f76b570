"""How long an engine stays that is not needed: fewer are asked for only when no more were wanted within the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# In seconds, where the manifest gives no window.
LEAST_KEEP_S, MOST_KEEP_S = 90.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDownWindow:
    """The stabilization window for scaling down.

    Args:
        given_s: ``autoscaling.scaleDown.stabilizationWindowSeconds``; None: it is chosen here.
        start_s: How long an engine takes from being asked for until it serves.
    """

    given_s: float | None
    start_s: float

    @property
    def keep_s(self) -> float:
        """How long an engine stays that is not needed.

        Chosen: as long as a start takes, since it has then cost what a new start would cost.
        """
        return min(max(self.start_s, LEAST_KEEP_S), MOST_KEEP_S) if self.given_s is None else self.given_s

    @property
    def idle_s(self) -> float:
        """How long the last engines stay that have nothing to do, and every engine after a beginning."""
        return MOST_KEEP_S if self.given_s is None else self.given_s

    def count_kept(
        self, wanted: int, replicas: int, recommendations: Iterable[tuple[float, int]], *, began_s: float, now: float
    ) -> int:
        """Counts the engines that stay where no more are wanted than there are.

        Args:
            wanted: Engines that are wanted now.
            replicas: Engines that there are to be so far.
            recommendations: When how many were wanted.
            began_s: When the scaler began to watch.
            now: Monotonic seconds.
        """
        if now - began_s < self.idle_s:
            return replicas
        recent = [number for at_s, number in recommendations if at_s > now - self.keep_s]
        return min(max([*recent, wanted]), replicas)
