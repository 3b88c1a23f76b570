"""Sluice: iterations as long as decodes can spare, late binding and order by deadline, packed decodes, no roles."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from sluice_core.latency import LatencyModel
from sluice_core.records import Decision, EngineId, MoveCause, PrefillRequest, RequestId
from sluice_core.scheduling.batching.tpot_slack import SlackBatching
from sluice_core.scheduling.decode_flow import FlowPolicy, FlowRequest
from sluice_core.scheduling.engine_policy import EnginePolicy, PrefillSelector
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.iteration_limits import IterationLimits
from sluice_core.scheduling.prefill_order.deadline_selection import DeadlineSelector
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor
from sluice_core.scheduling.slack.slack_placement import SlackPlacement
from sluice_core.scheduling.waiting_order import Urgency, compute_urgency
from sluice_core.strategies.interface import RouterPolicy, SliderUse, Strategy
from sluice_core.strategies.role_policies import RoleRouter
from sluice_core.strategy_parameters import (
    EARLY_REJECTION,
    WATERMARK,
    OverloadOrder,
    Parameter,
    PrefillOrder,
    StrategyParameters,
)

TPOT_SHARE = Parameter(name="tpot_share_percent", field="tpot_share", low=50, high=100, unit="percent")
LEAST_PREFILL = Parameter(name="least_prefill_percent", field="least_prefill_share", low=0, high=100, unit="percent")
LATE_TTFT_FACTOR = Parameter(
    name="late_ttft_factor_percent", field="late_ttft_factor", low=100, high=400, unit="percent"
)
LATE_SHARE = Parameter(name="late_share_percent", field="late_share", low=0, high=100, unit="percent")
OVERLOAD_ORDER = Parameter(
    name="overload_order", field="overload_order", words=OverloadOrder, source="Moore, Management Science 15(1), 1968"
)
PACK_SHARE = Parameter(name="pack_share_percent", field="pack_share", low=0, high=100, unit="percent")
CREDIT = Parameter(name="credit_milliseconds", field="credit_s", low=0, high=10_000, unit="milliseconds")


class SlackRouter(RoleRouter):
    """Places by ``SlackPlacement``, and packs decodes; only drains and manual moves are those of a flow policy.

    Args:
        placement: Where prefills run.
        flow: Where drains and manual moves go.
    """

    def __init__(self, placement: SlackPlacement, flow: FlowPolicy) -> None:
        super().__init__(placement, flow)
        self._slack_placement = placement
        self._packing = placement.packing

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
    ) -> list[Decision]:
        """See ``RouterPolicy.assign``."""
        requests = list(waiting)
        tpot_slo_s = min((request.slo.tpot_s for request in requests), default=math.inf)
        if tpot_slo_s < math.inf:
            parameters = self._slack_placement.parameters
            limits = IterationLimits(
                iteration_s=parameters.tpot_share * tpot_slo_s,
                least_prefill_s=parameters.least_prefill_share * tpot_slo_s,
                decodes_s=parameters.decode_share * tpot_slo_s if parameters.decode_share else math.inf,
                alone_tokens=parameters.alone_tokens,
            )
            usual = self._slack_placement.usual
            engines.limit_iterations(limits, prefill_per_decode=usual.prompt_tokens / usual.output_tokens)
        return super().assign(now, requests, engines)

    def note_finished(self, request_id: RequestId, output_tokens: int) -> None:  # noqa: ARG002 - see the base
        """See ``RouterPolicy.note_finished``."""
        self._slack_placement.usual.note_finished(output_tokens)

    def compute_urgency(
        self,
        now: float,
        *,
        is_recovery: bool,
        next_token_due_s: float,
        priority: int,
        arrival_s: float,
        ttft_slo_s: float,
        prompt_tokens: int,
    ) -> Urgency:
        """See ``RouterPolicy.compute_urgency``: by deadline."""
        if is_recovery:
            return compute_urgency(
                is_recovery=True, next_token_due_s=next_token_due_s, priority=priority, arrival_s=arrival_s
            )
        return self._slack_placement.waiting_order.compute_urgency(
            now, arrival_s=arrival_s, ttft_slo_s=ttft_slo_s, prompt_tokens=prompt_tokens, priority=priority
        )

    def target(self, now: float, request: FlowRequest, engines: EngineTable) -> EngineId | None:
        """See ``RouterPolicy.target``."""
        if request.cause is MoveCause.PREFILL_DONE:
            return self._packing.target(request, engines)
        return super().target(now, request, engines)


class SlackEngine(SlackBatching):
    """Batches by slack, and computes prompts by deadline, those last that will be late.

    Args:
        parameters: Of the strategy.
        counts_decodes: See ``ChunkedPrefillPolicy``.
    """

    def __init__(self, parameters: StrategyParameters, *, counts_decodes: bool) -> None:
        super().__init__(parameters, counts_decodes=counts_decodes)
        self._selects_by_slack = parameters.selects_by_slack

    def make_selector(self, latency: LatencyModel) -> PrefillSelector | None:
        """See ``EnginePolicy.make_selector``."""
        if not self._selects_by_slack:
            return None
        self._prompts = DeadlineSelector(PrefillPredictor(latency), PrefillOrder.S_EDF)
        return self._prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class SluiceRules:
    """Makes the policies."""

    def make_router(
        self, strategy: Strategy, parameters: StrategyParameters, rng: random.Random, num_records: int
    ) -> RouterPolicy:
        """See ``PolicyMaker.make_router``."""
        del strategy
        flow = FlowPolicy(parameters, rng, moves_first_decodes=False, degrades=False, flows_back=False)
        return SlackRouter(SlackPlacement(parameters, rng, num_records), flow)

    def make_engine(self, strategy: Strategy, parameters: StrategyParameters, *, counts_decodes: bool) -> EnginePolicy:
        """See ``PolicyMaker.make_engine``."""
        del strategy
        return SlackEngine(parameters, counts_decodes=counts_decodes)


SLUICE = Strategy(
    name="sluice",
    title="Sluice",
    parameters=(
        CREDIT,
        EARLY_REJECTION,
        LATE_SHARE,
        LATE_TTFT_FACTOR,
        LEAST_PREFILL,
        OVERLOAD_ORDER,
        PACK_SHARE,
        TPOT_SHARE,
        WATERMARK,
    ),
    sliders=SliderUse(varies_ratio=False, varies_prefill_tokens=False, varies_decode_tokens=False),
    policies=SluiceRules(),
    has_flow=False,
)
