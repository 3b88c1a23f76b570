"""Where prefills run: length-aware prefill scheduling (TaiChi, section 3.4, Algorithm 2) as an ordered walk.

``EngineTable.order`` lists the engines by queued prefill tokens, so the first feasible one is the one that lines 10 to
12 of Algorithm 2 return. Decisions are kept in a bounded ring as tuples and formatted on demand (``explain``).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from sluice_core.latency import compute_attention_work
from sluice_core.records import (
    Decision,
    EarlyRejection,
    EngineId,
    FlowParameters,
    Hold,
    Place,
    PlacementCandidate,
    PrefillRequest,
    Reject,
    RequestId,
)
from sluice_core.scheduling.engine_state import EngineView, Entry, get_queue_rank, get_view
from sluice_core.scheduling.engine_table import RECOVERY_BURST_S, EngineTable
from sluice_core.scheduling.holding import get_urgency

MAX_RECORDED_ENGINES: Final = 64  # per decision: those with the shortest queues, and the chosen one
NUM_RECORDS: Final = 4096  # decisions kept for explanations
_INFINITY: Final = math.inf  # looking it up in the module costs as much as a few engines of the walk
CACHED_TOKEN_WEIGHT: Final = 8.0  # queued prefill tokens that a cached token of the prompt makes up for
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


class _Walk(NamedTuple):
    """Result of a walk: positions among the candidates, -1 for none.

    Args:
        feasible: The first feasible one.
        least_late: When there is none: of those with enough KV blocks, the one where the request would be done first.
    """

    feasible: int
    least_late: int


class LengthAwarePlacement:
    """Algorithm 2 (TaiChi, section 3.4), with early rejection, KV fit and recoveries.

    Aggregation and disaggregation are the same code: with equal chunk sizes nothing is transferred, and an engine with
    chunk size 0 has no prefill room and is never feasible.

    Args:
        parameters: Live parameters; replace the attribute on a plan change.
        rng: Breaks ties; seeded by the caller.
        num_records: Decisions kept for explanations; 0: none, which spares their time.

    Attributes:
        records: The last decisions, oldest first.
    """

    def __init__(self, parameters: FlowParameters, rng: random.Random, num_records: int = NUM_RECORDS) -> None:
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
        may_reject = self.parameters.early_rejection is EarlyRejection.REJECT
        assign_pass = AssignPass(now, engines, may_reject=may_reject)
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

    def order(self, now: float, waiting: list[PrefillRequest], engines: EngineTable) -> list[PrefillRequest]:
        """Order what waits, the first to be placed first.

        Args:
            now: Seconds on the caller's clock.
            waiting: Requests in any order.
            engines: The engines.
        """
        del now, engines
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
        found = assign_pass.walk(request, candidates, deadline_s)
        entry: Entry | None = None
        if found.feasible >= 0:
            # Line 12. The paper does not say which of equal queues is taken; see ``_break_tie``.
            entry = self._break_tie(assign_pass, request, candidates, found.feasible, deadline_s)
        if request.cached_tokens:
            entry = assign_pass.find_cached(request, deadline_s, entry) or entry
        if entry is not None:
            return assign_pass.place(request, entry, "feasible", is_feasible=True)
        # Lines 13 to 15: no engine is feasible. The paper returns nothing and lets its experiments place the request at
        # random; here ``EarlyRejection`` says what happens.
        if not candidates:
            return Hold(request_id=request.request_id, reason=assign_pass.explain_no_candidate())
        if self.parameters.early_rejection is EarlyRejection.REJECT:
            return self._reject(assign_pass, request, candidates, deadline_s)
        least_late = found.least_late
        if request.cached_tokens:
            least_late = assign_pass.find_least_late(request, candidates)
        if least_late < 0:
            return Hold(request_id=request.request_id, reason="kv")
        if self.parameters.early_rejection is EarlyRejection.RANDOM:
            fitting = [entry for entry in candidates if get_view(entry).available_tokens >= request.prompt_tokens]
            chosen = fitting[int(self._rng.random() * len(fitting))]
            return assign_pass.place(request, chosen, "random", is_feasible=False)
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

    def _reject(
        self, assign_pass: AssignPass, request: PrefillRequest, candidates: Sequence[Entry], deadline_s: float
    ) -> Decision:
        """Reject, unless an engine may do better than its estimate, or will once it has KV blocks."""
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


class AssignPass:
    """One call of ``assign``: its arguments, and what it has learned about holds so far.

    Within a call engines only fill up, so what did not fit once is not tried again: a long queue of waiting requests
    costs one walk, not one per request.
    """

    __slots__ = (
        "_holds",
        "_is_blocked_by_kv",
        "_least_kv_held",
        "_may_reject",
        "chosen",
        "engines",
        "now",
    )

    def __init__(self, now: float, engines: EngineTable, *, may_reject: bool) -> None:
        self._may_reject = may_reject
        self.now = now
        self.engines = engines
        self.chosen: Entry | None = None
        self._least_kv_held = _INFINITY
        self._is_blocked_by_kv = False
        self._holds: set[str] = set()

    def find_hold(self, request: PrefillRequest) -> Hold | None:
        """Hold a request that cannot fare better than one held before it in this call."""
        if self._least_kv_held <= request.prompt_tokens or (self._is_blocked_by_kv and not request.is_recovery):
            return Hold(request_id=request.request_id, reason="kv")
        if "recovery_cap" in self._holds and request.is_recovery:
            return Hold(request_id=request.request_id, reason="recovery_cap")
        return None

    def note_hold(self, request: PrefillRequest, hold: Hold) -> None:
        """Learn from a hold what cannot fit either in the rest of this pass."""
        if request.excluded:
            return  # it could not use every engine, so it says nothing about other requests
        if hold.reason == "kv" and self._may_reject:
            return  # those behind it may have to be rejected, and soon
        self._holds.add(hold.reason)
        if hold.reason == "kv":
            self._least_kv_held = min(self._least_kv_held, request.prompt_tokens)
            # A prompt that waits for KV beyond its TTFT SLO is not overtaken any more: large prompts would starve
            # behind small ones, which always find room first.
            due_s = request.next_token_due_s if request.is_recovery else request.arrival_s
            is_overdue = self.now > due_s + request.slo.ttft_s
            self._is_blocked_by_kv = self._is_blocked_by_kv or (is_overdue and self._can_ever_fit(request))

    def list_candidates(self, request: PrefillRequest) -> Sequence[Entry]:
        """List the engines that can take a prefill and are not excluded, in ascending order of their queues."""
        if not request.excluded:
            return self.engines.order
        return [entry for entry in self.engines.order if get_view(entry).engine_id not in request.excluded]

    def explain_no_candidate(self) -> str:
        """Say why there is no candidate."""
        is_full = any(view.blocked_reason == "room" for view in self.engines.blocked.values())
        return "room" if is_full else "no_engine"

    def walk(self, request: PrefillRequest, candidates: Sequence[Entry], deadline_s: float) -> _Walk:
        """Find the first feasible engine (TaiChi, section 3.4, Algorithm 2, lines 2 to 9).

        The hot loop: it repeats ``estimate_done_s`` in place, and only where a bound from below, which needs half the
        arithmetic, does not already exclude the engine.
        """
        now, tokens = self.now, request.prompt_tokens
        least_late, least_late_s = -1, _INFINITY  # an infeasible engine is done at the deadline or later
        for position, entry in enumerate(candidates):
            (
                _queued_tokens,
                _rank,
                _number,
                free_at_s,
                least_token_s,
                square_s,
                token_s,
                iteration_s,
                room_tokens,
                available_tokens,
                latency_s,
                _view,
            ) = entry
            # Line 3: Q ends when the queue is empty, or now.
            start_s = free_at_s if free_at_s > now else now  # noqa: FURB136 - calling max() costs a third of the loop
            if start_s + tokens * (least_token_s + square_s * tokens) >= least_late_s:
                continue
            # Beyond the paper: without KV blocks for the prompt the engine could not run it.
            if available_tokens < tokens:
                continue
            # Lines 4 and 5: E, of which each iteration of the prompt is a part, and T.
            num_iterations = -(-tokens // room_tokens)
            done_s = start_s + tokens * (token_s + square_s * tokens) + num_iterations * iteration_s + latency_s
            if done_s < deadline_s:  # line 6: Q + E + T < the TTFT SLO
                return _Walk(position, -1)
            if done_s < least_late_s:
                least_late, least_late_s = position, done_s
        return _Walk(-1, least_late)

    def find_cached(self, request: PrefillRequest, deadline_s: float, plain: Entry | None) -> Entry | None:
        """Find a feasible engine that has so much of a prompt in its cache that it is the better choice.

        Line 12 of Algorithm 2 takes the shortest queue. A cached token is one that need not be computed: it makes up
        for ``CACHED_TOKEN_WEIGHT`` queued ones. Where nothing is cached that is the paper's rule.

        Args:
            request: The request.
            deadline_s: When its first token is due.
            plain: What the paper's rule chooses, as though nothing was cached; None: nothing is feasible then.

        Returns:
            The engine; None: ``plain`` is as good.
        """
        best: Entry | None = None
        least = _INFINITY
        if plain is not None:
            least = plain[0] - CACHED_TOKEN_WEIGHT * request.cached_tokens.get(get_view(plain).engine_id, 0)
        engines, excluded = self.engines, request.excluded
        for engine_id, cached in request.cached_tokens.items():
            state = engines.peek(engine_id)
            entry = None if state is None else state.entry
            if entry is None:
                continue
            score = entry[0] - CACHED_TOKEN_WEIGHT * cached
            if score >= least or (excluded and engine_id in excluded):
                continue
            if self.is_feasible(request, get_view(entry), deadline_s):
                best, least = entry, score
        return best

    def find_least_late(self, request: PrefillRequest, candidates: Sequence[Entry]) -> int:
        """Find where a prompt with cached tokens would be done first; -1 when none has the KV blocks."""
        fitting = [
            position
            for position, entry in enumerate(candidates)
            if get_view(entry).available_tokens >= request.prompt_tokens
        ]
        return min(fitting, key=lambda each: self.estimate_done_s(request, get_view(candidates[each])), default=-1)

    def is_feasible(self, request: PrefillRequest, view: EngineView, deadline_s: float) -> bool:
        """Say whether an engine has the KV blocks and meets the deadline."""
        return view.available_tokens >= request.prompt_tokens and self.estimate_done_s(request, view) < deadline_s

    def is_open_to_recoveries(self, view: EngineView) -> bool:
        """Say whether an engine may take one more recovery: no other prefill waits, or its share is not used up."""
        if view.queued_prefill_tokens == 0:
            return True
        return self.engines[view.engine_id].recovery_free_at_s <= self.now + RECOVERY_BURST_S

    def estimate_done_s(self, request: PrefillRequest, view: EngineView) -> float:
        """Estimate when the first token could be out, transfer included, on the caller's clock."""
        queue_s, execute_s, transfer_s = _estimate(self.now, request, view)
        return self.now + queue_s + execute_s + transfer_s

    def place(self, request: PrefillRequest, entry: Entry, reason: str, *, is_feasible: bool) -> Place:
        """Record a placement in the table and make the decision."""
        view = get_view(entry)
        engine_id = view.engine_id
        queue_s, execute_s, transfer_s = _estimate(self.now, request, view)
        self.chosen = entry
        self.engines.record_placement(
            engine_id,
            request.request_id,
            self.now,
            tokens=_count_uncached(request, engine_id),
            kv_tokens=request.prompt_tokens,
            execute_s=execute_s,
            is_recovery=request.is_recovery,
        )
        return Place(
            request_id=request.request_id,
            engine_id=engine_id,
            predicted_ttft_s=self.now - request.arrival_s + queue_s + execute_s + transfer_s,
            reason=reason,
            is_feasible=is_feasible,
        )

    def _can_ever_fit(self, request: PrefillRequest) -> bool:
        """Say whether some engine could hold the prompt if it were empty."""
        return any(
            state.load.kv_blocks_total * state.config.block_size_tokens >= request.prompt_tokens
            for state in self.engines.list_loads()
        )


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
    queue_s, execute_s, transfer_s = _estimate(record.now, request, view)
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


def _estimate(now: float, request: PrefillRequest, view: EngineView) -> tuple[float, float, float]:
    """Estimate Q, E and T of a prompt on an engine, in seconds.

    The closed form of a prefill: its tokens, its attention work, and the rest of each of its ``ceil(tokens / room)``
    iterations; decodes that run beside it are part of the coefficients (``EngineView``).

    Source: TaiChi, section 3.4, Algorithm 2, lines 3 to 5.
    """
    prompt_tokens, tokens = request.prompt_tokens, _count_uncached(request, view.engine_id)
    if view.room_tokens <= 0:
        return _INFINITY, _INFINITY, 0.0
    execute_s = (
        view.per_token_s * tokens
        + view.per_work_s * compute_attention_work(tokens, prompt_tokens - tokens)
        + -(-tokens // view.room_tokens) * view.per_iteration_s
    )
    transfer_s = view.transfer_latency_s + view.transfer_per_token_s * prompt_tokens
    return max(0.0, view.free_at_s - now), execute_s, transfer_s


def _count_uncached(request: PrefillRequest, engine_id: EngineId) -> int:
    """Count the tokens to compute on an engine: the last one always is, for its logits."""
    cached = request.cached_tokens
    return max(1, request.prompt_tokens - cached.get(engine_id, 0)) if cached else request.prompt_tokens
