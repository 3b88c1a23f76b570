"""FlowPrefill: the prefill with the earliest deadline that can still be met goes first, and preempts what runs.

Source: *FlowPrefill: Decoupling Preemption from Prefill Scheduling Granularity to Mitigate Head-of-Line Blocking in LLM
Serving* (arXiv:2602.16603), section 5.2; ``scheduling.prefill_order`` has its algorithms.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sluice_core.latency import LatencyModel
from sluice_core.scheduling.decode_flow import FlowPolicy
from sluice_core.scheduling.engine_policy import EnginePolicy, PrefillSelector
from sluice_core.scheduling.prefill_order.deadline_selection import DeadlineSelector
from sluice_core.scheduling.prefill_order.event_driven_selection import EventDrivenSelector
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor
from sluice_core.strategies.interface import RouterPolicy, SliderUse, Strategy
from sluice_core.strategies.placements import PLACEMENTS
from sluice_core.strategies.role_policies import RoleEngine, RoleRouter
from sluice_core.strategy_parameters import EARLY_REJECTION, WATERMARK, Parameter, PrefillOrder, StrategyParameters

BATCH_TOKEN_BUDGET = Parameter(
    name="batch_token_budget",
    field="batch_token_budget",
    low=16,
    high=1_048_576,
    unit="tokens",
    source="FlowPrefill, section 6.3",
)


class FlowPrefillEngine(RoleEngine):
    """Selects prefills as ``EventDrivenSelector`` does; decodes go to D-heavy engines as under disaggregation.

    Args:
        flow: Which decodes move.
        batch_token_budget: G of Algorithm 1.
        order: The order of prompts.
        counts_decodes: See ``ChunkedPrefillPolicy``.
    """

    def __init__(self, flow: FlowPolicy, *, batch_token_budget: int, order: PrefillOrder, counts_decodes: bool) -> None:
        super().__init__(flow, counts_decodes=counts_decodes)
        self._batch_token_budget = batch_token_budget
        self._order = order

    def make_selector(self, latency: LatencyModel) -> PrefillSelector | None:
        """See ``EnginePolicy.make_selector``."""
        predictor = PrefillPredictor(latency)
        if self._order is PrefillOrder.CHUNKED_EDF:
            return DeadlineSelector(predictor, self._order)
        return EventDrivenSelector(predictor, self._batch_token_budget, self._order)


@dataclass(frozen=True, slots=True)
class FlowPrefillRules:
    """Makes the policies."""

    def make_router(
        self, strategy: Strategy, parameters: StrategyParameters, rng: random.Random, num_records: int
    ) -> RouterPolicy:
        """See ``PolicyMaker.make_router``."""
        placement = PLACEMENTS[strategy.placement](parameters, rng, num_records)
        return RoleRouter(placement, _make_flow(strategy, parameters, rng))

    def make_engine(self, strategy: Strategy, parameters: StrategyParameters, *, counts_decodes: bool) -> EnginePolicy:
        """See ``PolicyMaker.make_engine``."""
        return FlowPrefillEngine(
            _make_flow(strategy, parameters, random.Random(0)),  # noqa: S311 - engines pick no targets
            batch_token_budget=parameters.batch_token_budget,
            order=parameters.prefill_order,
            counts_decodes=counts_decodes,
        )


def _make_flow(strategy: Strategy, parameters: StrategyParameters, rng: random.Random) -> FlowPolicy:
    return FlowPolicy(parameters, rng, moves_first_decodes=strategy.has_flow, degrades=False, flows_back=False)


FLOWPREFILL = Strategy(
    name="flowprefill",
    title="FlowPrefill",
    parameters=(BATCH_TOKEN_BUDGET, EARLY_REJECTION, WATERMARK),
    sliders=SliderUse(varies_ratio=True, varies_prefill_tokens=True, varies_decode_tokens=True),
    policies=FlowPrefillRules(),
    # Engines choose among all that came to them. A router that held prompts until the queue fits into the KV cache
    # would let urgent ones wait behind those that are late.
    placement="shortest_queue",
)
