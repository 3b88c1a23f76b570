"""Disaggregation: prefills on P-heavy engines only, decodes on D-heavy ones only.

Source: DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model Serving
(arXiv:2401.09670), section 4.3. Prompts go first come, first served to the prefill engine with the shortest queue. It
batches whole prompts until they saturate the GPU. A finished prefill ends there and its KV stays, until the decode
engine with the least KV in use has room and pulls it. The wait has an end, ``StrategyParameters.grant_wait_s``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sluice_core.records import Role
from sluice_core.scheduling.decode_flow import FlowPolicy
from sluice_core.scheduling.engine_policy import BatchLimits, EngineBatch, EnginePolicy
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.strategies.interface import RouterPolicy, SliderUse, Strategy
from sluice_core.strategies.placements import PLACEMENTS
from sluice_core.strategies.role_policies import FlowRules, RoleEngine, RoleRouter
from sluice_core.strategy_parameters import EARLY_REJECTION, WATERMARK, Parameter, StrategyParameters

PREFILL_BATCH_TOKENS = Parameter(
    name="prefill_batch_tokens",
    field="prefill_batch_tokens",
    low=0,
    high=1_048_576,
    unit="tokens",
    source="DistServe, section 4.3: L_m; the value: FlowPrefill, section 6.1",
)
# Engines keep handed-off KV for 30 s at most, and a pull may take 2 s to begin.
GRANT_WAIT_MILLISECONDS = Parameter(
    name="grant_wait_milliseconds", field="grant_wait_s", low=1, high=25_000, unit="milliseconds"
)


class DisaggregatedEngine(RoleEngine):
    """Batches whole prompts until they saturate the GPU.

    Args:
        flow: Which decodes move.
        prefill_batch_tokens: See ``StrategyParameters``.
        counts_decodes: See ``ChunkedPrefillPolicy``.
    """

    def __init__(self, flow: FlowPolicy, prefill_batch_tokens: int, *, counts_decodes: bool) -> None:
        super().__init__(flow, counts_decodes=counts_decodes)
        self._prefill_batch_tokens = prefill_batch_tokens

    def limits(self, now: float, engine: EngineBatch) -> BatchLimits:
        """See ``EnginePolicy.limits``."""
        limits = super().limits(now, engine)
        limits.saturation_tokens = self._prefill_batch_tokens
        return limits

    def hands_off_prefills(self, role: Role) -> bool:
        """See ``EnginePolicy.hands_off_prefills``."""
        return self._flow.has_roles and self._flow.moves_first_decodes and role is Role.PREFILL_HEAVY


class DisaggregatedRouter(RoleRouter):
    """Asks for no move of a finished prefill itself: its engine hands it off.

    For the arguments see ``RoleRouter``.
    """

    def moves_first_decode(self, source: Role | None, engines: EngineTable) -> bool:  # noqa: ARG002 - the base's
        """See ``RouterPolicy.moves_first_decode``."""
        return False

    def get_grant_wait_s(self) -> float:
        """See ``RouterPolicy.get_grant_wait_s``."""
        return self._flow.parameters.grant_wait_s


_RULES = FlowRules(moves_first_decodes=True)


@dataclass(frozen=True, slots=True)
class DisaggregatedPolicies:
    """Makes the policies; see ``PolicyMaker``."""

    def make_router(
        self, strategy: Strategy, parameters: StrategyParameters, rng: random.Random, num_records: int
    ) -> RouterPolicy:
        """See ``PolicyMaker.make_router``."""
        placement = PLACEMENTS[strategy.placement](parameters, rng, num_records)
        return DisaggregatedRouter(placement, _RULES.make_flow(strategy, parameters, rng))

    def make_engine(self, strategy: Strategy, parameters: StrategyParameters, *, counts_decodes: bool) -> EnginePolicy:
        """See ``PolicyMaker.make_engine``."""
        flow = _RULES.make_flow(strategy, parameters, random.Random(0))  # noqa: S311 - engines pick no targets
        return DisaggregatedEngine(flow, parameters.prefill_batch_tokens, counts_decodes=counts_decodes)


DISAGGREGATED = Strategy(
    name="disaggregated",
    title="Disaggregated",
    parameters=(EARLY_REJECTION, GRANT_WAIT_MILLISECONDS, PREFILL_BATCH_TOKENS, WATERMARK),
    sliders=SliderUse(varies_ratio=True, varies_prefill_tokens=False, varies_decode_tokens=False, decode_tokens=0),
    policies=DisaggregatedPolicies(),
    placement="shortest_queue",
)
