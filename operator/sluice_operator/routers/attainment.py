"""SLO attainment over five minutes, from the routers' counters, which only grow while a router lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_core.slo_attainment import NO_REQUESTS, SloCounts, SloWindow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sluice.v1 import control_pb2


@dataclass(slots=True)
class AttainmentWindow:
    """What the routers of one cluster finished in the last five minutes.

    Mutable; only ``take`` and ``sum_up`` change it. Times are seconds on the operator's monotonic clock.

    Attributes:
        total: What they finished since this began; only grows.
    """

    total: SloCounts = field(default_factory=SloCounts)
    _totals: dict[str, dict[str, SloCounts]] = field(default_factory=dict)
    _window: SloWindow = field(default_factory=SloWindow)

    def take(self, now: float, status: control_pb2.GetStatusResponse) -> None:
        """Adds what a router finished since its last status.

        The first status of a router is a beginning: when the requests in it finished is not known.
        """
        totals = {
            item.name: SloCounts(
                num_finished=item.num_finished,
                num_met_ttft=item.num_met_ttft,
                num_met_tpot=item.num_met_tpot,
                num_met_both=item.num_met_both,
            )
            for item in status.classes
        }
        before = self._totals.get(status.router_id)
        self._totals[status.router_id] = totals
        if before is None:
            return
        for name, total in totals.items():
            last = before.get(name, NO_REQUESTS)
            if total != last:
                self._add(now, name, total - last)

    def keep_routers(self, router_ids: Iterable[str]) -> None:
        """Forgets the totals of routers that are gone; what they finished stays until its time is over."""
        kept = set(router_ids)
        self._totals = {router_id: totals for router_id, totals in self._totals.items() if router_id in kept}

    def sum_up(self, now: float) -> dict[str, SloCounts]:
        """Sums the last five minutes by class; classes without requests are left out."""
        return self._window.sum_by_class(now)

    def _add(self, now: float, name: str, count: SloCounts) -> None:
        self._window.add(now, name, count)
        self.total += count


def format_share(met: int, finished: int) -> str:
    """Writes a share as ``"93.4%"``, rounded down: an objective that is missed never reads as met."""
    tenths = met * 1000 // finished
    return f"{tenths // 10}%" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10}%"
