"""Early rejection: what happens to a prompt that no engine is expected to serve within its TTFT objective.

Every placement asks here. The policies are ``EarlyRejection``; under ``Off`` each placement has a rule of its own,
mostly the engine that is done first. TaiChi (section 3.4, Algorithm 2, lines 13 to 15) returns nothing, and lets its
experiments place such a prompt at random. Which prompt is judged first: ``waiting_order``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sluice_core.records import Decision, Hold, PrefillRequest, Reject
from sluice_core.scheduling.engine_state import Entry, get_view
from sluice_core.scheduling.prefill_feasibility import AssignPass
from sluice_core.strategy_parameters import EarlyRejection


def reject_late(
    assign_pass: AssignPass, request: PrefillRequest, candidates: Sequence[Entry], deadline_s: float
) -> Decision | None:
    """Reject, unless an engine may do better than its estimate, or will once it has KV blocks.

    Args:
        assign_pass: The pass under way.
        request: A prompt that none of the engines is expected to serve in time.
        candidates: The engines that it may go to; at least one.
        deadline_s: When its first token is due.

    Returns:
        The decision; None: early rejection is off, or places at random.
    """
    if assign_pass.early_rejection is not EarlyRejection.REJECT:
        return None
    views = [get_view(entry) for entry in candidates]
    done_s = [assign_pass.estimate_done_s(request, view) for view in views]
    # An idle engine will never be faster, and an estimate that few iterations were fitted to may be wrong: neither
    # justifies a rejection.
    unproven = [i for i, view in enumerate(views) if view.queued_prefill_tokens == 0 or not view.is_proven]
    fitting = [i for i in unproven if views[i].available_tokens >= request.prompt_tokens]
    if fitting:
        chosen = min(fitting, key=done_s.__getitem__)
        return assign_pass.place(request, candidates[chosen], "unproven", is_feasible=False)
    least_done_s = min(done_s)
    if unproven or least_done_s < deadline_s:
        return Hold(request_id=request.request_id, reason="kv")
    return Reject(request_id=request.request_id, retry_after_s=least_done_s - deadline_s)


def place_at_random(
    assign_pass: AssignPass, request: PrefillRequest, candidates: Sequence[Entry], rng: random.Random
) -> Decision:
    """Place a late prompt on a random engine that has the KV blocks, as TaiChi does; at least one has."""
    fitting = [entry for entry in candidates if get_view(entry).available_tokens >= request.prompt_tokens]
    chosen = fitting[int(rng.random() * len(fitting))]
    return assign_pass.place(request, chosen, "random", is_feasible=False)
