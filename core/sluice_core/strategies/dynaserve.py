"""DynaServe: requests in two parts, cut where two engines are done at the same time.

Source: DynaServe: Unified and Elastic Execution for Dynamic Disaggregated LLM Serving (arXiv:2504.09285), sections 3
and 4. The router cuts (``split_placement``), engines batch (``tbt_target``). All engines are alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sluice_core.records import EngineId, MoveCause, RequestId
from sluice_core.scheduling.batching.tbt_target import SloBatching
from sluice_core.scheduling.decode_flow import FlowPolicy, FlowRequest
from sluice_core.scheduling.engine_policy import EnginePolicy
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.splitting.predicted_output_lengths import OutputLengths
from sluice_core.scheduling.splitting.split_placement import SplitPlacement
from sluice_core.strategies.interface import Need, RouterPolicy, SliderUse, Strategy
from sluice_core.strategies.role_policies import RoleRouter
from sluice_core.strategy_parameters import EARLY_REJECTION, WATERMARK, Parameter, StrategyParameters

SPLIT_SEARCH_STEPS = Parameter(
    name="split_search_steps",
    field="split_search_steps",
    low=1,
    high=16,
    unit="steps",
    source="DynaServe, section 4.1: K",
)
SPLIT_MARGIN_TOKENS = Parameter(
    name="split_margin_tokens",
    field="split_margin_tokens",
    low=0,
    high=65_536,
    unit="tokens",
    source="DynaServe, section 5",
)
TBT_TARGET_MILLISECONDS = Parameter(
    name="tbt_target_milliseconds", field="tbt_target_s", low=0, high=60_000, unit="milliseconds"
)


class DynaServeRouter(RoleRouter):
    """Places parts of requests; the second part goes where it was planned to, once the first one ends.

    Args:
        placement: Where parts run.
        flow: Where drains and manual moves go.
    """

    def __init__(self, placement: SplitPlacement, flow: FlowPolicy) -> None:
        super().__init__(placement, flow)
        self._split_placement = placement

    def target(self, now: float, request: FlowRequest, engines: EngineTable) -> EngineId | None:
        """See ``RouterPolicy.target``."""
        if request.cause is not MoveCause.SPLIT:
            return super().target(now, request, engines)
        planned = None if request.planned_target is None else engines.peek(request.planned_target)
        if planned is None or planned.engine_id == request.source or planned.engine_id in request.excluded:
            return None
        has_room = (
            not planned.is_draining
            and planned.committed_kv_blocks + request.num_blocks <= planned.load.kv_blocks_total
            and planned.num_committed_seqs + 1 <= planned.config.max_num_seqs
        )
        return planned.engine_id if has_room else None

    def use_lengths(self, lengths: OutputLengths) -> None:
        """See ``RouterPolicy.use_lengths``."""
        self._split_placement.lengths = lengths

    def note_finished(self, request_id: RequestId, output_tokens: int) -> None:
        """See ``RouterPolicy.note_finished``."""
        self._split_placement.note_finished(request_id, output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynaServeRules:
    """Makes the policies.

    Args:
        cuts_prompts: Prompts may be cut too; None: where both engines of a pair can do their part.
        is_bound_to_sides: See ``SplitPlacement``.
        fixed_token: See ``SplitPlacement``.
    """

    cuts_prompts: bool | None = None
    is_bound_to_sides: bool = False
    fixed_token: int = 0

    def make_router(
        self, strategy: Strategy, parameters: StrategyParameters, rng: random.Random, num_records: int
    ) -> RouterPolicy:
        """See ``PolicyMaker.make_router``."""
        del strategy
        flow = FlowPolicy(parameters, rng, moves_first_decodes=False, degrades=False, flows_back=False)
        placement = SplitPlacement(
            parameters,
            rng,
            num_records,
            cuts_prompts=self.cuts_prompts,
            is_bound_to_sides=self.is_bound_to_sides,
            fixed_token=self.fixed_token,
        )
        return DynaServeRouter(placement, flow)

    def make_engine(self, strategy: Strategy, parameters: StrategyParameters, *, counts_decodes: bool) -> EnginePolicy:
        """See ``PolicyMaker.make_engine``."""
        del strategy
        return SloBatching(parameters, counts_decodes=counts_decodes)


DYNASERVE = Strategy(
    name="dynaserve",
    title="DynaServe",
    parameters=(EARLY_REJECTION, SPLIT_MARGIN_TOKENS, SPLIT_SEARCH_STEPS, TBT_TARGET_MILLISECONDS, WATERMARK),
    sliders=SliderUse(varies_ratio=False, varies_prefill_tokens=False, varies_decode_tokens=False),
    policies=DynaServeRules(),
    needs=frozenset({Need.SPLIT}),
    has_flow=False,
)
