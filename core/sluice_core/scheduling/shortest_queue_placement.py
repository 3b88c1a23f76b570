"""Each prefill to the shortest queue (DistServe, section 4.3)."""

from __future__ import annotations

import math

from sluice_core.records import Decision, Hold, PrefillRequest
from sluice_core.scheduling.cached_prefix_preference import find_cached
from sluice_core.scheduling.early_rejection import reject_late
from sluice_core.scheduling.engine_state import get_view
from sluice_core.scheduling.prefill_feasibility import AssignPass
from sluice_core.scheduling.prefill_placement import LengthAwarePlacement


class ShortestQueuePlacement(LengthAwarePlacement):
    """First come, first served: each prefill to the engine with the fewest queued tokens, whether it is in time or not.

    Of equally short queues the one with the most KV left is taken. Beyond the paper: cached tokens make up for queued
    ones (``cached_prefix_preference``); with ``EarlyRejection.REJECT`` a request that this engine cannot serve in time
    is refused; a recovery goes where it is done first.

    Source: DistServe, section 4.3.
    """

    def _place(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        candidates = assign_pass.list_candidates(request)
        if not candidates:
            return Hold(request_id=request.request_id, reason=assign_pass.explain_no_candidate())
        queued_tokens = candidates[0][0]
        shortest = candidates[0]
        for entry in candidates[1:]:
            if entry[0] > queued_tokens:
                break
            if get_view(entry).available_tokens > get_view(shortest).available_tokens:
                shortest = entry
        if request.cached_tokens:
            shortest = find_cached(assign_pass, request, math.inf, shortest) or shortest
        deadline_s = request.arrival_s + request.slo.ttft_s
        is_feasible = assign_pass.estimate_done_s(request, get_view(shortest)) < deadline_s
        rejected = None if is_feasible else reject_late(assign_pass, request, [shortest], deadline_s)
        return rejected or assign_pass.place(request, shortest, "shortest_queue", is_feasible=is_feasible)
