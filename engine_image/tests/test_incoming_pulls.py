"""Requests that arrive with KV elsewhere: their classes, which pulls are late, what is counted; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.strategies import DEFAULT_STRATEGY
from sluice_core.strategy_parameters import StrategyParameters
from sluice_engine.core_messages import RequestExtras
from sluice_engine.kv_transfer.kv_handles import MalformedHandleError
from sluice_engine.scheduling.incoming_pulls import PULL_START_S, IncomingPulls
from sluice_engine.scheduling.request_tracker import RequestTracker, TrackedRequest

NOW_S = 100.0


class Connector:
    """Refuses the handle ``malformed``."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def start_pull(self, request: Any, transfer_params: str) -> None:
        if transfer_params == "malformed":
            raise MalformedHandleError("no handle")
        request.kv_transfer_params = {"do_remote_prefill": True, "handle": transfer_params}

    def cancel_pull(self, request: Any) -> None:
        self.cancelled.append(request.request_id)


class Engine:
    """The pulls of an engine, and its requests."""

    def __init__(self) -> None:
        self.connector: Any = Connector()
        self.tracker = RequestTracker(DEFAULT_STRATEGY.make_engine(StrategyParameters()))
        self.pulls = IncomingPulls(self.connector, self.tracker)

    def arrive(self, name: str, now_s: float = NOW_S, **extras: Any) -> TrackedRequest:
        request: Any = SimpleNamespace(
            request_id=name, num_tokens=300, num_computed_tokens=0, kv_transfer_params={"from": "a router"}
        )
        tracked = TrackedRequest(
            request=request,
            extras=RequestExtras(**extras),
            kind=RequestKind.NEW_PROMPT,
            arrival_s=now_s,
            user_priority=0,
        )
        tracked.kind = self.pulls.classify(tracked, now_s)
        self.tracker.add(tracked)
        return tracked


@pytest.mark.parametrize(
    ("extras", "kind", "num_recomputed"),
    [
        ({}, RequestKind.NEW_PROMPT, 0),
        ({"is_recovery": True}, RequestKind.RECOVERY, 0),
        ({"output_token_ids": [5]}, RequestKind.RECOVERY, 0),
        ({"transfer_params": "handle", "output_token_ids": [5]}, RequestKind.JOINING, 0),
        ({"transfer_params": "handle", "is_recovery": True}, RequestKind.JOINING, 0),
        ({"transfer_params": "malformed"}, RequestKind.RECOMPUTE, 1),
    ],
)
def test_class_of_an_arriving_request(extras: dict[str, Any], kind: RequestKind, num_recomputed: int) -> None:
    engine = Engine()
    tracked = engine.arrive("a", **extras)
    assert tracked.kind is kind
    assert engine.pulls.num_recomputed == num_recomputed
    # What a router sent there never reaches vLLM.
    handle = {"do_remote_prefill": True, "handle": "handle"} if kind is RequestKind.JOINING else None
    assert tracked.request.kv_transfer_params == handle


def test_a_pull_that_has_not_started_in_time_is_given_up_and_recomputes_in_its_place() -> None:
    engine = Engine()
    late = engine.arrive("late", NOW_S, transfer_params="handle")
    started = engine.arrive("started", NOW_S, transfer_params="handle")
    started.request.kv_transfer_params["do_remote_prefill"] = False
    engine.arrive("without parameters", NOW_S, transfer_params="handle").request.kv_transfer_params = None
    engine.arrive("younger", NOW_S + 0.5, transfer_params="handle")
    engine.arrive("prompt", NOW_S)
    assert list(engine.pulls.find_late(NOW_S + PULL_START_S - 0.01)) == []
    found = list(engine.pulls.find_late(NOW_S + PULL_START_S))
    assert found == [late]
    engine.pulls.cancel(late)
    assert engine.connector.cancelled == ["late"]
    assert (late.kind, engine.pulls.num_recomputed) == (RequestKind.RECOMPUTE, 1)
    assert late.request.priority == int(RequestKind.RECOMPUTE)
    assert list(engine.pulls.find_late(NOW_S + PULL_START_S)) == []


@pytest.mark.parametrize(
    ("has_failed", "kind", "counts"), [(False, RequestKind.JOINING, (1, 0)), (True, RequestKind.RECOMPUTE, (0, 1))]
)
def test_end_of_a_pull_is_counted(*, has_failed: bool, kind: RequestKind, counts: tuple[int, int]) -> None:
    engine = Engine()
    tracked = engine.arrive("a", transfer_params="handle")
    engine.pulls.finish(tracked, has_failed=has_failed)
    assert (engine.pulls.num_moved_in, engine.pulls.num_recomputed) == counts
    assert (tracked.kind, tracked.is_moved_in) == (kind, not has_failed)
    assert engine.tracker.queued_prefill_tokens == (300 if has_failed else 0)


def observe(pulls: IncomingPulls, num_bytes: list[int], durations_s: list[float]) -> float:
    data = {"bytes_transferred": num_bytes, "transfer_duration": durations_s}
    pulls.observe_rate(SimpleNamespace(data=data))
    return pulls.bytes_per_s


def test_newer_transfers_weigh_a_fifth_of_the_rate_and_empty_ones_nothing() -> None:
    pulls = Engine().pulls
    pulls.observe_rate(None)
    pulls.observe_rate(SimpleNamespace(data={}))
    assert pulls.bytes_per_s == 0.0
    assert observe(pulls, [600, 400], [0.25, 0.25]) == 2000.0
    assert observe(pulls, [3000], [1.0]) == pytest.approx(2200.0)
    assert observe(pulls, [0], [1.0]) == pytest.approx(2200.0)
    assert observe(pulls, [3000], [0.0]) == pytest.approx(2200.0)
    assert observe(pulls, [], []) == pytest.approx(2200.0)
    assert observe(pulls, [1], [10.0]) == pytest.approx(2200.0 - 0.2 * (2200.0 - 0.1))
