"""Strategies: named combinations of placement, batching and flow policies.

Aggregation and disaggregation are slider settings of the same code; their names only switch flow off where a slider
setting cannot say so. ``Strategy.vary`` makes the variants that the papers compare.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from sluice_core.records import FlowParameters
from sluice_core.scheduling.baselines import LeastWorkPlacement, RoundRobinPlacement
from sluice_core.scheduling.batching import BatchPolicy, ChunkedPrefillPolicy
from sluice_core.scheduling.decode_flow import FlowPolicy
from sluice_core.scheduling.placement import NUM_RECORDS, LengthAwarePlacement, PlacementPolicy

PLACEMENTS: dict[str, Callable[[FlowParameters, random.Random, int], PlacementPolicy]] = {
    "length_aware": LengthAwarePlacement,
    "round_robin": RoundRobinPlacement,
    "least_work": LeastWorkPlacement,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A row of ``STRATEGIES``.

    Args:
        name: Lower-case name, as on the command line and in a plan.
        moves_first_decodes: See ``FlowPolicy``.
        degrades: See ``FlowPolicy``.
        flows_back: See ``FlowPolicy``.
        placement: Where prefills run: a key of ``PLACEMENTS``.
    """

    name: str
    moves_first_decodes: bool
    degrades: bool
    flows_back: bool
    placement: str = "length_aware"

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement {self.placement!r} is unknown; known are {', '.join(PLACEMENTS)}")

    def vary(self, *, placement: str | None = None, flows: bool | None = None) -> Strategy:
        """Make a variant, for comparisons (TaiChi, section 4.4: the breakdown of its Figure 18).

        Args:
            placement: Key of ``PLACEMENTS``; None: as it is.
            flows: False: requests decode where their prefill ran; None: as it is.

        Raises:
            ValueError: An unknown placement, or flow switched on that the strategy does not have.
        """
        if flows and not self.moves_first_decodes:
            raise ValueError(f"strategy {self.name!r} has no flow to switch on")
        varied = self if placement is None else replace(self, placement=placement)
        if flows is False:
            varied = replace(varied, moves_first_decodes=False, degrades=False, flows_back=False)
        return varied

    def make_placement(
        self, parameters: FlowParameters, rng: random.Random, *, num_records: int = NUM_RECORDS
    ) -> PlacementPolicy:
        """Make the router's placement policy, which keeps so many decisions for explanations."""
        return PLACEMENTS[self.placement](parameters, rng, num_records)

    def make_batching(self) -> BatchPolicy:
        """Make the engine's batch policy."""
        return ChunkedPrefillPolicy()

    def make_flow(self, parameters: FlowParameters, rng: random.Random) -> FlowPolicy:
        """Make the flow policy, for the engine (``propose``) and the router (``target``) alike."""
        return FlowPolicy(
            parameters,
            rng,
            moves_first_decodes=self.moves_first_decodes,
            degrades=self.degrades,
            flows_back=self.flows_back,
        )


STRATEGIES: dict[str, Strategy] = {
    "taichi": Strategy(name="taichi", moves_first_decodes=True, degrades=True, flows_back=True),
    "aggregated": Strategy(name="aggregated", moves_first_decodes=False, degrades=False, flows_back=False),
    "disaggregated": Strategy(name="disaggregated", moves_first_decodes=True, degrades=False, flows_back=False),
}


def get_strategy(name: str) -> Strategy:
    """Look up a strategy by name, in any case (the manifest writes ``TaiChi``).

    Args:
        name: For example ``taichi``.

    Raises:
        ValueError: Unknown; names the known ones.
    """
    try:
        return STRATEGIES[name.lower()]
    except KeyError:
        raise ValueError(f"strategy {name!r} is unknown; known are {', '.join(STRATEGIES)}") from None
