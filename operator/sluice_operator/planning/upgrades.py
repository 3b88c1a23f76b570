"""Which clusters take the default images of a new operator now: a few at once, so that a bad image stops at those.

A cluster holds a place until its pods have been replaced and serve. One whose roll stops keeps its place, so that the
others keep the image that works. That says something about the image only where all pods served before: the other
clusters come last and hold no place, so that one that cannot start keeps nobody waiting.
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
        enqueue: Called with a cluster that waits, when its turn has come.
    """

    def __init__(self, limit: int, *, now: Callable[[], float], enqueue: Callable[[ClusterKey], None]) -> None:
        self._limit = limit
        self._now = now
        self._enqueue = enqueue
        self._started_s = now()
        self._holders: set[ClusterKey] = set()
        # Whether all pods serve of each cluster that waits, in the order in which they came.
        self._waiting: dict[ClusterKey, bool] = {}

    def may_upgrade(self, key: ClusterKey, body: Object, *, is_whole: bool) -> bool:
        """Whether a cluster for which other images are known takes them now; if not, it waits for its turn.

        Args:
            key: The cluster.
            body: As it is; its annotation allows an upgrade at any time.
            is_whole: Whether all its pods serve.
        """
        if annotations_of(body).get(UPGRADE_ANNOTATION) == UPGRADE_ALLOWED:
            self.withdraw(key)
            return True
        self._waiting[key] = is_whole
        if self.settles_in_s() > 0 or not self._is_next(key):
            # It may have been woken for a place that another one can take.
            self._wake()
            return False
        if is_whole:
            self._holders.add(key)
        self.withdraw(key)
        return True

    def note_progress(self, key: ClusterKey, *, is_rolling: bool, is_whole: bool) -> None:
        """Notes how far a cluster is that runs the newest images.

        Args:
            key: The cluster.
            is_rolling: Whether pods of another template are left.
            is_whole: Whether all its pods serve.
        """
        self.withdraw(key)
        if is_rolling:
            if self.settles_in_s() > 0:
                self._holders.add(key)
        elif is_whole:
            self._release(key)

    def withdraw(self, key: ClusterKey) -> None:
        """Lets a cluster wait no more, whether it begins or does not want to."""
        if self._waiting.pop(key, None) is not None:
            self._wake()

    def forget(self, key: ClusterKey) -> None:
        """Forgets a cluster that is gone."""
        self.withdraw(key)
        self._release(key)

    def settles_in_s(self) -> float:
        """Seconds until upgrades may begin after a start."""
        return max(0.0, self._started_s + SETTLE_S - self._now())

    def _is_next(self, key: ClusterKey) -> bool:
        if key in self._holders:
            return True
        if self._waiting[key]:
            return len(self._holders) < self._limit
        return self._limit > 0 and not self._holders and not any(self._waiting.values())

    def _release(self, key: ClusterKey) -> None:
        if key in self._holders:
            self._holders.remove(key)
            self._wake()

    def _wake(self) -> None:
        """Enqueues those whose turn has come: as many as places are free, or all that need none."""
        if self.settles_in_s() > 0:
            return
        whole = [key for key, is_whole in self._waiting.items() if is_whole]
        num_free = max(0, self._limit - len(self._holders))
        for key in whole[:num_free] or filter(self._is_next, list(self._waiting)):
            self._enqueue(key)
