"""Finished prefills whose KV is kept on their engine until an engine that decodes has room: first come, first served.

A wait has an end. Then, and when no engine decodes for others any more, the request is recomputed and decodes in place.

Source: DistServe (arXiv:2401.09670), section 4.3.
"""

from __future__ import annotations

from sluice_router.scheduling import failover
from sluice_router.scheduling.moves import migration
from sluice_router.scheduling.state import RouterState


def place(state: RouterState, now: float) -> None:
    """Asks for room for those whose turn has come; what waits behind one without a target waits on."""
    kept_requests = state.requests.kept
    policy = state.active.policy
    if not kept_requests or policy is None:
        return
    if not policy.has_decode_engines(state.engines.table):
        for request in list(kept_requests.values()):
            failover.give_up_kept(state, request, "no_decode_engine", now)
        return
    for request in kept_requests.values():
        kept = request.kept_kv
        if kept is None or request.migration is not None:
            continue
        if now < kept.not_before_s or migration.ask_for_kept(state, request, kept, now) in {"no_target", "target_busy"}:
            return


def expire(state: RouterState, now: float) -> None:
    """Ends the waits that have taken too long."""
    for request in list(state.requests.kept.values()):
        if request.kept_kv is not None and now >= request.kept_kv.until_s:
            failover.give_up_kept(state, request, "grant_wait", now)
