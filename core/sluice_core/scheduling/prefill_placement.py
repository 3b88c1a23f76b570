"""Where prefills run: length-aware prefill scheduling (TaiChi, section 3.4, Algorithm 2) as an ordered walk.

``EngineTable.order`` lists the engines by queued prefill tokens, so the first feasible one is the one that lines 10 to
12 of Algorithm 2 return.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from sluice_core.records import Decision, Hold, PrefillRequest, RequestId
from sluice_core.scheduling.cached_prefix_preference import find_cached
from sluice_core.scheduling.early_rejection import place_at_random, reject_late
from sluice_core.scheduling.engine_state import Entry, get_queue_rank, get_view
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.placement_records import MAX_RECORDED_ENGINES, NUM_RECORDS, PlacementRecord
from sluice_core.scheduling.prefill_feasibility import AssignPass
from sluice_core.scheduling.waiting_order import get_urgency
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

_MAX_TIE_DRAWS: Final = 8  # random picks among tied engines before all of them are checked


class PlacementPolicy(Protocol):
    """Decides where waiting prefills run."""

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
    ) -> list[Decision]:
        """Decide about each waiting request; placements are recorded in ``engines`` at once.

        The caller submits each ``Place`` and calls ``engines.mark_submitted`` (or ``cancel_placement``); it keeps each
        ``Hold`` and asks again after the next report.

        Args:
            now: Seconds on the caller's monotonic clock.
            waiting: Requests in any order.
            engines: The engines.

        Returns:
            One decision per request, in the order in which they were made.
        """
        ...


class LengthAwarePlacement:
    """Algorithm 2 (TaiChi, section 3.4), with early rejection, KV fit and recoveries.

    Aggregation and disaggregation are the same code: with equal chunk sizes nothing is transferred, and an engine with
    chunk size 0 has no prefill budget and is never feasible.

    Args:
        parameters: Live parameters; replace the attribute on a plan change.
        rng: Breaks ties; seeded by the caller.
        num_records: Decisions kept for explanations; 0: none, which spares their time.

    Attributes:
        records: The last decisions, oldest first.
    """

    def __init__(self, parameters: StrategyParameters, rng: random.Random, num_records: int = NUM_RECORDS) -> None:
        self.parameters = parameters
        self.records: deque[PlacementRecord] = deque(maxlen=num_records)
        self._num_records = num_records
        self._rng = rng

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
    ) -> list[Decision]:
        """See ``PlacementPolicy.assign``."""
        assign_pass = AssignPass(now, engines, self.parameters.early_rejection)
        decisions: list[Decision] = []
        for request in self.order(now, list(waiting), engines):
            entries = tuple(engines.order[:MAX_RECORDED_ENGINES]) if self._num_records else ()
            decision = self._decide(assign_pass, request)
            if isinstance(decision, Hold):
                assign_pass.note_hold(request, decision)
            if self._num_records:
                self._record(assign_pass, request, decision, entries)
            decisions.append(decision)
        return decisions

    def take_events(self) -> Sequence[str]:
        """See ``RouterPolicy.take_events``."""
        return ()

    def order(
        self,
        now: float,  # noqa: ARG002 - another placement may need the time
        waiting: list[PrefillRequest],
        engines: EngineTable,  # noqa: ARG002 - and the engines
    ) -> list[PrefillRequest]:
        """Order what waits, the first to be placed first.

        Args:
            now: Seconds on the caller's clock.
            waiting: Requests in any order.
            engines: The engines.
        """
        if len(waiting) > 1:
            waiting.sort(key=get_urgency)
        return waiting

    def _decide(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """Decide about one request."""
        hold = assign_pass.find_hold(request)
        if hold is not None:
            return hold
        return self._place_recovery(assign_pass, request) if request.is_recovery else self._place(assign_pass, request)

    def find_records(self, request_id: RequestId) -> list[PlacementRecord]:
        """Find the decisions about a request that are still kept, oldest first."""
        return [record for record in self.records if record.request.request_id == request_id]

    def _record(
        self, assign_pass: AssignPass, request: PrefillRequest, decision: Decision, entries: tuple[Entry, ...]
    ) -> None:
        """Keep a decision for explanations."""
        chosen, assign_pass.chosen = assign_pass.chosen, None
        if chosen is not None and len(entries) == MAX_RECORDED_ENGINES and chosen not in entries:
            entries = (*entries, chosen)
        all_blocked = assign_pass.engines.blocked
        blocked = tuple(all_blocked.values())[:MAX_RECORDED_ENGINES] if all_blocked else ()
        self.records.append(PlacementRecord(assign_pass.now, request, decision, entries, blocked))

    def _place(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """Place one new prefill (TaiChi, section 3.4, Algorithm 2)."""
        deadline_s = request.arrival_s + request.slo.ttft_s
        candidates = assign_pass.list_candidates(request)
        # Lines 1 to 11: in ascending order of queued prefill tokens the first feasible engine is the arg min of line
        # 11.
        feasible, least_late = assign_pass.walk(request, candidates, deadline_s)
        entry: Entry | None = None
        if feasible >= 0:
            # Line 12. The paper does not say which of equal queues is taken; see ``_break_tie``.
            entry = self._break_tie(assign_pass, request, candidates, feasible, deadline_s)
        if request.cached_tokens:
            entry = find_cached(assign_pass, request, deadline_s, entry) or entry
        if entry is not None:
            return assign_pass.place(request, entry, "feasible", is_feasible=True)
        # Lines 13 to 15: no engine is feasible.
        if not candidates:
            return Hold(request_id=request.request_id, reason=assign_pass.explain_no_candidate())
        rejected = reject_late(assign_pass, request, candidates, deadline_s)
        if rejected is not None:
            return rejected
        if request.cached_tokens:
            least_late = assign_pass.find_least_late(request, candidates)
        if least_late < 0:
            return Hold(request_id=request.request_id, reason="kv")
        if assign_pass.early_rejection is EarlyRejection.RANDOM:
            return place_at_random(assign_pass, request, candidates, self._rng)
        # Deviation from the paper, which takes a random engine: on the least late one the request misses by the least.
        return assign_pass.place(request, candidates[least_late], "least_late", is_feasible=False)

    def _break_tie(
        self,
        assign_pass: AssignPass,
        request: PrefillRequest,
        candidates: Sequence[Entry],
        index: int,
        deadline_s: float,
    ) -> Entry:
        """Pick among the feasible engines that are tied with the first feasible one.

        Of two drawn at random the one with more KV left: where the decode stays that is the one with fewer decodes, and
        two draws keep routers that see the same reports from all choosing one engine. At low load ties are the common
        case; a single draw costs aggregation 7 % of its goodput in the simulator, because decodes pile up by chance.
        """
        first = candidates[index]
        queued_tokens, rank = get_queue_rank(first)
        end = index + 1
        if end < len(candidates) and get_queue_rank(candidates[end]) == (queued_tokens, rank):
            end = bisect_left(candidates, (queued_tokens, rank + 1), end)
        if end == index + 1:
            return first
        tied = candidates[index:end]
        one = self._draw_feasible(assign_pass, request, tied, deadline_s)
        other = self._draw_feasible(assign_pass, request, tied, deadline_s)
        return other if get_view(other).available_tokens > get_view(one).available_tokens else one

    def _draw_feasible(
        self, assign_pass: AssignPass, request: PrefillRequest, tied: Sequence[Entry], deadline_s: float
    ) -> Entry:
        """Draw uniformly among the feasible of tied engines, of which the first is feasible.

        Random picks until one is feasible are uniform over the feasible ones; when many fail, all are checked.
        """
        for _ in range(_MAX_TIE_DRAWS):
            entry = tied[int(self._rng.random() * len(tied))]
            if entry is tied[0] or assign_pass.is_feasible(request, get_view(entry), deadline_s):
                return entry
        feasible = [entry for entry in tied if assign_pass.is_feasible(request, get_view(entry), deadline_s)]
        return feasible[int(self._rng.random() * len(feasible))]

    def _place_recovery(self, assign_pass: AssignPass, request: PrefillRequest) -> Decision:
        """Place a recovery where it is done first, among the engines that have not had their share of recoveries."""
        candidates = assign_pass.list_candidates(request)
        if not candidates:
            return Hold(request_id=request.request_id, reason=assign_pass.explain_no_candidate())
        fitting = [entry for entry in candidates if get_view(entry).available_tokens >= request.prompt_tokens]
        if not fitting:
            return Hold(request_id=request.request_id, reason="kv")
        # New prompts wait on most engines: recoveries get a share of an engine's time, so that they cannot starve them.
        open_ = [entry for entry in fitting if assign_pass.is_open_to_recoveries(get_view(entry))]
        if not open_:
            return Hold(request_id=request.request_id, reason="recovery_cap")
        entry = min(open_, key=lambda candidate: assign_pass.estimate_done_s(request, get_view(candidate)))
        return assign_pass.place(request, entry, "recovery", is_feasible=True)
