"""The prompts of an engine in an order that their slack changes; selectors take from it."""

from __future__ import annotations

from sluice_core.records import RequestId
from sluice_core.scheduling.engine_policy import EngineBatch, PrefillSelector
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor, QueuedPrefill, SlackOrder
from sluice_core.scheduling.waiting_order import compute_allowed_s
from sluice_core.strategy_parameters import PrefillOrder


class OrderedSelector(PrefillSelector):
    """The prompts of one engine in a ``SlackOrder``; its heirs select from it.

    Args:
        predictor: Predicts what is left of a prefill.
        order: The order of prompts.
    """

    def __init__(self, predictor: PrefillPredictor, order: PrefillOrder) -> None:
        self._order = SlackOrder(predictor, order)
        self._prefills: dict[RequestId, QueuedPrefill] = {}
        self._num_arrived = 0

    def add(self, request_id: RequestId, *, arrival_s: float, ttft_slo_s: float, priority: int, tokens: int) -> None:
        """See ``PrefillSelector.add``."""
        self._num_arrived += 1
        allowed_s = compute_allowed_s(ttft_slo_s, priority)
        prefill = QueuedPrefill(
            request_id,
            number=self._num_arrived,
            deadline_s=arrival_s + ttft_slo_s,
            urgency_s=arrival_s + allowed_s,
            allowed_s=allowed_s,
            tokens=tokens,
        )
        self._prefills[request_id] = prefill
        self._order.add(prefill)

    def advance(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """See ``PrefillSelector.advance``: what is left has become less, and its slack with it."""
        prefill = self._prefills[request_id]
        self._order.remove(prefill)
        prefill.num_computed_tokens = num_computed_tokens
        self._order.add(prefill)

    def remove(self, request_id: RequestId) -> None:
        """See ``PrefillSelector.remove``."""
        prefill = self._prefills.pop(request_id, None)
        if prefill is not None:
            self._order.remove(prefill)

    def rank_started(self) -> list[RequestId]:
        """See ``PrefillSelector.rank_started``."""
        return [prefill.request_id for prefill in self._order if prefill.num_computed_tokens]

    def _update_order(self, now: float, engine: EngineBatch) -> None:
        """Find out who has become late on the engine as it is.

        Without prompts predictions stay as they are, however often it is asked: who is late must not depend on that.
        """
        if not self._prefills:
            return
        chunk_size_tokens = engine.chunk_size_tokens or engine.last_chunk_size_tokens
        room_tokens = max(engine.block_size_tokens, chunk_size_tokens - engine.num_decodes)
        self._order.update(now, room_tokens, engine.num_decodes)
