"""The prefill with the earliest deadline that can still be met runs, and preempts others when a prompt comes or ends.

Source: FlowPrefill (arXiv:2602.16603), section 5.2. What runs is preempted where an iteration ends, and goes on later
without being computed again.
"""

from __future__ import annotations

from sluice_core.records import RequestId
from sluice_core.scheduling.engine_policy import EngineBatch
from sluice_core.scheduling.prefill_order.ordered_selection import OrderedSelector
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor, QueuedPrefill
from sluice_core.strategy_parameters import PrefillOrder


class EventDrivenSelector(OrderedSelector):
    """Algorithms 1 and 2 (FlowPrefill, section 5.2), for one engine.

    The execution E of Algorithm 2 is ``_running``: a request H and those batched with it. It is reconsidered when a
    prompt has arrived or ended, at the next iteration. Preempted, its prompts that have started (Q_p) keep their KV,
    and the others wait again (Q_w).

    Args:
        predictor: Predicts what is left of a prefill.
        batch_token_budget: G of Algorithm 1.
        order: The order of prompts.
    """

    def __init__(
        self, predictor: PrefillPredictor, batch_token_budget: int, order: PrefillOrder = PrefillOrder.S_EDF
    ) -> None:
        super().__init__(predictor, order)
        self._predictor = predictor
        self._batch_token_budget = batch_token_budget
        self._running: list[QueuedPrefill] = []
        self._selected: list[RequestId] = []
        self._has_event = False

    def add(self, request_id: RequestId, *, arrival_s: float, ttft_slo_s: float, priority: int, tokens: int) -> None:
        """See ``PrefillSelector.add``: an arrival is an event."""
        super().add(request_id, arrival_s=arrival_s, ttft_slo_s=ttft_slo_s, priority=priority, tokens=tokens)
        self._has_event = True

    def remove(self, request_id: RequestId) -> None:
        """See ``PrefillSelector.remove``: the end of a prefill is an event."""
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return
        super().remove(request_id)
        if prefill in self._running:
            self._run([other for other in self._running if other is not prefill])
        self._has_event = True

    def select(self, now: float, engine: EngineBatch) -> list[RequestId]:
        """See ``PrefillSelector.select``."""
        if self._has_event:
            self._has_event = False
            self._reconsider(now, engine)
        return self._selected

    def _reconsider(self, now: float, engine: EngineBatch) -> None:
        """Schedule once (Algorithm 2, lines 7 to 26)."""
        self._update_order(now, engine)
        head = self._order.first()
        if head is None or head in self._running:  # line 16: H is E
            return
        if any(prefill.num_computed_tokens for prefill in self._running):  # lines 17 to 19
            self.num_suspended += 1
        self._run([head] if head.num_computed_tokens else self._batch(now, head))

    def _run(self, running: list[QueuedPrefill]) -> None:
        self._running = running
        self._selected = [prefill.request_id for prefill in running]

    def _batch(self, now: float, head: QueuedPrefill) -> list[QueuedPrefill]:
        """Batch the highest-priority prompt with others that wait (Algorithm 1)."""
        batch = [head]
        remaining_s = head.deadline_s - now
        num_tokens, work = head.tokens, head.remaining_work
        for prefill in self._order:
            # Nothing more fits: the rest of the candidates need not be looked at.
            if num_tokens + 1 >= self._batch_token_budget or self._predictor.predict_s(num_tokens, work) >= remaining_s:
                break
            if prefill is head or prefill.num_computed_tokens:
                continue
            more_tokens, more_work = num_tokens + prefill.tokens, work + prefill.remaining_work
            batch_s = self._predictor.predict_s(more_tokens, more_work)
            if remaining_s > batch_s and more_tokens < self._batch_token_budget:
                batch.append(prefill)
                num_tokens, work = more_tokens, more_work
        return batch
