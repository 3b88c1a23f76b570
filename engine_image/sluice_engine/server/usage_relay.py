"""What owners of API keys have used on each router, passed on to the others: routers know one another by engines alone.

The engine does not judge it. It keeps the last minute of each router, for routers that come later, also of one that has
left: a router that starts anew must not begin with an empty minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.v1 import engine_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

# A minute, and the second in which a request at its end was admitted.
KEPT_S = 61


@dataclass(slots=True, kw_only=True)
class _Owner:
    running: int = 0
    seconds: dict[int, wire.SecondUsage] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Router:
    second: int = 0
    number: int = 0
    taken_s: float = 0.0
    owners: dict[str, _Owner] = field(default_factory=dict)

    def now(self, now_s: float) -> int:
        """The router's second by its own count."""
        return self.second + int(now_s - self.taken_s)


class UsageRelay:
    """The last minute of each router. Times are seconds on the engine's clock."""

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}

    def take(self, router_id: str, usage: wire.RouterUsage, now_s: float) -> wire.RouterUsage:
        """Keeps what a router reports.

        Args:
            router_id: The router.
            usage: Its report.
            now_s: The engine's clock.

        Returns:
            The report for the others.
        """
        router = self._routers.setdefault(router_id, _Router())
        router.second, router.number, router.taken_s = usage.second, usage.number, now_s
        for reported in usage.owners:
            owner = router.owners.setdefault(reported.owner, _Owner())
            owner.running = reported.running
            owner.seconds.update((entry.second, entry) for entry in reported.seconds)
        self._forget(router, now_s)
        return wire.RouterUsage(router_id=router_id, second=usage.second, owners=usage.owners, number=usage.number)

    def list_others(self, router_id: str, now_s: float) -> Iterator[wire.RouterUsage]:
        """Lists what the other routers have used in the last minute, for a router whose stream begins."""
        for name, router in list(self._routers.items()):
            self._forget(router, now_s)
            if name == router_id:
                continue
            owners = [
                wire.OwnerUsage(owner=owner, running=usage.running, seconds=usage.seconds.values())
                for owner, usage in router.owners.items()
            ]
            yield wire.RouterUsage(router_id=name, second=router.now(now_s), owners=owners, number=router.number)

    def sweep(self, now_s: float) -> None:
        """Forgets routers that have said nothing for a minute."""
        for name, router in list(self._routers.items()):
            if now_s - router.taken_s > KEPT_S:
                del self._routers[name]

    @staticmethod
    def _forget(router: _Router, now_s: float) -> None:
        oldest = router.now(now_s) - KEPT_S
        for name, owner in list(router.owners.items()):
            for second in [second for second in owner.seconds if second <= oldest]:
                del owner.seconds[second]
            if not owner.seconds and not owner.running:
                del router.owners[name]
