"""Requests that arrive with KV elsewhere: their classes, which pulls are late, what is counted; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters
from sluice_engine.core_messages import NUM_TOKENS_KEY, PulledPart, RequestExtras
from sluice_engine.kv_transfer.incoming_pulls import PULL_START_S, IncomingPulls
from sluice_engine.kv_transfer.kv_handles import MalformedHandleError
from sluice_engine.request_tracker import RequestTracker, TrackedRequest

NOW_S = 100.0
BLOCK = 16


class Connector:
    """Refuses the handle ``malformed``."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def start_pull(self, request: Any, transfer_params: str) -> None:
        if transfer_params == "malformed":
            raise MalformedHandleError("no handle")
        num_tokens = int(transfer_params) if transfer_params.isdigit() else request.num_tokens - 1
        request.kv_transfer_params = {"do_remote_prefill": True, "handle": transfer_params, NUM_TOKENS_KEY: num_tokens}

    def cancel_pull(self, request: Any) -> None:
        self.cancelled.append(request.request_id)


class Engine:
    """The pulls of an engine, and its requests."""

    def __init__(self) -> None:
        self.connector: Any = Connector()
        self.tracker = RequestTracker(get_strategy("taichi").make_engine(StrategyParameters()))
        self.told: list[PulledPart] = []
        self.pulls = IncomingPulls(self.connector, self.tracker, self.told.append, BLOCK)

    def arrive(self, name: str, now_s: float = NOW_S, num_copied_tokens: int = 0, **extras: Any) -> TrackedRequest:
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
        tracked.kind = self.pulls.classify(tracked, now_s, num_copied_tokens)
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
    handle = {"do_remote_prefill": True, "handle": "handle", NUM_TOKENS_KEY: 299}
    assert tracked.request.kv_transfer_params == (handle if kind is RequestKind.JOINING else None)
    assert not engine.told


@pytest.mark.parametrize(
    ("num_brought", "num_copied", "kind"),
    [
        (200, 0, RequestKind.JOINING),
        (200, 192, RequestKind.STARTED_PREFILL),
        (200, 200, RequestKind.STARTED_PREFILL),
        (200, 208, RequestKind.STARTED_PREFILL),
        (200, 128, RequestKind.JOINING),
        (15, 0, RequestKind.STARTED_PREFILL),  # less than a block is computed
        (16, 0, RequestKind.JOINING),
        (298, 0, RequestKind.JOINING),
        (299, 288, RequestKind.JOINING),  # but for one token: as any request that moves
    ],
)
def test_a_prompt_that_brings_its_first_part_waits_for_what_has_not_come_ahead(
    num_brought: int, num_copied: int, kind: RequestKind
) -> None:
    engine = Engine()
    tracked = engine.arrive("a", num_copied_tokens=num_copied, transfer_params=str(num_brought), grant_key="1.7")
    assert tracked.kind is kind
    assert tracked.num_brought_tokens == (0 if num_brought == 299 else num_brought)
    is_here = kind is RequestKind.STARTED_PREFILL
    assert (tracked.request.kv_transfer_params is None) is is_here
    assert engine.told == ([PulledPart(key="1.7", num_tokens=num_brought)] if is_here else [])
    assert engine.tracker.queued_prefill_tokens == (300 - num_brought if is_here else 0)
    assert engine.pulls.num_moved_in == is_here


@pytest.mark.parametrize("how", ["comes", "fails", "late"])
def test_the_rest_of_a_prompt_is_a_prefill_once_its_first_part_has_come_and_the_router_hears_of_it(how: str) -> None:
    engine = Engine()
    tracked = engine.arrive("a", transfer_params="200", grant_key="1.7")
    if how == "late":
        engine.pulls.cancel(tracked)
    else:
        engine.pulls.finish(tracked, has_failed=how == "fails")
    assert tracked.kind is (RequestKind.STARTED_PREFILL if how == "comes" else RequestKind.RECOMPUTE)
    part = PulledPart(key="1.7", num_tokens=200, reason="" if how == "comes" else "failed")
    assert engine.told == [part]
    assert engine.tracker.queued_prefill_tokens == (100 if how == "comes" else 300)
    assert not tracked.is_moved_in


def test_a_malformed_handle_of_a_first_part_is_told_so_that_its_kv_is_released() -> None:
    engine = Engine()
    assert engine.arrive("a", transfer_params="malformed", grant_key="1.7").kind is RequestKind.RECOMPUTE
    assert engine.told == [PulledPart(key="1.7", num_tokens=0, reason="handle")]


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
