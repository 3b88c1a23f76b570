"""Placement by prefix caches: how much cached tokens of a prompt make up for a longer queue."""

from __future__ import annotations

import math
from typing import Final

from sluice_core.records import PrefillRequest
from sluice_core.scheduling.engine_state import Entry, get_view
from sluice_core.scheduling.prefill_feasibility import AssignPass

CACHED_TOKEN_WEIGHT: Final = 8.0  # queued prefill tokens that a cached token of the prompt makes up for
_INFINITY: Final = math.inf  # looking it up in the module costs as much as an engine


def find_cached(
    assign_pass: AssignPass, request: PrefillRequest, deadline_s: float, plain: Entry | None
) -> Entry | None:
    """Find a feasible engine that has so much of a prompt in its cache that it is the better choice.

    Line 12 of Algorithm 2 takes the shortest queue. A cached token is one that need not be computed: it makes up
    for ``CACHED_TOKEN_WEIGHT`` queued ones. Where nothing is cached that is the paper's rule.

    Args:
        assign_pass: The pass under way.
        request: The request.
        deadline_s: When its first token is due.
        plain: What the paper's rule chooses, as though nothing was cached; None: nothing is feasible then.

    Returns:
        The engine; None: ``plain`` is as good.
    """
    best: Entry | None = None
    least = _INFINITY
    cached_tokens = request.cached_tokens
    if plain is not None:
        least = plain[0] - CACHED_TOKEN_WEIGHT * cached_tokens.get(get_view(plain).engine_id, 0)
    most_saved = CACHED_TOKEN_WEIGHT * max(cached_tokens.values())
    for entry in assign_pass.list_candidates(request):
        queued_tokens = entry[0]
        if queued_tokens - most_saved >= least:
            break  # queues only get longer from here on
        cached = cached_tokens.get(get_view(entry).engine_id, 0)
        score = queued_tokens - CACHED_TOKEN_WEIGHT * cached
        if not cached or score >= least or assign_pass.bound_done_s(request, entry) >= deadline_s:
            continue
        if assign_pass.is_feasible(request, get_view(entry), deadline_s):
            best, least = entry, score
    return best
