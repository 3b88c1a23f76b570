"""Prompts by deadline, as many as fill the largest iteration, whatever has started."""

from __future__ import annotations

from sluice_core.records import RequestId
from sluice_core.scheduling.engine_policy import EngineBatch
from sluice_core.scheduling.prefill_order.ordered_selection import OrderedSelector


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
