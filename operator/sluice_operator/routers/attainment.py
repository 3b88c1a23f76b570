"""SLO attainment over five minutes, from the routers' counters, which only grow while a router lives."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_core.slo import ATTAINMENT_WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sluice.v1 import control_pb2

# Counts are kept in steps of this length; shorter ones cost memory without use.
STEP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Requests of one SLO class.

    Args:
        num_finished: Finished, failed and rejected ones; cancelled ones are left out.
        num_met_ttft: Of these, met TTFT.
        num_met_tpot: Of these, met TPOT.
        num_met_both: Of these, met both.
    """

    num_finished: int = 0
    num_met_ttft: int = 0
    num_met_tpot: int = 0
    num_met_both: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            num_finished=self.num_finished + other.num_finished,
            num_met_ttft=self.num_met_ttft + other.num_met_ttft,
            num_met_tpot=self.num_met_tpot + other.num_met_tpot,
            num_met_both=self.num_met_both + other.num_met_both,
        )

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            num_finished=self.num_finished - other.num_finished,
            num_met_ttft=self.num_met_ttft - other.num_met_ttft,
            num_met_tpot=self.num_met_tpot - other.num_met_tpot,
            num_met_both=self.num_met_both - other.num_met_both,
        )


@dataclass(slots=True)
class AttainmentWindow:
    """What the routers of one cluster finished in the last five minutes.

    Mutable; only ``take`` and ``sum_up`` change it. Times are seconds on the operator's monotonic clock.

    Attributes:
        total: What they finished since this began; only grows.
    """

    total: Counts = field(default_factory=Counts)
    _totals: dict[str, dict[str, Counts]] = field(default_factory=dict)
    _steps: deque[tuple[float, dict[str, Counts]]] = field(default_factory=deque)

    def take(self, now: float, status: control_pb2.GetStatusResponse) -> None:
        """Adds what a router finished since its last status.

        The first status of a router is a beginning: when the requests in it finished is not known.
        """
        totals = {
            item.name: Counts(
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
            last = before.get(name, Counts())
            if total != last:
                self._add(now, name, total - last)

    def keep_routers(self, router_ids: Iterable[str]) -> None:
        """Forgets the totals of routers that are gone; what they finished stays until its time is over."""
        kept = set(router_ids)
        self._totals = {router_id: totals for router_id, totals in self._totals.items() if router_id in kept}

    def sum_up(self, now: float) -> dict[str, Counts]:
        """Sums the last five minutes by class; classes without requests are left out."""
        while self._steps and self._steps[0][0] < now - ATTAINMENT_WINDOW_S:
            self._steps.popleft()
        summed: dict[str, Counts] = {}
        for _, counts in self._steps:
            for name, count in counts.items():
                summed[name] = summed.get(name, Counts()) + count
        return summed

    def _add(self, now: float, name: str, count: Counts) -> None:
        if not self._steps or now - self._steps[-1][0] >= STEP_S:
            self._steps.append((now, {}))
        counts = self._steps[-1][1]
        counts[name] = counts.get(name, Counts()) + count
        self.total += count


def format_share(met: int, finished: int) -> str:
    """Writes a share as ``"93.4%"``, rounded down: an objective that is missed never reads as met."""
    tenths = met * 1000 // finished
    return f"{tenths // 10}%" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10}%"
