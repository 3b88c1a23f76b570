"""Placements that ignore objectives, the baselines of the papers: round robin, and the least prefill work.

A prompt goes to an engine whatever its KV blocks and its TTFT; there it waits in the queue.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from sluice_core.records import Decision, Hold, Place, PrefillRequest
from sluice_core.scheduling.engine_table import EngineState, EngineTable
from sluice_core.scheduling.placement_records import NUM_RECORDS
from sluice_core.scheduling.waiting_order import get_urgency
from sluice_core.strategy_parameters import StrategyParameters


class _SloBlindPlacement:
    """What both share: every request in the order of urgency to the engine that ``_pick`` names.

    Args:
        parameters: Not used.
        rng: Not used.
        num_records: Not used: there is nothing to explain.
    """

    def __init__(self, parameters: StrategyParameters, rng: random.Random, num_records: int = NUM_RECORDS) -> None:
        del rng, num_records
        self.parameters = parameters

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
    ) -> list[Decision]:
        """See ``PlacementPolicy.assign``."""
        decisions: list[Decision] = []
        for request in sorted(waiting, key=get_urgency):
            state = self._pick(request, engines)
            decisions.append(_place(now, request, engines, state, self._get_reason()))
        return decisions

    def _pick(self, request: PrefillRequest, engines: EngineTable) -> EngineState | None:
        raise NotImplementedError

    def _get_reason(self) -> str:
        raise NotImplementedError


class RoundRobinPlacement(_SloBlindPlacement):
    """Each prefill to the next engine in turn; for the arguments see ``_SloBlindPlacement``."""

    def __init__(self, parameters: StrategyParameters, rng: random.Random, num_records: int = NUM_RECORDS) -> None:
        super().__init__(parameters, rng, num_records)
        self._last_number = 0

    def _get_reason(self) -> str:
        return "round_robin"

    def _pick(self, request: PrefillRequest, engines: EngineTable) -> EngineState | None:
        """Pick the engine with the next higher number, or the lowest."""
        following: EngineState | None = None
        first: EngineState | None = None
        for state in engines.list_loads():  # by number
            if not _accepts_prefills(state, request):
                continue
            first = first or state
            if state.number > self._last_number:
                following = state
                break
        chosen = following or first
        if chosen is not None:
            self._last_number = chosen.number
        return chosen


class LeastWorkPlacement(_SloBlindPlacement):
    """Each prefill to the engine with the fewest queued prefill tokens; of equals the one with the least KV committed.

    For the arguments see ``_SloBlindPlacement``.
    """

    def _get_reason(self) -> str:
        return "least_work"

    def _pick(self, request: PrefillRequest, engines: EngineTable) -> EngineState | None:
        return min((state for state in engines if _accepts_prefills(state, request)), key=_compute_work, default=None)


def _accepts_prefills(state: EngineState, request: PrefillRequest) -> bool:
    """Say whether an engine takes new prompts at all."""
    return (
        state.chunk_size_tokens > 0
        and not state.is_draining
        and state.reported_at_s is not None
        and state.engine_id not in request.excluded
    )


def _compute_work(state: EngineState) -> tuple[int, float, int]:
    return state.queued_prefill_tokens, state.committed_kv_blocks / max(1, state.load.kv_blocks_total), state.number


def _place(
    now: float, request: PrefillRequest, engines: EngineTable, state: EngineState | None, reason: str
) -> Decision:
    """Record a placement in the table and make the decision."""
    if state is None:
        return Hold(request_id=request.request_id, reason="no_engine")
    engines.record_placement(
        state.engine_id,
        request.request_id,
        now,
        tokens=request.prompt_tokens,
        kv_tokens=request.prompt_tokens,
        execute_s=0.0,  # no estimate is made
        is_recovery=request.is_recovery,
    )
    return Place(
        request_id=request.request_id,
        engine_id=state.engine_id,
        predicted_ttft_s=math.inf,
        reason=reason,
        is_feasible=True,
    )
