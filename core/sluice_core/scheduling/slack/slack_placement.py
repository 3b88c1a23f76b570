"""Where prefills run when engines size their iterations by slack: nothing here knows roles.

A prefill goes to the engine that is done with it first. Engines with few decodes have room for more prefill tokens
(``EngineTable.limit_iterations``), so they draw prefills. An engine gets no more than ``credit_s`` of work ahead: what
comes later waits at the router, where the earliest deadline goes first and an engine is chosen when there is one.

Queued prompts of a longer objective are no work ahead where they are due later: the engine computes by deadline too.
Those of the same objective are. Else every prompt that has waited would pass them, and nothing would wait any more.

A prompt leaves some seats and KV blocks free for those of shorter objectives. It can wait for the next that get free;
where engines are full of long answers, an urgent one cannot.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from sluice_core.records import Decision, Hold, PrefillRequest
from sluice_core.scheduling.early_rejection import reject_late
from sluice_core.scheduling.engine_state import EngineView, Entry, get_view
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.placement_records import NUM_RECORDS
from sluice_core.scheduling.prefill_feasibility import AssignPass, find_free_at_s
from sluice_core.scheduling.prefill_placement import LengthAwarePlacement
from sluice_core.scheduling.slack.decode_packing import DecodePacking
from sluice_core.scheduling.slack.slack_waiting_order import WaitingOrder
from sluice_core.scheduling.slack.usual_request import UsualRequest
from sluice_core.strategy_parameters import StrategyParameters

# Requests for which another router's engine must have room beside a prompt: all routers see the seat that gets free,
# and what each of them sends there would wait for the next ones.
SPARE_OF_OTHERS: Final = 4
OTHERS_DELAY: Final = 0.5  # of a credit, by which such an engine must be done earlier


class SlackPlacement(LengthAwarePlacement):
    """Places each prefill where it is done first, the earliest deadline first; see the module.

    Args:
        parameters: Of the strategy.
        rng: Breaks ties.
        num_records: Decisions kept for explanations.

    Attributes:
        waiting_order: Orders what waits.
        packing: Picks the engines of decodes.
        usual: What requests are like.
    """

    def __init__(self, parameters: StrategyParameters, rng: random.Random, num_records: int = NUM_RECORDS) -> None:
        super().__init__(parameters, rng, num_records)
        self.waiting_order = WaitingOrder(parameters)
        self.usual = UsualRequest()
        self.packing = DecodePacking(parameters, self.usual)

    def order(self, now: float, waiting: list[PrefillRequest], engines: EngineTable) -> list[PrefillRequest]:
        """See ``LengthAwarePlacement.order`` and ``WaitingOrder``."""
        return self.waiting_order.sort(now, waiting, engines)

    def _place(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """See ``LengthAwarePlacement._place``."""
        candidates = assign_pass.list_candidates(request)
        if not candidates:
            return Hold(request_id=request.request_id, reason=assign_pass.explain_no_candidate())
        credit_s = self._get_credit_s(assign_pass, request)
        deadline_s = request.arrival_s + request.slo.ttft_s
        entry = self._find_first_done(assign_pass, request, candidates, credit_s)
        if entry is None:
            return self._hold_for_room(assign_pass, request, candidates)
        view = get_view(entry)
        done_s = assign_pass.estimate_done_s(request, view)
        is_feasible = done_s < deadline_s
        rejected = None if is_feasible else reject_late(assign_pass, request, candidates, deadline_s)
        if rejected is not None:
            return rejected
        if not is_feasible and not self._has_room_for_late(view, request):
            assign_pass.note_late_held(request, "seats")
            return Hold(request_id=request.request_id, reason="seats")
        # One that will be late waits on the engine behind those that are. So these count for it alone.
        begins_at_s = find_free_at_s(request, view)
        ahead_s = (begins_at_s if is_feasible else view.free_at_s + view.late_s) - assign_pass.now
        if credit_s and ahead_s > credit_s:
            if not is_feasible:
                assign_pass.note_late_held(request, "late_binding")
            return Hold(request_id=request.request_id, reason="late_binding")
        self.waiting_order.note_placed(assign_pass.now, request, done_s - max(begins_at_s, assign_pass.now))
        self.usual.note_placed(request.prompt_tokens, request.slo.ttft_s)
        is_passed = is_feasible and not request.is_recovery and self.parameters.selects_by_slack
        return assign_pass.place(
            request,
            entry,
            "feasible" if is_feasible else "least_late",
            is_feasible=is_feasible,
            is_passed=is_passed,
        )

    def _hold_for_room(self, assign_pass: AssignPass, request: PrefillRequest, candidates: Sequence[Entry]) -> Hold:
        """Hold a prompt for which no engine has KV blocks and a seat.

        One that waits for KV beyond its objective keeps others from passing it. One that is late waits for them.
        """
        fits = any(get_view(other).available_tokens >= request.prompt_tokens for other in candidates)
        is_passed = fits or self.waiting_order.is_late(assign_pass.now, request)
        return Hold(request_id=request.request_id, reason="seats" if is_passed else "kv")

    def _find_first_done(
        self, assign_pass: AssignPass, request: PrefillRequest, candidates: Sequence[Entry], credit_s: float
    ) -> Entry | None:
        """Find where a prompt is done first; None: nothing has the KV blocks and a seat.

        An engine of another router's share counts as half a credit later, and needs some room to spare. Else routers
        that see the same idle engine, or the same free seat, would all take it before a report can say so.
        """
        num_needed_of_others = 1 + SPARE_OF_OTHERS if _has_own(request, candidates) else 1
        has_urgent = request.slo.ttft_s > self.usual.least_ttft_s
        reserve_share = self.parameters.urgent_reserve_share if has_urgent else 0.0
        now, tokens, has_cached = assign_pass.now, request.prompt_tokens, bool(request.cached_tokens)
        best: Entry | None = None
        least_s = math.inf
        for entry in candidates:
            view = get_view(entry)
            # The hot loop: the bound stands here in place where nothing is cached and nothing is passed.
            if has_cached or view.later:
                bound_s = assign_pass.bound_done_s(request, entry)
            else:
                free_at_s = entry[3]
                start_s = free_at_s if free_at_s > now else now  # noqa: FURB136 - as in ``AssignPass.walk``
                bound_s = start_s + tokens * (entry[4] + entry[5] * tokens)
            if bound_s >= least_s:
                continue
            num_needed = num_needed_of_others if view.is_of_others else 1
            if view.available_tokens < num_needed * tokens or view.available_seqs < num_needed:
                continue
            if reserve_share and not _leaves_free(view, reserve_share, num_needed, num_needed * tokens):
                continue
            done_s = assign_pass.estimate_done_s(request, view)
            if view.is_of_others:
                done_s += OTHERS_DELAY * credit_s
            if best is None or done_s < least_s:
                best, least_s = entry, done_s
        return best

    def _has_room_for_late(self, view: EngineView, request: PrefillRequest) -> bool:
        """Say whether an engine has a seat and KV blocks for a late prompt, behind the late ones that wait there."""
        share = self.parameters.late_reserve_share
        return _leaves_free(view, share, 1 + view.late_requests, request.prompt_tokens + view.late_tokens)

    def _get_credit_s(self, assign_pass: AssignPass, request: PrefillRequest) -> float:
        """Get the prefill work that an engine is given ahead, in seconds; 0: all of it, as it arrives.

        A router knows only what waits with it. What several routers have given to an engine is put in order there.
        """
        if not self.parameters.credit_s or not assign_pass.engines.num_of_others or request.slo.ttft_s == math.inf:
            return self.parameters.credit_s
        return max(self.parameters.credit_s, self.parameters.shared_credit_share * request.slo.ttft_s)


def _leaves_free(view: EngineView, share: float, num_seqs: int, tokens: int) -> bool:
    """Say whether prompts leave a share of an engine free. None of an idle one: any prompt that fits can begin."""
    kept_seqs = min(math.floor(share * view.num_seats), view.num_seats - view.available_seqs)
    kept_tokens = min(share * view.kv_tokens, view.kv_tokens - view.available_tokens)
    return view.available_seqs >= num_seqs + kept_seqs and view.available_tokens >= tokens + kept_tokens


def _has_own(request: PrefillRequest, candidates: Sequence[Entry]) -> bool:
    """Say whether an engine of the router's own share could hold a prompt, so that it need not wait for ever."""
    return any(not view.is_of_others and view.kv_tokens >= request.prompt_tokens for view in map(get_view, candidates))
