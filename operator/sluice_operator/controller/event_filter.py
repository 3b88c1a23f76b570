"""Filters watch events: those of our own writes enqueue nothing.

An event during a reconcile may belong to a write whose answer is still on its way. It is checked when the reconcile
ends; events between two reconciles are checked at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_operator.kubernetes.kinds import CLUSTERS
from sluice_operator.kubernetes.own_writes import read_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_operator.api.names import ClusterKey
    from sluice_operator.controller.work_queue import WorkQueue
    from sluice_operator.kubernetes.own_writes import OwnWrites, Version


class EventFilter:
    """Enqueues the keys of events. Mutable; for one event loop.

    Args:
        queue: The queue.
        own_writes: Our own writes.
    """

    def __init__(self, queue: WorkQueue[ClusterKey], own_writes: OwnWrites) -> None:
        self._queue = queue
        self._own_writes = own_writes
        self._pending_versions: dict[ClusterKey, list[Version]] = {}
        self._edited: set[ClusterKey] = set()

    def handle_event(self, key: ClusterKey, body: Mapping[str, Any]) -> None:
        """Handles an event of a cluster or of one of its children."""
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
        """Whether a cluster itself seems to have changed since its present reconcile began."""
        return key in self._edited

    def end_reconcile(self, key: ClusterKey) -> None:
        """Checks the events that came during a reconcile; called at its end, whether it failed or not."""
        self._edited.discard(key)
        if any(not self._own_writes.includes(version) for version in self._pending_versions.pop(key, ())):
            self._queue.add(key)
