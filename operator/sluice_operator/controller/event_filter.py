"""Which events are worth a look, and when that can be told.

An event that comes between two looks is judged at once. One that comes during a look may be the echo of a write whose
answer is still on its way, and nothing would be won by knowing: it is judged when the look has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_operator.kubernetes.interface import CLUSTERS
from sluice_operator.kubernetes.own_writes import read_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_operator.api.names import ClusterKey
    from sluice_operator.controller.work_queue import WorkQueue
    from sluice_operator.kubernetes.own_writes import OwnWrites, Version


class EventFilter:
    """Hears events, and puts keys into the queue. Mutable; for one event loop.

    Args:
        queue: The queue.
        own_writes: What we have written ourselves.
    """

    def __init__(self, queue: WorkQueue[ClusterKey], own_writes: OwnWrites) -> None:
        self._queue = queue
        self._own_writes = own_writes
        self._pending_versions: dict[ClusterKey, list[Version]] = {}
        self._edited: set[ClusterKey] = set()

    def handle_event(self, key: ClusterKey, body: Mapping[str, Any]) -> None:
        """Takes an event of a cluster or of what belongs to it."""
        version = read_version(body)
        if self._own_writes.includes(version):
            return
        if not self._queue.is_processing(key):
            self._queue.add(key)
            return
        self._pending_versions.setdefault(key, []).append(version)
        if body.get("kind") == CLUSTERS.name:
            self._edited.add(key)

    def is_edited(self, key: ClusterKey) -> bool:
        """Whether a cluster itself seems to have changed since the present look at it began."""
        return key in self._edited

    def end_reconcile(self, key: ClusterKey) -> None:
        """Judges what came during a look; to be called at its end, however it ends."""
        self._edited.discard(key)
        if any(not self._own_writes.includes(version) for version in self._pending_versions.pop(key, ())):
            self._queue.add(key)
