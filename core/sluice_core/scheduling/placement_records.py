"""Decisions about placement, kept in a bounded ring as tuples and formatted on demand (``explain``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from sluice_core.records import Decision, EngineId, PrefillRequest, Role
from sluice_core.scheduling.engine_state import EngineView, Entry, get_view
from sluice_core.scheduling.prefill_feasibility import estimate_prefill

MAX_RECORDED_ENGINES: Final = 64  # per decision: those with the shortest queues, and the chosen one
NUM_RECORDS: Final = 4096  # decisions kept for explanations


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCandidate:
    """One engine as a placement or a move saw it; kept for explanations.

    Args:
        engine_id: The engine.
        role: Its role.
        queued_prefill_tokens: Its queue, own placements included.
        queue_s: Q, seconds until its prefill queue is empty.
        execute_s: E, seconds to prefill this request.
        transfer_s: T, seconds to move the KV; 0 on D-heavy engines.
        cached_tokens: Prompt tokens expected in its prefix cache, which E leaves out.
        is_feasible: Q + E + T within what is left of the TTFT SLO.
        reason: ``feasible``, ``ttft``, ``kv``, ``room``, ``draining`` or ``excluded``.
        is_of_others: It belongs to the share of another router: it stands behind one's own by
            ``router_shares.SHARE_MARGIN_TOKENS``.
    """

    engine_id: EngineId
    role: Role
    queued_prefill_tokens: int
    queue_s: float
    execute_s: float
    transfer_s: float
    is_feasible: bool
    reason: str
    is_of_others: bool = False
    cached_tokens: int = 0


class PlacementRecord(NamedTuple):
    """A decision and what it saw, kept in a ring; ``explain`` formats it.

    Args:
        now: When it was made, on the caller's clock.
        request: The request.
        decision: The decision.
        entries: Engines as they stood before it, in the order of the walk.
        blocked: Engines that took no prefill.
    """

    now: float
    request: PrefillRequest
    decision: Decision
    entries: tuple[Entry, ...]
    blocked: tuple[EngineView, ...]


def explain(record: PlacementRecord) -> list[PlacementCandidate]:
    """Reconstruct the engines that a decision saw, in the order of the walk, blocked ones last.

    Args:
        record: From ``LengthAwarePlacement.records``.

    Returns:
        One candidate per engine recorded.
    """
    views = (*(get_view(entry) for entry in record.entries), *record.blocked)
    return [_explain_view(record, view) for view in views]


def _explain_view(record: PlacementRecord, view: EngineView) -> PlacementCandidate:
    """Format one engine of a decision."""
    request = record.request
    queue_s, execute_s, transfer_s = estimate_prefill(record.now, request, view)
    is_in_time = record.now + queue_s + execute_s + transfer_s < request.arrival_s + request.slo.ttft_s
    reason = "feasible" if is_in_time or request.is_recovery else "ttft"
    if view.available_tokens < request.prompt_tokens:
        reason = "kv"
    if view.engine_id in request.excluded:
        reason = "excluded"
    reason = view.blocked_reason or reason
    return PlacementCandidate(
        engine_id=view.engine_id,
        role=view.role,
        queued_prefill_tokens=view.queued_prefill_tokens,
        queue_s=queue_s,
        execute_s=execute_s,
        transfer_s=transfer_s,
        is_feasible=reason == "feasible",
        reason=reason,
        is_of_others=view.is_of_others,
        cached_tokens=request.cached_tokens.get(view.engine_id, 0),
    )
