"""What the scheduler knows of each request beyond vLLM's own record: its class, its place in the order, its sums.

vLLM keeps waiting requests in a heap ordered by ``(priority, arrival_time)``, and preempts the running request with the
largest pair. The tracker writes the batch policy's order into those two fields, only while no heap holds the request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice_core.records import RequestId
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_engine.core_encoding import decode_extras
from sluice_engine.ending_decodes import EndingDecodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.request import Request

    from sluice_core.latency import LatencyModel
    from sluice_core.scheduling.engine_policy import EnginePolicy, PrefillSelector
    from sluice_engine.core_messages import RequestExtras

# Classes whose tokens count as queued prefill.
PREFILL_KINDS = frozenset(
    {RequestKind.RECOMPUTE, RequestKind.RECOVERY, RequestKind.STARTED_PREFILL, RequestKind.NEW_PROMPT}
)
# Classes that vLLM takes before all prompts.
RECOMPUTED_KINDS = frozenset({RequestKind.RECOMPUTE, RequestKind.RECOVERY})
# Classes of prompts that have no token yet and were not preempted.
PROMPT_KINDS = frozenset({RequestKind.STARTED_PREFILL, RequestKind.NEW_PROMPT})


@dataclass(slots=True)
class TrackedRequest:
    """A request on this engine; mutable, changed by the scheduler and the tracker only.

    Args:
        request: vLLM's record.
        extras: What came with it.
        kind: Class in the batch policy's order.
        arrival_s: Arrival at the router, on the machine's monotonic clock.
        user_priority: Higher goes first.
        first_token_s: When the client got its first token, on the same clock; None before it.
        pull_deadline_s: When a pull that has not started is given up.
        is_moved_in: Its KV came from another engine.
        num_brought_tokens: Tokens of its prompt that another engine has computed as a first part; 0: none.
        selected_place: Its place among the prompts that the policy has selected; None: it has not.
        counted_tokens: Prefill tokens that the sums hold for it.
        counted_work: Attention work that the sums hold for it.
    """

    request: Request
    extras: RequestExtras
    kind: RequestKind
    arrival_s: float
    user_priority: int
    first_token_s: float | None = None
    pull_deadline_s: float = 0.0
    is_moved_in: bool = False
    num_brought_tokens: int = 0
    selected_place: int | None = None
    counted_tokens: int = 0
    counted_work: float = 0.0


def track_request(request: Request, now_s: float) -> TrackedRequest:
    """Reads what came with a request.

    Args:
        request: vLLM's record; no queue holds it yet.
        now_s: Monotonic time.
    """
    extras = decode_extras(request.sampling_params.extra_args)
    return TrackedRequest(
        request=request,
        extras=extras,
        kind=RequestKind.NEW_PROMPT,
        arrival_s=now_s if extras.arrival_s is None else extras.arrival_s,
        user_priority=request.priority,
        first_token_s=extras.first_token_s,
    )


class RequestTracker:
    """All requests that vLLM's scheduler has, finished ones left out.

    Args:
        policy: Gives the orders.

    Attributes:
        selector: Selects prompts; None: the policy orders them by its key.
        by_id: The requests; read it, and change it through the methods.
        queued_prefill_tokens: Sum of what they have not computed yet, pulls and decodes left out.
        queued_attention_work: The attention work of that.
        ending: Finds the decodes that end.
        decode_context_tokens: Sum of the decodes' contexts in the newest iteration, without those that have left since.
    """

    def __init__(self, policy: EnginePolicy) -> None:
        self.policy = policy
        self.selector: PrefillSelector | None = None
        self.queued_prefill_tokens = 0
        self.queued_attention_work = 0.0
        self.decode_context_tokens = 0
        self.ending = EndingDecodes()
        self.by_id: dict[str, TrackedRequest] = {}
        self._ids_of_kind: dict[RequestKind, dict[str, TrackedRequest]] = {kind: {} for kind in RequestKind}

    def count(self, kind: RequestKind) -> int:
        """Requests of a class."""
        return len(self._ids_of_kind[kind])

    def of_kind(self, kind: RequestKind) -> Iterator[TrackedRequest]:
        """Requests of a class, oldest change first; a copy, so that they may change while it is read."""
        return iter(list(self._ids_of_kind[kind].values()))

    def peek_recomputed(self, waiting: Any) -> Request | None:
        """Finds the request to compute anew that vLLM's queue has before all prompts; None: it has none."""
        if not waiting:
            return None
        request: Request = waiting.peek_request()
        return request if self.by_id[request.request_id].kind in RECOMPUTED_KINDS else None

    @property
    def num_queued(self) -> int:
        """Requests with prefill tokens not yet computed."""
        return sum(self.count(kind) for kind in PREFILL_KINDS)

    def add(self, tracked: TrackedRequest) -> None:
        """Begins to track a request that no queue of vLLM holds yet, and places it."""
        self.by_id[tracked.request.request_id] = tracked
        self._join_kind(tracked)
        self.recount(tracked)
        self._tell_selector(tracked, None)
        self.place(tracked)

    def discard(self, request_id: str) -> TrackedRequest | None:
        """Ends tracking a request."""
        tracked = self.by_id.pop(request_id, None)
        if tracked is not None:
            self._leave_kind(tracked)
            if self.selector is not None:
                self.selector.remove(RequestId(request_id))
            self._count(tracked, 0, 0.0)
        return tracked

    def change_kind(self, tracked: TrackedRequest, kind: RequestKind) -> None:
        """Moves a request to another class; ``place`` it when no heap holds it."""
        self._leave_kind(tracked)
        before, tracked.kind = tracked.kind, kind
        self._join_kind(tracked)
        self._tell_selector(tracked, before)
        self.recount(tracked)

    def adopt(self, policy: EnginePolicy, latency: LatencyModel) -> None:
        """Takes a new policy; ``place`` every request while no heap holds it.

        Args:
            policy: The policy.
            latency: How long the engine's iterations take.
        """
        self.policy = policy
        self.selector = policy.make_selector(latency)
        for tracked in self.by_id.values():
            tracked.selected_place = None
            self._tell_selector(tracked, None)

    def note_progress(self, tracked: TrackedRequest) -> None:
        """Brings sums and selector up to date with what a prefill has computed."""
        self._tell_selector(tracked, tracked.kind)
        self.recount(tracked)

    def _tell_selector(self, tracked: TrackedRequest, before: RequestKind | None) -> None:
        """Tells the selector of a request; ``before`` is the class that it had, None for a new one."""
        selector, request_id = self.selector, RequestId(tracked.request.request_id)
        if selector is None:
            return
        if tracked.kind not in PROMPT_KINDS:
            selector.remove(request_id)
            return
        if before not in PROMPT_KINDS:
            selector.add(
                request_id,
                arrival_s=tracked.arrival_s,
                ttft_slo_s=tracked.extras.ttft_slo_s or math.inf,
                priority=tracked.user_priority,
                tokens=tracked.request.num_tokens,
            )
        if tracked.kind is RequestKind.STARTED_PREFILL:
            selector.advance(request_id, tracked.request.num_computed_tokens)

    def _join_kind(self, tracked: TrackedRequest) -> None:
        self._ids_of_kind[tracked.kind][tracked.request.request_id] = tracked
        if tracked.kind is RequestKind.DECODE:
            self.ending.add(tracked.request)

    def _leave_kind(self, tracked: TrackedRequest) -> None:
        del self._ids_of_kind[tracked.kind][tracked.request.request_id]
        if tracked.kind is RequestKind.DECODE:
            self.ending.remove(tracked.request.request_id)
            self.decode_context_tokens -= tracked.request.num_computed_tokens

    def recount(self, tracked: TrackedRequest) -> None:
        """Brings the sums up to date with what the request has computed."""
        if tracked.kind not in PREFILL_KINDS:
            self._count(tracked, 0, 0.0)
            return
        context = max(tracked.request.num_computed_tokens, tracked.num_brought_tokens)
        remaining = max(0, tracked.request.num_tokens - context)
        self._count(tracked, remaining, remaining * (context + remaining / 2))

    def place(self, tracked: TrackedRequest) -> None:
        """Writes the waiting order into vLLM's fields."""
        if tracked.selected_place is not None and tracked.kind is RequestKind.NEW_PROMPT:
            kind, order = int(RequestKind.STARTED_PREFILL), float(tracked.selected_place)
        else:
            kind, order = self.policy.order_key(tracked.kind, tracked.arrival_s, tracked.user_priority)
        tracked.request.priority = int(kind)
        tracked.request.arrival_time = order

    def running_key(self, request: Request) -> tuple[int, float]:
        """Key of vLLM's running list: by class, then victims last."""
        return int(self.by_id[request.request_id].kind), request.arrival_time

    def place_running(self, tracked: TrackedRequest) -> None:
        """Writes the victim order into vLLM's fields."""
        tracked.request.priority = RequestKind.DECODE
        tracked.request.arrival_time = self.policy.victim_key(tracked.arrival_s, tracked.user_priority)

    def _count(self, tracked: TrackedRequest, tokens: int, work: float) -> None:
        self.queued_prefill_tokens += tokens - tracked.counted_tokens
        self.queued_attention_work = max(0.0, self.queued_attention_work + work - tracked.counted_work)
        tracked.counted_tokens = tokens
        tracked.counted_work = work
