"""Decodes that the next iteration leaves out: those of a look at all of them, and what finding them costs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from quiet_imports import import_quietly

from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters
from sluice_engine.core_messages import HandOffCommand, RequestExtras
from sluice_engine.request_tracker import RequestTracker, TrackedRequest
from sluice_engine.scheduling.scheduled_batch import ScheduledBatch


class Decode:
    """vLLM's record of a request, which counts how often it is looked at."""

    num_looks = 0

    def __init__(self, name: str, left: int) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = name, 100, left
        self.num_tokens = self._num_computed_tokens = 100
        self.num_output_placeholders, self.priority, self.arrival_time = 1, 0, 0.0
        self.num_output_tokens = 0

    @property
    def num_computed_tokens(self) -> int:
        Decode.num_looks += 1
        return self._num_computed_tokens

    def compute(self) -> None:
        self._num_computed_tokens += 1

    def is_ending(self) -> bool:
        """The condition of vLLM's ``schedule``."""
        in_flight = self.num_output_placeholders
        return bool(in_flight) and self._num_computed_tokens + 2 - in_flight >= self.num_prompt_tokens + self.max_tokens


def track(tracker: RequestTracker, request: Any, kind: RequestKind = RequestKind.DECODE) -> TrackedRequest:
    tracked = TrackedRequest(request=request, extras=RequestExtras(), kind=kind, arrival_s=0.0, user_priority=0)
    tracker.add(tracked)
    return tracked


def make_tracker() -> RequestTracker:
    return RequestTracker(get_strategy("taichi").make_engine(StrategyParameters()))


def test_decodes_far_from_their_end_are_not_looked_at() -> None:
    tracker = make_tracker()
    decodes = [Decode(f"decode {number}", left=60) for number in range(256)]
    for decode in decodes:
        track(tracker, decode)
    Decode.num_looks = 0
    for _ in range(50):
        assert tracker.ending.count() == 0
        for decode in decodes:
            decode.compute()
    assert Decode.num_looks == 0


@pytest.mark.parametrize("seed", range(20))
def test_they_are_those_of_a_look_at_all(seed: int) -> None:
    """Decodes join, pause, are to end sooner, are preempted and come back; one or two tokens are under way."""
    rng, tracker, found = random.Random(seed), make_tracker(), 0
    decodes: dict[str, tuple[Decode, TrackedRequest]] = {}
    for step in range(300):
        if rng.random() < 0.4:
            decode = Decode(f"decode {step}", left=rng.choice((1, 2, 5, 40)))
            decodes[decode.request_id] = (decode, track(tracker, decode))
        running = [pair for pair in decodes.values() if pair[1].kind is RequestKind.DECODE]
        expected = sum(decode.is_ending() for decode, _ in running)
        assert tracker.ending.count() == expected
        found += expected
        pauses = rng.random() < 0.2
        for decode, tracked in running:
            if decode.is_ending() and rng.random() < 0.7:
                tracker.discard(decode.request_id)
                del decodes[decode.request_id]
            elif rng.random() < 0.03:
                tracker.change_kind(tracked, RequestKind.RECOMPUTE)
            elif rng.random() < 0.05:
                decode.max_tokens = min(decode.max_tokens, decode.num_computed_tokens - decode.num_prompt_tokens + 1)
                tracker.ending.reconsider(decode.request_id)
            elif not pauses and not decode.is_ending():
                decode.compute()
            decode.num_output_placeholders = rng.choice((0, 1, 1, 1, 2))
        for _, tracked in decodes.values():
            if tracked.kind is RequestKind.RECOMPUTE and rng.random() < 0.3:
                tracker.change_kind(tracked, RequestKind.DECODE)
    assert found > 20


def test_a_decode_that_is_to_be_handed_off_ends_sooner() -> None:
    """One by a command, and one whose prefill ends here; both would have had 60 tokens more."""
    tracker, decodes = make_tracker(), [Decode(name, left=60) for name in "ab"]
    tracked = [track(tracker, decode) for decode in decodes]

    def begin(request: Any, num_output_tokens: int = 0) -> None:
        request.max_tokens = 1 + num_output_tokens

    def request_hand_off(_: str, request: Any, num_output_tokens: int) -> str:
        begin(request, num_output_tokens)
        return "accepted"

    scheduler: Any = SimpleNamespace(
        _hand_offs=SimpleNamespace(request=request_hand_off, begin=begin),
        _tracker=tracker,
        requests={decode.request_id: decode for decode in decodes},
    )
    assert tracker.ending.count() == 0
    command = HandOffCommand(request_id="a", num_output_tokens=0)
    mixin = import_quietly("sluice_engine.scheduling.scheduler").SluiceMixin
    assert mixin._request_hand_off(scheduler, command) == "accepted"
    assert tracker.ending.count() == 1
    batch = ScheduledBatch(started_s=0.0, new_decodes=tracked[1:])
    mixin._hand_off_prefills(scheduler, batch)
    assert tracker.ending.count() == 2
