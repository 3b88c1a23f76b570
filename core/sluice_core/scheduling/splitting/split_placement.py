"""Where the parts of a request run: a pair of engines, and the cut that balances them.

Source: DynaServe, sections 3.1 and 4.1. Where the paper is silent:

- Every other engine is on the side of first parts, the others on the side of second ones, as in its experiments with
  one GPU each. Of each side the engine with the least committed work is taken.
- The pair is tried in both orders. The one that is done sooner is taken, the sides' order where that makes no
  difference: where no cut balances the pair (prompts are not cut, or one part would be too short) this does.
- Parts shorter than ``LEAST_PART_TOKENS`` are left to the other engine.
- Recoveries are not split: they are placed as ``LengthAwarePlacement`` does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from sluice_core.records import Decision, Hold, Leg, PrefillRequest, RequestId
from sluice_core.scheduling.early_rejection import reject_late
from sluice_core.scheduling.engine_state import EngineState, get_view
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.iteration_limits import IterationLimits
from sluice_core.scheduling.placement_records import NUM_RECORDS
from sluice_core.scheduling.prefill_feasibility import AssignPass
from sluice_core.scheduling.prefill_placement import LengthAwarePlacement
from sluice_core.scheduling.splitting.execution_predictor import ExecutionPredictor
from sluice_core.scheduling.splitting.predicted_output_lengths import (
    OutputLengths,
    RunningQuantile,
    predict_output_tokens,
)
from sluice_core.scheduling.splitting.split_search import TOLERANCE_S, ServerClock, Split, search_split
from sluice_core.strategy_parameters import StrategyParameters

LEAST_PART_TOKENS: Final = 16


class _Server(NamedTuple):
    """An engine and its clock."""

    state: EngineState
    clock: ServerClock


class _Plan(NamedTuple):
    """A request on a pair of engines."""

    first: _Server
    second: _Server
    split: Split


class SplitPlacement(LengthAwarePlacement):
    """Splits requests over pairs of engines; see the module. For the arguments see ``LengthAwarePlacement``.

    Args:
        cuts_prompts: Prompts may be cut; None: where both engines of a pair can do their part.
        is_bound_to_sides: The pair is tried in the sides' order alone, for comparisons.
        fixed_token: Where every request is cut, for comparisons (DynaServe, Figure 5); 0: where the search says.

    Attributes:
        lengths: Predicts outputs.
    """

    def __init__(
        self,
        parameters: StrategyParameters,
        rng: random.Random,
        num_records: int = NUM_RECORDS,
        *,
        cuts_prompts: bool | None = None,
        is_bound_to_sides: bool = False,
        fixed_token: int = 0,
    ) -> None:
        super().__init__(parameters, rng, num_records)
        self.lengths: OutputLengths = RunningQuantile()
        self._cuts_prompts = cuts_prompts
        self._is_bound_to_sides = is_bound_to_sides
        self._fixed_token = fixed_token
        self._predictor = ExecutionPredictor(parameters.split_margin_tokens)

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
    ) -> list[Decision]:
        """See ``PlacementPolicy.assign``."""
        requests = list(waiting)
        limit_s = self.parameters.tbt_target_s or min((request.slo.tpot_s for request in requests), default=math.inf)
        if limit_s < math.inf:
            engines.limit_iterations(IterationLimits(limit_s))
        return super().assign(now, requests, engines)

    def note_finished(self, request_id: RequestId, output_tokens: int) -> None:
        """Forget a request that has ended, and learn from it; 0 output tokens: it was given up."""
        self._predictor.forget(request_id)
        if output_tokens:
            self.lengths.observe(output_tokens)

    def _decide(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """See ``LengthAwarePlacement._decide``."""
        self._predictor.forget(request.request_id)  # it was lost, or returned
        return super()._decide(assign_pass, request)

    def _place(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """See ``LengthAwarePlacement._place``."""
        if not assign_pass.list_candidates(request):
            return Hold(request_id=request.request_id, reason=assign_pass.explain_no_candidate())
        sides = self._list_sides(assign_pass, request)
        if sides is None:
            return Hold(request_id=request.request_id, reason="kv")
        # The last token of an output never gets KV.
        kept_tokens = max(1, predict_output_tokens(self.lengths, request, self.parameters.split_margin_tokens) - 1)
        plan = self._plan(sides[0], sides[1], request, kept_tokens)
        first = self._choose_first(plan, request)
        return self._carry_out(assign_pass, request, plan, first, kept_tokens)

    def _list_sides(self, assign_pass: AssignPass, request: PrefillRequest) -> tuple[_Server, _Server] | None:
        """Choose the pair: of each side the engine with the least committed work that has room for the prompt.

        Returns:
            None when no engine has room; one engine twice when it is the only one that has.
        """
        entries = sorted(assign_pass.list_candidates(request), key=lambda entry: entry[2])
        sides: tuple[list[_Server], list[_Server]] = ([], [])
        for position, entry in enumerate(entries):
            if get_view(entry).available_tokens >= request.prompt_tokens:
                state = assign_pass.engines[get_view(entry).engine_id]
                sides[position % 2].append(_Server(state, self._predictor.read_clock(assign_pass.now, state)))
        if not sides[0] and not sides[1]:
            return None
        first = min(sides[0] or sides[1], key=_get_committed_s)
        second = min(sides[1] or sides[0], key=_get_committed_s)
        return first, second

    def _plan(self, one: _Server, other: _Server, request: PrefillRequest, output_tokens: int) -> _Plan:
        """Split a request over a pair, in the better order."""
        plan = self._search(one, other, request, output_tokens)
        if one.state is other.state or self._is_bound_to_sides:
            return plan
        turned = self._search(other, one, request, output_tokens)
        return turned if turned.split.done_s + TOLERANCE_S < plan.split.done_s else plan

    def _search(self, first: _Server, second: _Server, request: PrefillRequest, output_tokens: int) -> _Plan:
        total = request.prompt_tokens + output_tokens
        if self._fixed_token:
            token = min(self._fixed_token, total)
            first_s = first.clock.predict_s(request.prompt_tokens, 0, token)
            return _Plan(
                first, second, Split(token, first_s, second.clock.predict_s(request.prompt_tokens, token, total))
            )
        split = search_split(
            request.prompt_tokens,
            output_tokens,
            first.clock,
            second.clock,
            num_steps=self.parameters.split_search_steps,
            cuts_prompts=self._may_cut_prompt(first.state, second.state, request),
        )
        return _Plan(first, second, split)

    def _may_cut_prompt(self, first: EngineState, second: EngineState, request: PrefillRequest) -> bool:
        if request.is_whole or self._cuts_prompts is not None:
            return bool(self._cuts_prompts) and not request.is_whole
        return first.config.cuts_prompts and second.config.cuts_prompts

    def _choose_first(self, plan: _Plan, request: PrefillRequest) -> _Server:
        """Choose where the request begins: on the second engine when the first part would be too short."""
        is_short = plan.split.token < min(LEAST_PART_TOKENS, request.prompt_tokens)
        return plan.second if is_short else plan.first

    def _carry_out(
        self, assign_pass: AssignPass, request: PrefillRequest, plan: _Plan, first: _Server, output_tokens: int
    ) -> Decision:
        """Place a request, and commit its parts."""
        total = request.prompt_tokens + output_tokens
        token = plan.split.token
        is_split = (
            first is plan.first and plan.first.state is not plan.second.state and total - token >= LEAST_PART_TOKENS
        )
        end = token if is_split else total
        entry = first.state.entry
        assert entry is not None
        view = get_view(entry)
        # Of a prompt that is cut the first engine computes the beginning alone.
        part = replace(request, prompt_tokens=end) if end < request.prompt_tokens else request
        deadline_s = request.arrival_s + request.slo.ttft_s
        done_s = assign_pass.estimate_done_s(part, view)
        is_feasible = done_s < deadline_s
        rejected = None if is_feasible else reject_late(assign_pass, request, [entry], deadline_s)
        if rejected is not None:
            return rejected
        reason = "split" if is_split else "whole"
        place = assign_pass.place(part, entry, reason, is_feasible=is_feasible)
        self._predictor.commit(
            request.request_id,
            first.state,
            starts_at_s=done_s,
            prefill_s=0.0,  # the engine table has it
            decode_tokens=max(0, end - request.prompt_tokens),
        )
        if not is_split:
            return place
        second = plan.second
        self._predictor.commit(
            request.request_id,
            second.state,
            starts_at_s=done_s + max(0, end - request.prompt_tokens) * first.clock.pass_s,
            prefill_s=_estimate_prefill_s(second.clock, end, request.prompt_tokens),
            decode_tokens=total - max(end, request.prompt_tokens),
        )
        route = (Leg(first.state.engine_id, end), Leg(second.state.engine_id, total))
        return replace(place, route=route)


def _get_committed_s(server: _Server) -> tuple[float, int]:
    return server.clock.committed_s, server.state.number


def _estimate_prefill_s(clock: ServerClock, first: int, last: int) -> float:
    """Estimate the prefill work of prompt tokens ``first + 1`` to ``last``."""
    if first >= last:
        return 0.0
    return clock.predict_s(last, first, last) - clock.committed_s
