"""In which order prompts wait at a router that places by slack, also when it cannot serve all of them in time.

The earliest deadline goes first. Where the engines cannot meet all deadlines, the longest prompts go behind until they
can meet the others'. For one machine no other choice is late less often.

Source: J. M. Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs", Management
Science 15(1), 1968; the form used here is T. J. Hodgson's. Several engines count as one that is as fast as they
together.

A prompt that is late in any case waits until no other does. It can be given a second deadline, and a share of the
prefill time until then. But where more comes than can be served, whatever late prompts get is missing for others:
their decodes make prefills slower, others are late for that, and in the end all of them are.
"""

from __future__ import annotations

import heapq
from typing import Final

from sluice_core.records import PrefillRequest
from sluice_core.scheduling.engine_state import get_view
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.waiting_order import Urgency, compute_urgency, get_urgency
from sluice_core.strategy_parameters import OverloadOrder, StrategyParameters

# Iterations that are under way or scheduled when a prompt comes to an engine. Without them, a prompt that waits until
# its last moment is in time for its router, and late on the engine.
_ITERATIONS_BEFORE: Final = 2
_MOST_CREDIT_S: Final = 1.0  # prefill time that late prompts may save up


class WaitingOrder:
    """Orders what waits at one router; mutable.

    Args:
        parameters: Of the strategy.
    """

    def __init__(self, parameters: StrategyParameters) -> None:
        self._late_ttft_factor = parameters.late_ttft_factor
        self._late_share = parameters.late_share
        self._puts_longest_last = parameters.overload_order == OverloadOrder.LONGEST_LAST
        # Of the fastest engine at the last pass: seconds per token, per squared token for attention, and per iteration.
        self._token_s = 0.0
        self._square_s = 0.0
        self._iteration_s = 0.0
        self._late_credit_s = _MOST_CREDIT_S if self._late_share else 0.0
        self._has_others = False

    def sort(self, now: float, waiting: list[PrefillRequest], engines: EngineTable) -> list[PrefillRequest]:
        """Sort what waits, the first to be placed first: O(n log n).

        Args:
            now: Seconds on the caller's clock.
            waiting: Requests in any order.
            engines: The engines.
        """
        self._has_others = False
        if len(waiting) < 2:
            return waiting
        self._token_s = min((entry[4] for entry in engines.order), default=0.0)
        self._square_s = min((entry[5] for entry in engines.order), default=0.0)
        self._iteration_s = min((entry[7] for entry in engines.order), default=0.0)
        takes_turns = any(request.turn for request in waiting)
        waiting.sort(key=lambda request: self._get_urgency(now, request, takes_turns=takes_turns))
        if takes_turns:
            return waiting  # those of owners, whoever is late
        late: list[PrefillRequest] = []
        others: list[PrefillRequest] = []
        for request in waiting:
            (late if self.is_late(now, request) else others).append(request)
        if late and self._late_share < 1.0:
            self._has_others = bool(others)
            is_first = bool(others) and self._late_credit_s > 0.0 and self._is_due_before(now, late[0], others[0])
            waiting = [late[0], *others, *late[1:]] if is_first else [*others, *late]
        return self._put_longest_last(now, waiting, engines) if self._puts_longest_last else waiting

    def compute_urgency(
        self, now: float, *, arrival_s: float, ttft_slo_s: float, prompt_tokens: int, priority: int
    ) -> Urgency:
        """Order a prompt, lowest first; not for recoveries.

        Args:
            now: Seconds on the caller's clock.
            arrival_s: Arrival at the router, on the same clock.
            ttft_slo_s: TTFT objective, in seconds.
            prompt_tokens: Tokens to compute.
            priority: Higher goes first.
        """
        due_s, turn = arrival_s + ttft_slo_s, 0
        if self._misses(now, due_s, prompt_tokens):
            due_s = arrival_s + self._late_ttft_factor * ttft_slo_s
            # Behind all others, also while they have credit: a pass looks at the most urgent alone, and must see these.
            turn = int(self._late_share < 1.0)
        return compute_urgency(is_recovery=False, next_token_due_s=0.0, priority=priority, arrival_s=due_s, turn=turn)

    def is_late(self, now: float, request: PrefillRequest) -> bool:
        """Say whether a prompt would miss its objective on an idle engine too."""
        return not request.is_recovery and self._misses(
            now, request.arrival_s + request.slo.ttft_s, request.prompt_tokens
        )

    def note_placed(self, now: float, request: PrefillRequest, execute_s: float) -> None:
        """Count the prefill time that late prompts take from others, and what they may take."""
        if not self.is_late(now, request):
            self._late_credit_s = min(_MOST_CREDIT_S, self._late_credit_s + self._late_share * execute_s)
        elif self._has_others:
            self._late_credit_s -= (1.0 - self._late_share) * execute_s

    def _is_due_before(self, now: float, late: PrefillRequest, other: PrefillRequest) -> bool:
        """Say whether a late prompt goes before one that is not, by its second deadline."""
        due_s = late.arrival_s + self._late_ttft_factor * late.slo.ttft_s
        urgency = compute_urgency(is_recovery=False, next_token_due_s=0.0, priority=late.priority, arrival_s=due_s)
        return urgency < self._get_urgency(now, other, takes_turns=False)

    def _misses(self, now: float, due_s: float, prompt_tokens: int) -> bool:
        return now + self._compute_alone_s(prompt_tokens) > due_s

    def _compute_alone_s(self, prompt_tokens: int) -> float:
        compute_s = prompt_tokens * (self._token_s + self._square_s * prompt_tokens)
        return _ITERATIONS_BEFORE * self._iteration_s + compute_s

    def _get_urgency(self, now: float, request: PrefillRequest, *, takes_turns: bool) -> Urgency:
        if request.is_recovery or request.turn:
            return get_urgency(request)
        if takes_turns:
            due_s = request.arrival_s + request.slo.ttft_s
            return compute_urgency(is_recovery=False, next_token_due_s=0.0, priority=request.priority, arrival_s=due_s)
        return self.compute_urgency(
            now,
            arrival_s=request.arrival_s,
            ttft_slo_s=request.slo.ttft_s,
            prompt_tokens=request.prompt_tokens,
            priority=request.priority,
        )

    def _put_longest_last(
        self, now: float, waiting: list[PrefillRequest], engines: EngineTable
    ) -> list[PrefillRequest]:
        """Put the longest prompts behind until the others meet their deadlines (Moore and Hodgson)."""
        own = [entry for entry in engines.order if not get_view(entry).is_of_others]
        if not own:
            return waiting
        rate = sum(1.0 / entry[4] for entry in own)
        square_s = sum(entry[5] for entry in own) / len(own) ** 2
        at_s = now + sum(max(0.0, entry[3] - now) / entry[4] for entry in own) / rate
        kept: list[tuple[float, int]] = []  # a heap, the longest first
        behind: set[int] = set()
        for position, request in enumerate(waiting):
            tokens = request.prompt_tokens
            work_s = tokens / rate + square_s * tokens * tokens
            at_s += work_s
            if request.is_recovery or self.is_late(now, request):
                continue
            heapq.heappush(kept, (-work_s, position))
            if at_s - work_s + self._compute_alone_s(tokens) > request.arrival_s + request.slo.ttft_s:
                longest_s, longest = heapq.heappop(kept)
                at_s += longest_s
                behind.add(longest)
        ahead = [request for position, request in enumerate(waiting) if position not in behind]
        return ahead + [waiting[position] for position in sorted(behind)]
