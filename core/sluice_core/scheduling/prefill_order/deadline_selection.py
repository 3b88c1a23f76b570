"""Prompts by deadline, as many as fill the largest iteration: chunked prefill with EDF."""

from __future__ import annotations

from sluice_core.records import RequestId
from sluice_core.scheduling.engine_policy import EngineBatch
from sluice_core.scheduling.prefill_order.ordered_selection import OrderedSelector
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor
from sluice_core.strategy_parameters import PrefillOrder


class DeadlineSelector(OrderedSelector):
    """Fills every iteration by deadline: what FlowPrefill is compared with (section 6.1, DistServe-CP2K and -CP8K).

    Args:
        predictor: Predicts nothing here.
    """

    def __init__(self, predictor: PrefillPredictor) -> None:
        super().__init__(predictor, PrefillOrder.CHUNKED_EDF)

    def advance(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """See ``PrefillSelector.advance``."""
        self._prefills[request_id].num_computed_tokens = num_computed_tokens

    def select(self, now: float, engine: EngineBatch) -> list[RequestId]:  # noqa: ARG002 - its order does not change
        """See ``PrefillSelector.select``: no more than fill the largest iteration."""
        selected: list[RequestId] = []
        num_tokens = 0
        for prefill in self._order:
            if num_tokens >= engine.max_batch_tokens:
                break
            selected.append(prefill.request_id)
            num_tokens += prefill.remaining_tokens
        return selected
