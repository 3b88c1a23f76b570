"""Strategies: named combinations of placement, batching and flow policies.

Aggregation and disaggregation are slider settings of the same code; their names only switch flow off where a slider
setting cannot say so.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sluice_core.batching import BatchPolicy, ChunkedPrefillPolicy
from sluice_core.flowing import FlowPolicy
from sluice_core.placement import LengthAwarePlacement, PlacementPolicy
from sluice_core.records import FlowParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A row of ``STRATEGIES``.

    Args:
        name: Lower-case name, as on the command line and in a plan.
        moves_first_decodes: See ``FlowPolicy``.
        degrades: See ``FlowPolicy``.
        flows_back: See ``FlowPolicy``.
    """

    name: str
    moves_first_decodes: bool
    degrades: bool
    flows_back: bool

    def make_placement(self, parameters: FlowParameters, rng: random.Random) -> PlacementPolicy:
        """Make the router's placement policy."""
        return LengthAwarePlacement(parameters, rng)

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
