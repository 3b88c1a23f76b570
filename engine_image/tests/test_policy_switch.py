# ruff: noqa: PLC0415  (vLLM takes nine seconds to import)
"""A new policy of the engine: every request gets its place in the new order, and none is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine_harness
import pytest

from sluice_core.scheduling.batching.chunked_prefill import ChunkedPrefillPolicy
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_engine.core_messages import RequestExtras
from sluice_engine.request_tracker import RequestTracker, TrackedRequest
from sluice_engine.scheduling.prefill_selection import PrefillSelection

pytestmark = pytest.mark.engine


class NewestFirst:
    """Orders alone; the compiled base class takes no interpreted subclass."""

    def order_key(self, kind: RequestKind, arrival_s: float, priority: int) -> tuple[int, float]:
        return int(kind), -arrival_s

    def victim_key(self, arrival_s: float, priority: int) -> float:
        return -arrival_s

    def make_selector(self, latency: object) -> None:
        return None


class WaitingRequest(SimpleNamespace):
    """Ordered as vLLM's requests are."""

    def __lt__(self, other: WaitingRequest) -> bool:
        return bool((self.priority, self.arrival_time) < (other.priority, other.arrival_time))

    __hash__ = object.__hash__


def test_a_new_policy_orders_what_waits_and_what_runs() -> None:
    engine_harness.import_vllm()
    from vllm.v1.core.sched.request_queue import PriorityRequestQueue

    from sluice_engine.scheduling.scheduler import SluiceMixin

    tracker = RequestTracker(ChunkedPrefillPolicy())
    queues: dict[str, Any] = {"waiting": PriorityRequestQueue(), "kv_holding_waiting": PriorityRequestQueue()}
    running = []
    for number in range(9):
        request = WaitingRequest(
            request_id=str(number), num_computed_tokens=0, num_tokens=8, priority=0, num_prompt_tokens=8, max_tokens=4
        )
        tracked = TrackedRequest(
            request=request,  # type: ignore[arg-type]
            extras=RequestExtras(),
            kind=(RequestKind.NEW_PROMPT, RequestKind.JOINING, RequestKind.DECODE)[number // 3],
            arrival_s=float(number),
            user_priority=0,
        )
        tracker.add(tracked)
        if number < 6:
            queues["waiting" if number < 3 else "kv_holding_waiting"].add_request(request)
        else:
            tracker.place_running(tracked)
            running.append(request)
    policy = NewestFirst()
    selection = PrefillSelection(tracker, kv_usage=None)  # type: ignore[arg-type]  # the policy selects nothing
    scheduler = SimpleNamespace(
        _tracker=tracker, _selection=selection, _plan=SimpleNamespace(policy=policy), running=running, **queues
    )
    assert [request.request_id for request in scheduler.waiting] == ["0", "1", "2"]
    SluiceMixin._adopt_policy(scheduler)
    assert tracker.policy is policy
    assert [request.request_id for request in scheduler.waiting] == ["2", "1", "0"]
    assert [request.request_id for request in scheduler.kv_holding_waiting] == ["5", "4", "3"]
    assert [request.request_id for request in sorted(running, key=tracker.running_key)] == ["8", "7", "6"]
