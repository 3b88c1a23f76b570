"""The queue: each key once, back-off with bounds, nothing lost."""

from __future__ import annotations

import asyncio
import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sluice_operator.work_queue import MAX_BACKOFF_S, MIN_BACKOFF_S, Schedule, WorkQueue


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


def test_a_key_added_while_it_is_at_work_comes_up_afterwards() -> None:
    schedule = make_schedule()
    schedule.add("a", 0.0)
    assert schedule.take(0.0) == "a"
    schedule.add("a", 0.0)
    assert schedule.take(5.0) is None
    assert schedule.wait_s(5.0) is None
    schedule.finish("a")
    assert schedule.take(5.0) == "a"


def test_a_key_at_work_does_not_hold_up_others() -> None:
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


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32))
def test_the_pause_grows_and_stays_in_its_bounds(num_failures: int, seed: int) -> None:
    schedule: Schedule[str] = Schedule(random.Random(seed))
    pauses = [schedule.fail("a", 0.0) for _ in range(num_failures)]
    assert all(MIN_BACKOFF_S <= pause <= MAX_BACKOFF_S for pause in pauses)
    for number, pause in enumerate(pauses):
        longest = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** (number + 1))
        assert longest / 2 <= pause <= longest


def test_success_forgets_failures_and_the_server_may_ask_for_more_time() -> None:
    schedule = make_schedule()
    for _ in range(5):
        schedule.fail("a", 0.0)
    schedule.finish("a")
    assert schedule.fail("a", 0.0) <= 2 * MIN_BACKOFF_S
    assert schedule.fail("a", 0.0, least_s=77.0) == 77.0


class ScheduleMachine(RuleBasedStateMachine):
    """Whatever happens: a key that was added is at work or comes up at its time, and never twice at once."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule[int] = Schedule(random.Random(0))
        self.now = 0.0
        self.due: dict[int, float] = {}
        self.at_work: set[int] = set()

    @rule(key=st.integers(0, 4), after_s=st.sampled_from([0.0, 0.5, 3.0]))
    def add(self, key: int, after_s: float) -> None:
        self.schedule.add(key, self.now + after_s)
        self.due[key] = min(self.due.get(key, float("inf")), self.now + after_s)

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
        if is_failure:
            due_s = self.now + self.schedule.fail(key, self.now)
            self.due[key] = min(self.due.get(key, float("inf")), due_s)
        else:
            self.schedule.finish(key)

    @rule(step_s=st.sampled_from([0.1, 1.0, 400.0]))
    def pass_time(self, step_s: float) -> None:
        self.now += step_s

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.schedule) == len(self.due)


ScheduleMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduleMachine = ScheduleMachine.TestCase


async def test_the_queue_wakes_for_new_keys_and_for_time() -> None:
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
