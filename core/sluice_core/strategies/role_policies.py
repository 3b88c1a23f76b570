"""Policies of the strategies whose engines differ by role: a placement, and the flow of decodes between roles."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from sluice_core.records import Decision, EngineId, MoveCause, MoveProposal, PrefillRequest, Role
from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.decode_flow import FlowPolicy, FlowRequest
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import EnginePolicy
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.placement_records import PlacementRecord
from sluice_core.scheduling.prefill_placement import LengthAwarePlacement, PlacementPolicy
from sluice_core.strategies.interface import RouterPolicy, Strategy
from sluice_core.strategies.placements import PLACEMENTS
from sluice_core.strategy_parameters import StrategyParameters


class RoleRouter(RouterPolicy):
    """Places by one of ``PLACEMENTS``, and moves decodes between roles.

    Where all chunk sizes are equal there are no roles to move between: only drains and manual moves find a target.

    Args:
        placement: Where prefills run.
        flow: Which decodes move, and where to.
    """

    def __init__(self, placement: PlacementPolicy, flow: FlowPolicy) -> None:
        self._placement = placement
        self._flow = flow

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
    ) -> list[Decision]:
        """See ``PlacementPolicy.assign``."""
        return self._placement.assign(now, waiting, engines)

    def take_records(self, number: int) -> list[PlacementRecord | None]:
        """See ``RouterPolicy.take_records``."""
        if not isinstance(self._placement, LengthAwarePlacement):
            return super().take_records(number)
        newest = list(islice(reversed(self._placement.records), number))
        return [*[None] * (number - len(newest)), *reversed(newest)]

    def take_events(self) -> Sequence[str]:
        """See ``RouterPolicy.take_events``."""
        return self._placement.take_events() if isinstance(self._placement, LengthAwarePlacement) else ()

    def target(self, now: float, request: FlowRequest, engines: EngineTable) -> EngineId | None:
        """See ``RouterPolicy.target``."""
        return self._flow.target(now, request, engines)

    def moves_first_decode(self, source: Role | None, engines: EngineTable) -> bool:
        """See ``RouterPolicy.moves_first_decode``."""
        is_prefill_heavy = self._flow.moves_first_decodes and source is Role.PREFILL_HEAVY
        return is_prefill_heavy and not engines.has_uniform_chunk_size

    def has_decode_engines(self, engines: EngineTable) -> bool:
        """See ``RouterPolicy.has_decode_engines``."""
        return not engines.has_uniform_chunk_size and any(
            state.role is Role.DECODE_HEAVY and not state.is_draining for state in engines.list_loads()
        )

    def is_too_soon(self, cause: MoveCause, tokens_since_move: int | None) -> bool:
        """See ``RouterPolicy.is_too_soon``."""
        return self._flow.is_too_soon(cause, tokens_since_move)


class RoleEngine(ChunkedPrefillPolicy):
    """Batches by chunk size, and proposes the moves of a flow policy.

    Args:
        flow: Which decodes move.
        counts_decodes: See ``ChunkedPrefillPolicy``.
    """

    def __init__(self, flow: FlowPolicy, *, counts_decodes: bool) -> None:
        super().__init__(counts_decodes=counts_decodes)
        self._flow = flow

    def propose(self, now: float, engine: DecodeSet) -> list[MoveProposal]:
        """See ``EnginePolicy.propose``."""
        return self._flow.propose(now, engine)

    def share_for(self, role: Role, cause: MoveCause) -> float:
        """See ``EnginePolicy.share_for``: degraded requests came to relieve another engine, and stay below M here."""
        is_degraded = role is Role.PREFILL_HEAVY and cause is MoveCause.DEGRADE
        return self._flow.parameters.watermark if is_degraded else 1.0

    def observe_chunk_sizes(self, chunk_sizes: Collection[int]) -> None:
        """See ``EnginePolicy.observe_chunk_sizes``: with one chunk size there are no roles to move between."""
        self._flow.has_roles = len(set(chunk_sizes)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRules:
    """Which moves a strategy makes; for the arguments see ``FlowPolicy``."""

    moves_first_decodes: bool = False
    degrades: bool = False
    flows_back: bool = False

    def make_router(
        self, strategy: Strategy, parameters: StrategyParameters, rng: random.Random, num_records: int
    ) -> RouterPolicy:
        """See ``PolicyMaker.make_router``."""
        placement = PLACEMENTS[strategy.placement](parameters, rng, num_records)
        return RoleRouter(placement, self.make_flow(strategy, parameters, rng))

    def make_engine(self, strategy: Strategy, parameters: StrategyParameters, *, counts_decodes: bool) -> EnginePolicy:
        """See ``PolicyMaker.make_engine``."""
        flow = self.make_flow(strategy, parameters, random.Random(0))  # noqa: S311 - engines pick no targets
        return RoleEngine(flow, counts_decodes=counts_decodes)

    def make_flow(self, strategy: Strategy, parameters: StrategyParameters, rng: random.Random) -> FlowPolicy:
        """Make the flow policy of a row or of a variant."""
        has_flow = strategy.has_flow  # a variant without flow moves nothing but what drains
        return FlowPolicy(
            parameters,
            rng,
            moves_first_decodes=self.moves_first_decodes and has_flow,
            degrades=self.degrades and has_flow,
            flows_back=self.flows_back and has_flow,
        )
