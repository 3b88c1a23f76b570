"""EcoServe: engines compute prefills or decodes, never both, and take turns in computing prefills.

Source: EcoServe: Enabling Cost-effective LLM Serving with Proactive Intra- and Inter-Instance Orchestration
(arXiv:2504.18154), sections 3.2 to 3.5. The engines are those of ``phase_switch``, the router goes round among
them as ``rolling_activation`` says, and ``macro_instances`` groups them. No KV is transferred, but from engines that
drain.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sluice_core.scheduling.batching.phase_switch import PhaseBatching
from sluice_core.scheduling.decode_flow import FlowPolicy
from sluice_core.scheduling.engine_policy import EnginePolicy
from sluice_core.strategies.interface import Need, RouterPolicy, SliderUse, Strategy
from sluice_core.strategies.placements import PLACEMENTS
from sluice_core.strategies.role_policies import RoleRouter
from sluice_core.strategy_parameters import EARLY_REJECTION, WATERMARK, Parameter, StrategyParameters

MACRO_INSTANCE_LEAST = Parameter(
    name="macro_instance_least",
    field="macro_instance_least",
    low=1,
    high=256,
    unit="engines",
    source="EcoServe, section 4.3.2: N_l",
)
MACRO_INSTANCE_MOST = Parameter(
    name="macro_instance_most",
    field="macro_instance_most",
    low=1,
    high=1024,
    unit="engines",
    source="EcoServe, section 4.3.2: N_u",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EcoServeRules:
    """Makes the policies."""

    def make_router(
        self, strategy: Strategy, parameters: StrategyParameters, rng: random.Random, num_records: int
    ) -> RouterPolicy:
        """See ``PolicyMaker.make_router``."""
        flow = FlowPolicy(parameters, rng, moves_first_decodes=False, degrades=False, flows_back=False)
        return RoleRouter(PLACEMENTS[strategy.placement](parameters, rng, num_records), flow)

    def make_engine(self, strategy: Strategy, parameters: StrategyParameters, *, counts_decodes: bool) -> EnginePolicy:
        """See ``PolicyMaker.make_engine``."""
        del strategy, parameters, counts_decodes  # decodes are never beside prefills
        return PhaseBatching()


ECOSERVE = Strategy(
    name="ecoserve",
    title="EcoServe",
    parameters=(EARLY_REJECTION, MACRO_INSTANCE_LEAST, MACRO_INSTANCE_MOST, WATERMARK),
    sliders=SliderUse(varies_ratio=False, varies_prefill_tokens=False, varies_decode_tokens=False),
    policies=EcoServeRules(),
    needs=frozenset({Need.PHASES}),
    placement="rolling",  # with another one: engines that are prefill-first and nothing else, as its paper's baseline
    has_flow=False,
)
