"""What became of requests, by the engine on which they ended, from the routers' counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from sluice.v1 import control_pb2

# Stands for all engines together.
ALL_ENGINES = ""


class Outcomes(NamedTuple):
    """Requests that ended, those that met both objectives, and those that failed."""

    num_ended: int = 0
    num_met: int = 0
    num_failed: int = 0

    def plus(self, other: Outcomes) -> Outcomes:
        """Adds two."""
        return Outcomes(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: Outcomes) -> Outcomes:
        """Subtracts an earlier count of the same."""
        return Outcomes(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(slots=True)
class EngineOutcomes:
    """Counts that only grow while this process lives.

    Mutable; only ``take`` and ``keep`` change it.
    """

    _last: dict[str, dict[str, Outcomes]] = field(default_factory=dict)
    _totals: dict[str, Outcomes] = field(default_factory=dict)

    def take(self, status: control_pb2.GetStatusResponse) -> None:
        """Adds what ended at a router since its last status; its first one is a beginning."""
        present = {
            engine.engine_id: Outcomes(engine.num_ended, engine.num_met_both, engine.num_failed)
            for engine in status.engines
            if engine.engine_id
        }
        classes = status.classes
        present[ALL_ENGINES] = Outcomes(
            sum(item.num_finished for item in classes), sum(item.num_met_both for item in classes), status.num_failed
        )
        last = self._last.get(status.router_id)
        self._last[status.router_id] = present
        if last is None:
            return
        for engine_id, counts in present.items():
            before = last.get(engine_id, Outcomes())
            # A stream that began anew counts from nothing.
            grown = counts.minus(before) if counts.num_ended >= before.num_ended else counts
            if grown != Outcomes():
                self._totals[engine_id] = self.total(engine_id).plus(grown)

    def keep(self, engine_ids: Collection[str], router_ids: Collection[str]) -> None:
        """Forgets engines and routers that are gone."""
        self._last = {router_id: last for router_id, last in self._last.items() if router_id in router_ids}
        kept = {*engine_ids, ALL_ENGINES}
        self._totals = {engine_id: counts for engine_id, counts in self._totals.items() if engine_id in kept}

    def total(self, engine_id: str = ALL_ENGINES) -> Outcomes:
        """What ended on one engine, or on all of them."""
        return self._totals.get(engine_id, Outcomes())
