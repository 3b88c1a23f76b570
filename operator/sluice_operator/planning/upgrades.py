"""Which clusters take the default images of a new operator now: a few at once, so that a bad image stops at those.

A cluster holds a place until its pods have been replaced and serve. One whose roll stops keeps its place, so that the
others keep the image that works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api.labels import UPGRADE_ANNOTATION
from sluice_operator.kubernetes.objects import annotations_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.api.names import ClusterKey
    from sluice_operator.kubernetes.objects import Object

# A new leader hears of upgrades under way first; only then it begins others.
SETTLE_S = 30.0
UPGRADE_ALLOWED = "allowed"


class UpgradePlaces:
    """The places for clusters that upgrade.

    Mutable; only its methods change it. After a restart, clusters whose pods are being replaced take places again.

    Args:
        limit: Clusters that upgrade at once; 0: those with the annotation only.
        now: Monotonic seconds.
        enqueue: Called with a cluster that waits, when a place is free.
    """

    def __init__(self, limit: int, *, now: Callable[[], float], enqueue: Callable[[ClusterKey], None]) -> None:
        self._limit = limit
        self._now = now
        self._enqueue = enqueue
        self._started_s = now()
        self._holders: set[ClusterKey] = set()
        self._waiting: dict[ClusterKey, None] = {}

    def may_upgrade(self, key: ClusterKey, body: Object) -> bool:
        """Whether a cluster for which other images are known takes them now; if not, it waits for its turn.

        Args:
            key: The cluster.
            body: As it is; its annotation allows an upgrade at any time.
        """
        if annotations_of(body).get(UPGRADE_ANNOTATION) == UPGRADE_ALLOWED:
            self._waiting.pop(key, None)
            return True
        if self.settles_in_s() > 0 or (len(self._holders - {key}) >= self._limit):
            self._waiting[key] = None
            return False
        self._waiting.pop(key, None)
        self._holders.add(key)
        return True

    def note_progress(self, key: ClusterKey, *, is_rolling: bool, is_whole: bool) -> None:
        """Notes how far a cluster is that runs the newest images.

        Args:
            key: The cluster.
            is_rolling: Whether pods of another template are left.
            is_whole: Whether all its pods serve.
        """
        self._waiting.pop(key, None)
        if is_rolling:
            self._holders.add(key)
        elif is_whole:
            self._release(key)

    def forget(self, key: ClusterKey) -> None:
        """Forgets a cluster that is gone."""
        self._waiting.pop(key, None)
        self._release(key)

    def settles_in_s(self) -> float:
        """Seconds until upgrades may begin after a start."""
        return max(0.0, self._started_s + SETTLE_S - self._now())

    def _release(self, key: ClusterKey) -> None:
        if key in self._holders:
            self._holders.remove(key)
            for waiting in list(self._waiting)[: self._limit]:
                self._enqueue(waiting)
