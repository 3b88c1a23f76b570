"""Prompts by deadline, as many as fill the largest iteration, whatever has started."""

from __future__ import annotations

import math
from typing import Final

from sluice_core.records import RequestId
from sluice_core.scheduling.engine_policy import NONE_LATE, EngineBatch, LatePrefills
from sluice_core.scheduling.engine_state import DuePrefills
from sluice_core.scheduling.prefill_order.ordered_selection import OrderedSelector

# Prompts that are due within one step are reported as one, and of later ones no more than so many.
DUE_STEP_S: Final = 0.25
MOST_DUE: Final = 8


class DeadlineSelector(OrderedSelector):
    """Fills every iteration in the order of prompts as it is then.

    By deadline alone it is what FlowPrefill is compared with (section 6.1, DistServe-CP2K and -CP8K). Sluice's engines
    put those last that will be late.
    """

    def select(self, now: float, engine: EngineBatch) -> list[RequestId]:
        """See ``PrefillSelector.select``: no more than fill the largest iteration."""
        self._update_order(now, engine)
        selected: list[RequestId] = []
        num_tokens = 0
        for prefill in self._order:
            if num_tokens >= engine.max_batch_tokens:
                break
            selected.append(prefill.request_id)
            num_tokens += prefill.remaining_tokens
        return selected

    def count_late(self, now: float) -> LatePrefills:
        """See ``PrefillSelector.count_late``."""
        late = self._order.find_late(now)
        if not late:
            return NONE_LATE
        return LatePrefills(
            len(late),
            sum(prefill.remaining_tokens for prefill in late),
            sum(prefill.remaining_work for prefill in late),
        )

    def list_due(self) -> list[DuePrefills]:
        """See ``PrefillSelector.list_due``: ``MOST_DUE`` at most, of which the last holds the rest.

        By deadline alone none: routers of what FlowPrefill is compared with know of no deadlines.
        """
        due: list[DuePrefills] = []
        if not self._order.puts_late_last:
            return due
        for prefill in self._order.list_timely():
            due_s = prefill.urgency_s
            if due_s < math.inf:
                due_s = math.floor(due_s / DUE_STEP_S) * DUE_STEP_S
            allowed_s, requests, tokens, work = prefill.allowed_s, 1, prefill.remaining_tokens, prefill.remaining_work
            if due and (len(due) == MOST_DUE or (due_s <= due[-1].due_s and allowed_s == due[-1].allowed_s)):
                last = due.pop()
                due_s, allowed_s = last.due_s, min(allowed_s, last.allowed_s)
                requests, tokens, work = last.requests + 1, last.tokens + tokens, last.attention_work + work
            due.append(DuePrefills(due_s, allowed_s, requests, tokens, work))
        return due

    def find_next_late_s(self) -> float:
        """See ``PrefillSelector.find_next_late_s``."""
        return self._order.find_next_late_s()

    def find_pace(self, now: float) -> float:
        """See ``PrefillSelector.find_pace``."""
        if self._order.find_late(now):
            return math.inf
        pace = 0.0
        num_tokens = 0
        for prefill in self._order:
            left_s = prefill.deadline_s - now
            if left_s <= 0.0:
                return math.inf
            num_tokens += prefill.remaining_tokens
            pace = max(pace, num_tokens / left_s)
        return pace
