"""Requests go to the engine that took the last one, until its decodes can wait no longer; then to the next one.

Source: EcoServe (arXiv:2504.18154), section 3.4, Algorithms 1 and 2. Engines that run prefills first
(``phase_switch``) so take turns in it. Where the paper is silent:

- A request that no engine satisfies waits at the router: the decodes save TPOT meanwhile, and end.
- When waiting any longer would miss its TTFT objective even on an idle engine, it goes to the engine that is done with
  it first, whatever decodes have saved, or is refused (``EarlyRejection.REJECT``).
- With several routers each goes round among the engines of its share, and takes others' where it has none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from sluice_core.latency import compute_attention_work, compute_prefill_s
from sluice_core.records import Decision, Hold, PrefillRequest
from sluice_core.scheduling.early_rejection import reject_late
from sluice_core.scheduling.engine_state import EngineState, get_view
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.placement_records import NUM_RECORDS
from sluice_core.scheduling.prefill_feasibility import AssignPass
from sluice_core.scheduling.prefill_placement import LengthAwarePlacement
from sluice_core.scheduling.rolling.macro_instances import MacroInstances
from sluice_core.strategy_parameters import StrategyParameters

SATISFIED = ""
KV = "kv"
SAVED_TPOT = "saved_tpot"


class RollingPlacement(LengthAwarePlacement):
    """See the module; for the arguments see ``LengthAwarePlacement``.

    Attributes:
        macro: The macro instances.
    """

    def __init__(self, parameters: StrategyParameters, rng: random.Random, num_records: int = NUM_RECORDS) -> None:
        super().__init__(parameters, rng, num_records)
        self.macro = MacroInstances(parameters.macro_instance_least, parameters.macro_instance_most)
        # Of requests that no engine has satisfied in this pass. Engines only fill up in it, so that one with as many
        # tokens and as short an objective fares no better.
        self._least_refused_tokens = math.inf
        self._longest_refused_s = -math.inf
        self._token_s = self._work_s = self._iteration_s = 0.0
        self._room_tokens = 0  # 0: not found in this pass

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
    ) -> list[Decision]:
        """See ``PlacementPolicy.assign``."""
        engines.separate_phases(separates=True)
        self._least_refused_tokens, self._longest_refused_s = math.inf, -math.inf
        self._room_tokens = 0
        self.macro.renew(_list_own(engines))
        return super().assign(now, waiting, engines)

    def take_events(self) -> Sequence[str]:
        """See ``RouterPolicy.take_events``: splits and merges of macro instances."""
        return self.macro.take_changes()

    def _place(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """See ``LengthAwarePlacement._place``: Algorithm 1."""
        if request.prompt_tokens < self._least_refused_tokens or request.slo.ttft_s > self._longest_refused_s:
            has_room = False
            for group in self.macro.list_by_load():
                num_engines = len(group.engines)
                for step in range(num_engines):
                    # Lines 2 to 5 for the engine that took the last request, lines 7 and 8 for those that follow it.
                    position = (group.position + step) % num_engines
                    state = group.engines[position]
                    refusal = self._check(assign_pass, request, state)
                    if refusal == SATISFIED:
                        assert state.entry is not None
                        self.macro.note_placement(group, position, request.prompt_tokens)
                        return assign_pass.place(request, state.entry, "feasible", is_feasible=True)
                    has_room = has_room or refusal == SAVED_TPOT
            if not has_room:
                return self._hold_for_kv(assign_pass, request)
            if not request.excluded:
                self._least_refused_tokens = min(self._least_refused_tokens, request.prompt_tokens)
                self._longest_refused_s = max(self._longest_refused_s, request.slo.ttft_s)
        if not self._is_late(assign_pass, request):
            return Hold(request_id=request.request_id, reason="saved_tpot")
        return self._place_late(assign_pass, request)

    def _check(self, assign_pass: AssignPass, request: PrefillRequest, state: EngineState) -> str:
        """Check the constraints of an engine (Algorithm 2).

        Returns:
            ``SATISFIED``, ``KV``, also for an engine that takes no prompt at all, or ``SAVED_TPOT``.
        """
        view = state.view
        if state.entry is None or view is None or state.engine_id in request.excluded:
            return KV
        if view.available_tokens < request.prompt_tokens:  # lines 24 to 26
            return KV
        now, load = assign_pass.now, state.load
        reported_at_s = state.reported_at_s or 0.0
        is_prefilling = load.prefill_phase_s > 0.0
        # Lines 3 to 8: what the phase has taken, what is left of it, and the request.
        left_s = assign_pass.estimate_done_s(request, view) - now
        phase_s = now - reported_at_s + load.prefill_phase_s if is_prefilling else 0.0
        total_s = phase_s + left_s
        if max(total_s, now - request.arrival_s + left_s) > request.slo.ttft_s:  # lines 9 and 10
            return SAVED_TPOT
        # Lines 12 to 23: of what decodes had saved, time has used up a part since the report.
        saved_tpot_s = load.saved_tpot_s - (now - reported_at_s)
        return SAVED_TPOT if saved_tpot_s < total_s else SATISFIED

    def _is_late(self, assign_pass: AssignPass, request: PrefillRequest) -> bool:
        """Say whether a request would miss its TTFT objective if it waited any longer, on an engine without a queue.

        That is the best of all engines in each of what a prefill costs: O(1) but for the first request of a pass.
        """
        if request.slo.ttft_s == math.inf:
            return False
        if self._room_tokens == 0:
            self._find_best_costs(assign_pass.engines)
        tokens = request.prompt_tokens
        execute_s = compute_prefill_s(
            per_token_s=self._token_s,
            per_work_s=self._work_s,
            per_iteration_s=self._iteration_s,
            tokens=tokens,
            attention_work=compute_attention_work(tokens, 0),
            room_tokens=max(1, self._room_tokens),
        )
        return assign_pass.now + execute_s >= request.arrival_s + request.slo.ttft_s

    def _find_best_costs(self, engines: EngineTable) -> None:
        """Find the least costs of prefills, and the largest room of an iteration, of engines that take prompts."""
        views = [view for view in map(get_view, engines.order) if view.room_tokens > 0]
        self._token_s = min([view.per_token_s for view in views], default=0.0)
        self._work_s = min([view.per_work_s for view in views], default=0.0)
        self._iteration_s = min([view.per_iteration_s for view in views], default=0.0)
        self._room_tokens = max([view.room_tokens for view in views], default=0)

    def _place_late(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """Place a request that no engine satisfies, and that can wait no longer."""
        candidates = assign_pass.list_candidates(request)
        if not candidates:
            return Hold(request_id=request.request_id, reason=assign_pass.explain_no_candidate())
        rejected = reject_late(assign_pass, request, candidates, request.arrival_s + request.slo.ttft_s)
        if rejected is not None:
            return rejected
        least_late = assign_pass.find_least_late(request, candidates)
        if least_late < 0:
            return Hold(request_id=request.request_id, reason="kv")
        return assign_pass.place(request, candidates[least_late], "least_late", is_feasible=False)

    def _hold_for_kv(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """Hold a request for which no engine has KV left, or none takes prompts."""
        has_candidates = bool(assign_pass.list_candidates(request))
        return Hold(
            request_id=request.request_id, reason="kv" if has_candidates else assign_pass.explain_no_candidate()
        )


def _list_own(engines: EngineTable) -> list[EngineState]:
    """List the engines of this router's share that take prompts, in the order in which they came; all, if none is."""
    members = [state for state in engines if not state.is_draining and state.reported_at_s is not None]
    own = [state for state in members if not state.load.is_of_others]
    return own or members
