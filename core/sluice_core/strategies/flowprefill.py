"""FlowPrefill: the prefill with the earliest deadline that can still be met goes first, and preempts what runs.

Source: *FlowPrefill: Decoupling Preemption from Prefill Scheduling Granularity to Mitigate Head-of-Line Blocking in LLM
Serving* (arXiv:2602.16603), section 5.2. What runs is preempted where an iteration ends, and goes on later without
being computed again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sluice_core.latency import LatencyModel
from sluice_core.records import FlowParameters, PrefillOrder, RequestId
from sluice_core.scheduling.baselines import PLACEMENTS
from sluice_core.scheduling.batching import PRIORITY_HEAD_START_S, EngineBatch, EnginePolicy, PrefillSelector
from sluice_core.scheduling.decode_flow import FlowPolicy
from sluice_core.scheduling.slack_order import PrefillPredictor, QueuedPrefill, SlackOrder
from sluice_core.strategies.interface import RouterPolicy, SliderUse, Strategy
from sluice_core.strategies.parameters import BATCH_TOKEN_BUDGET, EARLY_REJECTION, WATERMARK
from sluice_core.strategies.roles import RoleEngine, RoleRouter


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
        deadline_s = arrival_s + ttft_slo_s
        prefill = QueuedPrefill(
            request_id,
            number=self._num_arrived,
            deadline_s=deadline_s,
            urgency_s=deadline_s - priority * PRIORITY_HEAD_START_S,
            tokens=tokens,
        )
        self._prefills[request_id] = prefill
        self._order.add(prefill)

    def remove(self, request_id: RequestId) -> None:
        """See ``PrefillSelector.remove``."""
        prefill = self._prefills.pop(request_id, None)
        if prefill is not None:
            self._order.remove(prefill)

    def rank_started(self) -> list[RequestId]:
        """See ``PrefillSelector.rank_started``."""
        return [prefill.request_id for prefill in self._order if prefill.num_computed_tokens]


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
        self.num_suspended = 0

    def add(self, request_id: RequestId, *, arrival_s: float, ttft_slo_s: float, priority: int, tokens: int) -> None:
        """See ``PrefillSelector.add``: an arrival is an event."""
        super().add(request_id, arrival_s=arrival_s, ttft_slo_s=ttft_slo_s, priority=priority, tokens=tokens)
        self._has_event = True

    def advance(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """See ``PrefillSelector.advance``: what is left has become less, and its slack with it."""
        prefill = self._prefills[request_id]
        self._order.remove(prefill)
        prefill.num_computed_tokens = num_computed_tokens
        self._order.add(prefill)

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
        chunk_size_tokens = engine.chunk_size_tokens or engine.last_chunk_size_tokens
        room_tokens = max(engine.block_size_tokens, chunk_size_tokens - engine.num_decodes)
        self._order.update(now, room_tokens, engine.num_decodes)
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


class FlowPrefillEngine(RoleEngine):
    """Selects prefills as ``EventDrivenSelector`` does; decodes go to D-heavy engines as under disaggregation.

    Args:
        flow: Which decodes move.
        batch_token_budget: G of Algorithm 1.
        order: The order of prompts.
        counts_decodes: See ``ChunkedPrefillPolicy``.
    """

    def __init__(self, flow: FlowPolicy, *, batch_token_budget: int, order: PrefillOrder, counts_decodes: bool) -> None:
        super().__init__(flow, counts_decodes=counts_decodes)
        self._batch_token_budget = batch_token_budget
        self._order = order

    def make_selector(self, latency: LatencyModel) -> PrefillSelector | None:
        """See ``EnginePolicy.make_selector``."""
        predictor = PrefillPredictor(latency)
        if self._order is PrefillOrder.CHUNKED_EDF:
            return DeadlineSelector(predictor)
        return EventDrivenSelector(predictor, self._batch_token_budget, self._order)


@dataclass(frozen=True, slots=True)
class FlowPrefillRules:
    """Makes the policies."""

    def make_router(
        self, strategy: Strategy, parameters: FlowParameters, rng: random.Random, num_records: int
    ) -> RouterPolicy:
        """See ``PolicyMaker.make_router``."""
        placement = PLACEMENTS[strategy.placement](parameters, rng, num_records)
        return RoleRouter(placement, _make_flow(strategy, parameters, rng))

    def make_engine(self, strategy: Strategy, parameters: FlowParameters, *, counts_decodes: bool) -> EnginePolicy:
        """See ``PolicyMaker.make_engine``."""
        return FlowPrefillEngine(
            _make_flow(strategy, parameters, random.Random(0)),  # noqa: S311 - engines pick no targets
            batch_token_budget=parameters.batch_token_budget,
            order=parameters.prefill_order,
            counts_decodes=counts_decodes,
        )


def _make_flow(strategy: Strategy, parameters: FlowParameters, rng: random.Random) -> FlowPolicy:
    return FlowPolicy(parameters, rng, moves_first_decodes=strategy.has_flow, degrades=False, flows_back=False)


FLOWPREFILL = Strategy(
    name="flowprefill",
    title="FlowPrefill",
    parameters=(BATCH_TOKEN_BUDGET, EARLY_REJECTION, WATERMARK),
    sliders=SliderUse(varies_ratio=True, varies_prefill_tokens=True, varies_decode_tokens=True),
    policies=FlowPrefillRules(),
    # Engines choose among all that came to them. A router that held prompts until the queue fits into the KV cache
    # would let urgent ones wait behind those that are late.
    placement="shortest_queue",
)
