"""One pass over waiting prefills: which engines could run a prompt, and when its first token would be out.

Source: TaiChi, section 3.4, Algorithm 2, lines 2 to 9; ``prefill_placement`` has the rest of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from sluice_core.latency import compute_attention_work, compute_prefill_s
from sluice_core.records import EngineId, Hold, Place, PrefillRequest
from sluice_core.scheduling.engine_state import EngineView, Entry, Passable, count_passed_s, get_view
from sluice_core.scheduling.engine_table import RECOVERY_BURST_S, EngineTable
from sluice_core.scheduling.waiting_order import find_allowed_s
from sluice_core.strategy_parameters import EarlyRejection

_INFINITY: Final = math.inf  # looking it up in the module costs as much as a few engines of the walk


class AssignPass:
    """One call of ``assign``: its arguments, and what it has learned about holds so far.

    Within a call engines only fill up, so what did not fit once is not tried again: a long queue of waiting requests
    costs one walk, not one per request.

    Args:
        now: Seconds on the caller's clock.
        engines: The engines.
        early_rejection: What the parameters say of prompts that no engine serves in time.

    Attributes:
        chosen: Where the last prompt was placed, as it stood before.
    """

    __slots__ = (
        "_holds",
        "_is_blocked_by_kv",
        "_late_reason",
        "_least_kv_held",
        "_least_late_held",
        "chosen",
        "early_rejection",
        "engines",
        "now",
    )

    def __init__(self, now: float, engines: EngineTable, early_rejection: EarlyRejection) -> None:
        self.early_rejection = early_rejection
        self.now = now
        self.engines = engines
        self.chosen: Entry | None = None
        self._least_kv_held = _INFINITY
        self._least_late_held = _INFINITY
        self._late_reason = ""
        self._is_blocked_by_kv = False
        self._holds: set[str] = set()

    def find_hold(self, request: PrefillRequest) -> Hold | None:
        """Hold a request that cannot fare better than one held before it in this call."""
        if self._least_kv_held <= request.prompt_tokens or (self._is_blocked_by_kv and not request.is_recovery):
            return Hold(request_id=request.request_id, reason="kv")
        if "recovery_cap" in self._holds and request.is_recovery:
            return Hold(request_id=request.request_id, reason="recovery_cap")
        if (
            self._least_late_held <= request.prompt_tokens
            and not request.is_recovery
            and _is_overdue(self.now, request)
        ):
            return Hold(request_id=request.request_id, reason=self._late_reason)
        return None

    def note_hold(self, request: PrefillRequest, hold: Hold) -> None:
        """Learn from a hold what cannot fit either in the rest of this pass."""
        if request.excluded:
            return  # it could not use every engine, so it says nothing about other requests
        if hold.reason == "kv" and self.early_rejection is EarlyRejection.REJECT:
            return  # those behind it may have to be rejected, and soon
        self._holds.add(hold.reason)
        if hold.reason == "kv":
            self._least_kv_held = min(self._least_kv_held, request.prompt_tokens)
            # A prompt that waits for KV beyond its TTFT SLO is not overtaken any more: large prompts would starve
            # behind small ones, which always find room first.
            due_s = request.next_token_due_s if request.is_recovery else request.arrival_s
            is_overdue = self.now > due_s + request.slo.ttft_s
            self._is_blocked_by_kv = self._is_blocked_by_kv or (is_overdue and self._can_ever_fit(request))

    def note_late_held(self, request: PrefillRequest, reason: str) -> None:
        """Let late prompts that are as long wait too, for the rest of this pass: under overload there are hundreds.

        Args:
            request: A late prompt, for which the engine that is done first has no room now.
            reason: Why it is held.
        """
        if not request.excluded and self.early_rejection is not EarlyRejection.REJECT:
            self._least_late_held = min(self._least_late_held, request.prompt_tokens)
            self._late_reason = reason

    def list_candidates(self, request: PrefillRequest) -> Sequence[Entry]:
        """List the engines that can take a prefill and are not excluded, in ascending order of their queues."""
        if not request.excluded:
            return self.engines.order
        return [entry for entry in self.engines.order if get_view(entry).engine_id not in request.excluded]

    def explain_no_candidate(self) -> str:
        """Say why there is no candidate."""
        is_full = any(view.blocked_reason == "room" for view in self.engines.blocked.values())
        return "room" if is_full else "no_engine"

    def walk(self, request: PrefillRequest, candidates: Sequence[Entry], deadline_s: float) -> tuple[int, int]:
        """Find the first feasible engine (TaiChi, section 3.4, Algorithm 2, lines 2 to 9).

        The hot loop: it repeats ``estimate_done_s`` in place, and only where a bound from below, which needs half the
        arithmetic, does not already exclude the engine.

        Returns:
            Positions among the candidates, -1 for none: the first feasible one; and, when there is none, of those with
            enough KV blocks the one where the request would be done first.
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
            # Lines 4 and 5: E as in ``latency.prefill_time``, and T.
            num_iterations = -(-tokens // room_tokens)
            done_s = start_s + tokens * (token_s + square_s * tokens) + num_iterations * iteration_s + latency_s
            if done_s < deadline_s:  # line 6: Q + E + T < the TTFT SLO
                return position, -1
            if done_s < least_late_s:
                least_late, least_late_s = position, done_s
        return -1, least_late

    def find_least_late(self, request: PrefillRequest, candidates: Sequence[Entry]) -> int:
        """Find where a prompt with cached tokens would be done first; -1 when none has the KV blocks."""
        least_late, least_late_s = -1, _INFINITY
        for position, entry in enumerate(candidates):
            view = get_view(entry)
            if view.available_tokens < request.prompt_tokens or self.bound_done_s(request, entry) >= least_late_s:
                continue
            done_s = self.estimate_done_s(request, view)
            if done_s < least_late_s:
                least_late, least_late_s = position, done_s
        return least_late

    def bound_done_s(self, request: PrefillRequest, entry: Entry) -> float:
        """Bound ``estimate_done_s`` from below, by a part of its arithmetic."""
        view, now = get_view(entry), self.now
        tokens, free_at_s = _count_uncached(request, view.engine_id), find_free_at_s(request, view)
        start_s = free_at_s if free_at_s > now else now  # noqa: FURB136 - as in ``walk``
        return start_s + tokens * (entry[4] + entry[5] * tokens)

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
        queue_s, execute_s, transfer_s = estimate_prefill(self.now, request, view)
        return self.now + queue_s + execute_s + transfer_s

    def place(
        self, request: PrefillRequest, entry: Entry, reason: str, *, is_feasible: bool, is_passed: bool = False
    ) -> Place:
        """Record a placement in the table and make the decision.

        Args:
            request: The prompt.
            entry: Where it goes.
            reason: Why.
            is_feasible: Whether it will be in time.
            is_passed: Whether prompts of shorter objectives that are due sooner pass it there.
        """
        view = get_view(entry)
        engine_id = view.engine_id
        queue_s, execute_s, transfer_s = estimate_prefill(self.now, request, view)
        self.chosen = entry
        passable: Passable | None = None
        if is_passed:
            allowed_s = find_allowed_s(request)
            passable = request.arrival_s + allowed_s, allowed_s, execute_s
        self.engines.record_placement(
            engine_id,
            request.request_id,
            self.now,
            tokens=_count_uncached(request, engine_id),
            kv_tokens=request.prompt_tokens,
            execute_s=execute_s,
            is_recovery=request.is_recovery,
            passable=passable,
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


def find_free_at_s(request: PrefillRequest, view: EngineView) -> float:
    """Find when an engine is done with what it computes before a prompt, on the caller's clock.

    What the prompt passes there still fills up the iteration in which it ends.
    """
    if not view.later:
        return view.free_at_s
    allowed_s = find_allowed_s(request)
    passed_s = count_passed_s(view, request.arrival_s + allowed_s, allowed_s)
    beside_tokens = -_count_uncached(request, view.engine_id) % max(1, view.room_tokens)
    return view.free_at_s - max(0.0, passed_s - beside_tokens * view.per_token_s)


def estimate_prefill(now: float, request: PrefillRequest, view: EngineView) -> tuple[float, float, float]:
    """Estimate Q, E and T of a prompt on an engine, in seconds.

    Source: TaiChi, section 3.4, Algorithm 2, lines 3 to 5.
    """
    prompt_tokens, tokens = request.prompt_tokens, _count_uncached(request, view.engine_id)
    if view.room_tokens <= 0:
        return _INFINITY, _INFINITY, 0.0
    execute_s = compute_prefill_s(
        per_token_s=view.per_token_s,
        per_work_s=view.per_work_s,
        per_iteration_s=view.per_iteration_s,
        tokens=tokens,
        attention_work=compute_attention_work(tokens, prompt_tokens - tokens),
        room_tokens=view.room_tokens,
    )
    transfer_s = view.transfer_latency_s + view.transfer_per_token_s * prompt_tokens
    return max(0.0, find_free_at_s(request, view) - now), execute_s, transfer_s


def record_prefill(now: float, request: PrefillRequest, engines: EngineTable, engine_id: EngineId) -> None:
    """Record a prefill that goes to an engine of which nobody has a choice; the caller submits it."""
    view = engines[engine_id].view
    assert view is not None
    _, execute_s, _ = estimate_prefill(now, request, view)
    engines.record_placement(
        engine_id,
        request.request_id,
        now,
        tokens=_count_uncached(request, engine_id),
        kv_tokens=request.prompt_tokens,
        execute_s=execute_s if execute_s < _INFINITY else 0.0,  # it takes no prompts any more
        is_recovery=request.is_recovery,
    )


def _count_uncached(request: PrefillRequest, engine_id: EngineId) -> int:
    """Count the tokens to compute on an engine: the last one always is, for its logits."""
    cached = request.cached_tokens
    return max(1, request.prompt_tokens - cached.get(engine_id, 0)) if cached else request.prompt_tokens


def _is_overdue(now: float, request: PrefillRequest) -> bool:
    """Say whether a prompt is late wherever it goes: its objective has passed."""
    return now >= request.arrival_s + request.slo.ttft_s
