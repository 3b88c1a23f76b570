"""Counts what arrives at the routers of one cluster, from counters that only grow while a router lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sluice.v1 import control_pb2


@dataclass(slots=True)
class ArrivalCounter:
    """Requests that arrived at all routers. Mutable; only its methods change it.

    Attributes:
        total: Requests since this began; only grows.
    """

    total: int = 0
    _known: dict[str, int] = field(default_factory=dict)

    def take(self, status: control_pb2.GetStatusResponse) -> None:
        """Adds what arrived at a router since its last status.

        The first status of a router is a beginning: when the requests before it came is not known.
        """
        before = self._known.get(status.router_id)
        self._known[status.router_id] = status.num_arrived
        if before is not None:
            self.total += max(0, status.num_arrived - before)

    def keep_routers(self, router_ids: Iterable[str]) -> None:
        """Forgets routers that are gone."""
        kept = set(router_ids)
        self._known = {router_id: number for router_id, number in self._known.items() if router_id in kept}
