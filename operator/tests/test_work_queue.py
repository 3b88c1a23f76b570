"""The queue: each key once, back-off with bounds, nothing lost."""

from __future__ import annotations

import asyncio
import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sluice_operator.controller.work_queue import Schedule, WorkQueue

# What docs and users know: not taken from the code, so that a change of it shows.
EVENT_PAUSE_S, MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 0.5, 30.0


def make_schedule() -> Schedule[str]:
    return Schedule(random.Random(1))


def test_a_key_is_in_it_once() -> None:
    schedule = make_schedule()
    schedule.add("a", 1.0)
    schedule.add("a", 2.0)
    assert schedule.take(3.0) == "a"
    assert schedule.take(3.0) is None


def test_the_earlier_time_counts() -> None:
    schedule = make_schedule()
    schedule.add("a", 9.0)
    schedule.add("a", 2.0)
    assert schedule.take(1.0) is None
    assert schedule.wait_s(1.0) == 1.0
    assert schedule.take(2.0) == "a"
    assert schedule.take(10.0) is None


def test_a_key_added_while_it_is_processed_comes_up_afterwards() -> None:
    schedule = make_schedule()
    schedule.add("a", 0.0)
    assert schedule.take(0.0) == "a"
    schedule.add("a", 0.0)
    assert schedule.take(5.0) is None
    assert schedule.wait_s(5.0) is None
    schedule.finish("a")
    assert schedule.take(5.0) == "a"


def test_a_processed_key_does_not_hold_up_others() -> None:
    schedule = make_schedule()
    for key in "ab":
        schedule.add(key, 0.0)
    assert schedule.take(0.0) == "a"
    schedule.add("a", 0.0)
    assert schedule.take(0.0) == "b"


def test_the_age_is_that_of_the_key_due_longest() -> None:
    schedule = make_schedule()
    schedule.add("a", 3.0)
    schedule.add("b", 5.0)
    assert schedule.age_s(9.0) == 6.0
    assert schedule.age_s(1.0) == 0.0
    assert schedule.take(9.0) == "a"
    assert schedule.take(9.0) == "b"
    assert schedule.age_s(700.0) == 691.0, "work that hangs"
    schedule.finish("a")
    schedule.finish("b")
    assert schedule.age_s(700.0) == 0.0


def fail_when_due(schedule: Schedule[str], now: float, num_failures: int) -> tuple[float, list[float]]:
    """Fails a key whenever it comes up by itself; returns the time after the last failure, and the pauses."""
    pauses = []
    schedule.add("a", now)
    for _ in range(num_failures):
        now += schedule.wait_s(now) or 0.0
        assert schedule.take(now) == "a"
        pauses.append(schedule.fail("a", now))
    return now, pauses


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32))
def test_the_pause_grows_and_stays_in_its_bounds(num_failures: int, seed: int) -> None:
    _, pauses = fail_when_due(Schedule(random.Random(seed)), 0.0, num_failures)
    for number, pause in enumerate(pauses):
        longest = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** (number + 1))
        assert longest / 2 <= pause <= longest


def test_success_forgets_failures_and_the_server_may_ask_for_more_time() -> None:
    schedule = make_schedule()
    now, _ = fail_when_due(schedule, 0.0, 5)
    now += schedule.wait_s(now) or 0.0
    assert schedule.take(now) == "a"
    schedule.finish("a")
    _, (pause,) = fail_when_due(schedule, now, 1)
    assert pause <= 2 * MIN_BACKOFF_S
    assert make_schedule().fail("a", 0.0, min_pause_s=77.0) == 77.0


def test_an_event_brings_a_backed_off_key_forward_but_not_at_once() -> None:
    schedule = make_schedule()
    now, pauses = fail_when_due(schedule, 0.0, 9)
    assert pauses[-1] > MAX_BACKOFF_S / 2
    schedule.add("a", now)
    assert schedule.wait_s(now) == EVENT_PAUSE_S


def test_an_event_before_or_during_a_failure_waits_like_one_after_it() -> None:
    schedule = make_schedule()
    now, _ = fail_when_due(schedule, 0.0, 9)
    now += schedule.wait_s(now) or 0.0
    assert schedule.take(now) == "a"
    schedule.add("a", now)
    assert schedule.fail("a", now) == EVENT_PAUSE_S


def test_no_event_is_faster_than_the_server_allows() -> None:
    schedule = make_schedule()
    schedule.add("a", 0.0)
    schedule.take(0.0)
    schedule.fail("a", 0.0, min_pause_s=9.0)
    schedule.add("a", 1.0)
    assert schedule.wait_s(1.0) == 8.0


def test_tries_that_events_caused_neither_count_nor_put_off_the_next_one() -> None:
    schedule = make_schedule()
    now, pauses = fail_when_due(schedule, 0.0, 5)
    promised_s = now + pauses[-1]
    while now + EVENT_PAUSE_S < promised_s:
        schedule.add("a", now)
        now += schedule.wait_s(now) or 0.0
        assert schedule.take(now) == "a"
        assert now + schedule.fail("a", now) == promised_s
    now = promised_s
    assert schedule.take(now) == "a"
    # The sixth that counts, however many there were.
    assert schedule.fail("a", now) <= MIN_BACKOFF_S * 2**6


class ScheduleMachine(RuleBasedStateMachine):
    """Whatever happens: a key that was added is at work or comes up at its time, and never twice at once.

    Unless it backs off: then it comes up no later than its next try, and not before ``least``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule[int] = Schedule(random.Random(0))
        self.now = 0.0
        self.due: dict[int, float] = {}
        self.at_work: set[int] = set()
        self.least: dict[int, float] = {}

    @rule(key=st.integers(0, 4), after_s=st.sampled_from([0.0, 0.5, 3.0]))
    def add(self, key: int, after_s: float) -> None:
        self.schedule.add(key, self.now + after_s)
        due_s = max(self.now + after_s, self.least.get(key, 0.0))
        self.due[key] = min(self.due.get(key, float("inf")), due_s)

    @rule()
    def take(self) -> None:
        ready = {key for key, due_s in self.due.items() if due_s <= self.now and key not in self.at_work}
        key = self.schedule.take(self.now)
        assert (key is None) == (not ready)
        if key is not None:
            assert self.due[key] == min(self.due[other] for other in ready)
            del self.due[key]
            self.at_work.add(key)

    @rule(key=st.integers(0, 4), is_failure=st.booleans())
    def end(self, *, key: int, is_failure: bool) -> None:
        if key not in self.at_work:
            return
        self.at_work.discard(key)
        if not is_failure:
            self.schedule.finish(key)
            self.least.pop(key, None)
            return
        self.due[key] = self.now + self.schedule.fail(key, self.now)
        self.least[key] = min(self.now + EVENT_PAUSE_S, self.due[key])
        assert 0.0 < self.due[key] - self.now <= MAX_BACKOFF_S

    @rule(step_s=st.sampled_from([0.1, 1.0, 400.0]))
    def pass_time(self, step_s: float) -> None:
        self.now += step_s

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.schedule) == len(self.due)


ScheduleMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduleMachine = ScheduleMachine.TestCase


async def test_the_queue_returns_when_a_key_is_added_or_due() -> None:
    queue: WorkQueue[str] = WorkQueue(random.Random(1), time.monotonic)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("late", 0.02)
    queue.add("now")
    assert await waiting == "now"
    assert await queue.get() == "late"
    queue.add("now")
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.finish("now")
    assert await waiting == "now"
    assert len(queue) == 0


def test_the_wait_is_for_the_earliest_key_that_nobody_works_on() -> None:
    schedule: Schedule[str] = Schedule(random.Random(1))
    assert schedule.wait_s(0.0) is None
    for key, due_s in (("a", 9.0), ("b", 5.0), ("c", 7.0)):
        schedule.add(key, due_s)
    assert schedule.wait_s(2.0) == 3.0
    assert schedule.wait_s(6.0) == 0.0
    assert schedule.take(6.0) == "b"
    schedule.add("b", 0.0)
    assert schedule.wait_s(6.0) == 1.0, "b is at work"
    assert schedule.age_s(8.5) == 2.5
    schedule.finish("b")
    assert schedule.wait_s(6.0) == 0.0
    assert schedule.age_s(8.5) == 8.5
