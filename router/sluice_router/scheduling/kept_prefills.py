"""Finished prefills whose KV is kept on their engine until an engine that decodes has room: first come, first served.

A wait has an end. Then, and when no engine decodes for others any more, the request is recomputed and decodes in place.

The first part of a prompt waits in the same way, but only until its second engine answers. Without room there, the
first engine computes the rest too; its prefix cache has the part.

Source: DistServe (arXiv:2401.09670), section 4.3; DynaServe (arXiv:2504.09285), section 3.1.
"""

from __future__ import annotations

from sluice_router.scheduling import dispatch, failover, placement
from sluice_router.scheduling.entities import KeptKv, LiveRequest
from sluice_router.scheduling.moves import migration
from sluice_router.scheduling.state import RouterState


def place(state: RouterState, now: float) -> None:
    """Asks for room for those whose turn has come; what waits behind one without a target waits on."""
    kept_requests = state.requests.kept
    policy = state.active.policy
    if not kept_requests or policy is None:
        return
    for request in list(kept_requests.values()):
        if request.split_prompt_tokens and request.kept_kv is not None and request.migration is None:
            _place_cut(state, request, request.kept_kv, now)
    kept_prefills = [request for request in kept_requests.values() if not request.split_prompt_tokens]
    if not kept_prefills:
        return
    if not policy.has_decode_engines(state.engines.table):
        for request in kept_prefills:
            failover.give_up_kept(state, request, "no_decode_engine", now)
        return
    for request in kept_prefills:
        kept = request.kept_kv
        if kept is None or request.migration is not None:
            continue
        if now < kept.not_before_s or migration.ask_for_kept(state, request, kept, now) == "no_target":
            return


def _place_cut(state: RouterState, request: LiveRequest, kept: KeptKv, now: float) -> None:
    """Asks for room for a prompt whose first part has ended; refused once, it is computed whole."""
    is_refused = kept.not_before_s > 0.0
    if not is_refused and not migration.ask_for_kept(state, request, kept, now):
        return
    engine = kept.source.engine
    migration.drop_kept(state, request, "whole", now)
    migration.make_whole(request)
    state.metrics.count("cut_prompts", "whole")
    state.decision_log.record(now, request.request_id, "whole", engine.engine_id)
    if engine.is_draining:
        dispatch.enqueue(state.requests, request, now)
        return
    block_size_tokens = engine.spec.block_size_tokens
    num_cached_tokens = kept.kv.num_tokens // block_size_tokens * block_size_tokens
    placement.submit_whole(state, request, engine, num_cached_tokens, now)


def expire(state: RouterState, now: float) -> None:
    """Ends the waits that have taken too long."""
    for request in list(state.requests.kept.values()):
        if request.kept_kv is not None and now >= request.kept_kv.until_s:
            failover.give_up_kept(state, request, "grant_wait", now)
