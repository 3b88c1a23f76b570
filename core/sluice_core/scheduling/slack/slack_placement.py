"""Where prefills run and decodes go when engines size their iterations by slack: nothing here knows roles.

A prefill goes to the engine that is done with it first. Engines with few decodes have room for more prefill tokens
(``EngineTable.limit_iterations``), so they draw prefills. An engine gets no more than ``credit_s`` of work ahead: what
comes later waits at the router, where the earliest deadline goes first and an engine is chosen when there is one.

A decode goes to the fullest engine on which an iteration of decodes alone stays within ``pack_share`` of its TPOT
objective: the others keep their time for prefills.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from sluice_core.records import (
    Decision,
    EngineId,
    Hold,
    IterationShape,
    PrefillRequest,
    StrategyParameters,
)
from sluice_core.scheduling.batching import PRIORITY_HEAD_START_S
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.early_rejection import reject_late
from sluice_core.scheduling.engine_state import EngineState, Entry, get_view
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.placement_records import NUM_RECORDS
from sluice_core.scheduling.prefill_feasibility import AssignPass
from sluice_core.scheduling.prefill_placement import LengthAwarePlacement
from sluice_core.scheduling.waiting_order import Urgency, get_urgency


class SlackPlacement(LengthAwarePlacement):
    """Places each prefill where it is done first, the earliest deadline first; see the module."""

    def __init__(self, parameters: StrategyParameters, rng: random.Random, num_records: int = NUM_RECORDS) -> None:
        super().__init__(parameters, rng, num_records)
        # Of the fastest engine at the last pass: seconds per token, and per squared token for attention.
        self._token_s = 0.0
        self._square_s = 0.0

    def order(self, now: float, waiting: list[PrefillRequest], engines: EngineTable) -> list[PrefillRequest]:
        """See ``LengthAwarePlacement.order``: by deadline, what cannot meet its own behind the others."""
        if len(waiting) > 1:
            self._token_s = min((entry[4] for entry in engines.order), default=0.0)
            self._square_s = min((entry[5] for entry in engines.order), default=0.0)
            waiting.sort(key=lambda request: self._get_urgency(now, request))
        return waiting

    def _place(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """See ``LengthAwarePlacement._place``."""
        candidates = assign_pass.list_candidates(request)
        if not candidates:
            return Hold(request_id=request.request_id, reason=assign_pass.explain_no_candidate())
        entry = self._find_first_done(assign_pass, request, candidates)
        if entry is None:
            return Hold(request_id=request.request_id, reason="kv")
        done_s = assign_pass.estimate_done_s(request, get_view(entry))
        deadline_s = request.arrival_s + request.slo.ttft_s
        is_feasible = done_s < deadline_s
        rejected = None if is_feasible else reject_late(assign_pass, request, candidates, deadline_s)
        if rejected is not None:
            return rejected
        free_at_s = entry[3]
        if self.parameters.credit_s and free_at_s - assign_pass.now > self.parameters.credit_s:
            return Hold(request_id=request.request_id, reason="late_binding")
        return assign_pass.place(request, entry, "feasible" if is_feasible else "least_late", is_feasible=is_feasible)

    def _find_first_done(
        self, assign_pass: AssignPass, request: PrefillRequest, candidates: Sequence[Entry]
    ) -> Entry | None:
        """Find where a prompt is done first; None: nothing has the KV blocks.

        An engine of another router's share counts as a credit later. Else routers that see the same idle engine would
        all give it their credit before a report can say so.
        """
        best: Entry | None = None
        least_s = math.inf
        for entry in candidates:
            view = get_view(entry)
            if view.available_tokens < request.prompt_tokens:
                continue
            done_s = assign_pass.estimate_done_s(request, view)
            if view.is_of_others:
                done_s += self.parameters.credit_s
            if best is None or done_s < least_s:
                best, least_s = entry, done_s
        return best

    def compute_due_s(self, now: float, arrival_s: float, ttft_slo_s: float, prompt_tokens: int) -> float:
        """Compute the deadline by which a prompt is served.

        One that would miss its objective on an idle engine goes behind, as if the objective were ``late_ttft_factor``
        times as long. From that second deadline on it stands before all that came later, so its wait stays bounded.

        Args:
            now: Seconds on the caller's clock.
            arrival_s: Arrival at the router, on the same clock.
            ttft_slo_s: TTFT objective, in seconds.
            prompt_tokens: Tokens to compute.
        """
        due_s = arrival_s + ttft_slo_s
        if now + prompt_tokens * (self._token_s + self._square_s * prompt_tokens) > due_s:
            return arrival_s + self.parameters.late_ttft_factor * ttft_slo_s
        return due_s

    def _get_urgency(self, now: float, request: PrefillRequest) -> Urgency:
        if request.is_recovery:
            return get_urgency(request)
        due_s = self.compute_due_s(now, request.arrival_s, request.slo.ttft_s, request.prompt_tokens)
        return get_urgency(request)[0], due_s - request.priority * PRIORITY_HEAD_START_S, request.arrival_s


class DecodePacking:
    """Picks the engine of a decode; see the module.

    Args:
        parameters: Of the strategy.
    """

    def __init__(self, parameters: StrategyParameters) -> None:
        self._share = parameters.pack_share
        self._watermark = parameters.watermark

    def target(self, request: FlowRequest, engines: EngineTable) -> EngineId | None:
        """Pick the fullest engine that still meets the objective.

        Args:
            request: A request whose prefill has ended.
            engines: The engines.

        Returns:
            The target; None: it stays where it is.
        """
        source = engines.peek(request.source)
        if source is None or self._share <= 0.0 or request.tpot_slo_s == math.inf:
            return None
        limit_s = self._share * request.tpot_slo_s
        best, most_s = None, _estimate_decodes_s(source, 0, 0)
        if most_s > limit_s:
            most_s = 0.0  # any engine within the limit is better
        for state in engines.list_loads():
            if state is source or not self._has_room(state, request):
                continue
            fullness_s = _estimate_decodes_s(state, 0, 0)
            if fullness_s > most_s:
                tokens = request.num_blocks * state.config.block_size_tokens
                if _estimate_decodes_s(state, 1, tokens) <= limit_s:
                    best, most_s = state.engine_id, fullness_s
        return best

    def _has_room(self, state: EngineState, request: FlowRequest) -> bool:
        return (
            not state.is_draining
            and state.engine_id not in request.excluded
            and state.committed_kv_blocks + request.num_blocks <= self._watermark * state.load.kv_blocks_total
            and state.num_committed_seqs + 1 <= self._watermark * state.config.max_num_seqs
        )


def _estimate_decodes_s(state: EngineState, num_more: int, more_tokens: int) -> float:
    """Estimate an iteration of an engine's decodes alone, with some more, in seconds."""
    return state.latency.estimate_shape_s(
        IterationShape(
            num_decodes=state.num_committed_seqs + num_more,
            decode_context_tokens=state.load.decode_context_tokens + more_tokens,
        )
    )
