"""When the next iteration is made up later than at once: while a moved request is about to arrive."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from sluice_engine.scheduling import iteration_timer
from sluice_engine.scheduling.expected_arrivals import EXPECTED_S, ExpectedArrivals, find_shortest_s, hold
from sluice_engine.scheduling.iteration_timer import IterationTimer
from sluice_engine.scheduling.scheduled_batch import ScheduledBatch

DECODES, MIXED = (0, 4, 0.020), (512, 4, 0.060)


@pytest.mark.parametrize(
    ("last", "prefill_tokens", "num_decodes", "shortest_s"),
    [
        ([], 0, 4, 0.0),
        ([DECODES, (0, 4, 0.021)], 0, 4, 0.020),
        # One with prefill tokens lasts as long as its like, and at least as long as one without.
        ([DECODES, MIXED], 512, 4, 0.060),
        ([DECODES], 512, 4, 0.020),
        # Larger ones say nothing.
        ([MIXED, (0, 5, 0.022)], 0, 4, 0.0),
        ([(0, 1, 0.010), DECODES], 0, 4, 0.020),
    ],
)
def test_an_iteration_lasts_as_long_as_the_shortest_of_its_like(
    last: list[tuple[int, int, float]], prefill_tokens: int, num_decodes: int, shortest_s: float
) -> None:
    assert find_shortest_s(last, prefill_tokens, num_decodes) == shortest_s


def test_a_request_is_expected_until_it_comes_or_its_time_is_over() -> None:
    arrivals = ExpectedArrivals()
    assert not arrivals.has_any(0.0)
    arrivals.expect("a", 0.0)
    arrivals.expect("b", 0.1)
    arrivals.forget("a")
    arrivals.forget("nobody")
    assert arrivals.has_any(EXPECTED_S)
    assert not arrivals.has_any(EXPECTED_S + 0.1)


class Core:
    """An engine's loop whose scheduler wants to wait this often."""

    def __init__(self, waits_s: list[float], messages: list[str], *, is_busy: bool = True) -> None:
        self.batch_queue = ["iteration"] if is_busy else []
        self.input_queue: queue.Queue[Any] = queue.Queue()
        for message in messages:
            self.input_queue.put((message, None))
        self.handled: list[str] = []
        self._waits_s = waits_s
        self.scheduler = SimpleNamespace(find_wait_s=lambda: self._waits_s.pop(0))

    def _handle_client_request(self, message: str, _: None) -> None:
        self.handled.append(message)


@pytest.mark.parametrize(
    ("waits_s", "is_busy", "handled"),
    [
        ([0.0], True, []),
        # Each message may be the one: the scheduler is asked again.
        ([1.0, 1.0, -0.1], True, ["a", "b"]),
        ([1.0, 1.0, 0.001], True, ["a", "b"]),
        ([1.0], False, []),
    ],
)
def test_the_loop_takes_messages_in_for_as_long_as_it_waits(
    waits_s: list[float], *, is_busy: bool, handled: list[str]
) -> None:
    core = Core(waits_s, ["a", "b"], is_busy=is_busy)
    hold(core)
    assert core.handled == handled


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The timer's clock."""
    clock = SimpleNamespace(now_s=10.0)
    monkeypatch.setattr(iteration_timer, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def start(timer: IterationTimer, clock: SimpleNamespace, **shape: int) -> Any:
    output: Any = SimpleNamespace()
    timer.start(output, ScheduledBatch(started_s=clock.now_s, **shape))
    return output


@pytest.mark.parametrize(("shortest_s", "lead_s"), [(0.1, 0.01), (0.02, 0.003)], ids=["a tenth", "the hosts part"])
def test_the_next_iteration_is_made_up_a_little_before_the_one_under_way_can_end(clock, shortest_s, lead_s) -> None:
    timer = IterationTimer()
    assert timer.find_wait_s() == 0.0
    first = start(timer, clock, num_decodes=1)
    # Nothing says how long it takes.
    assert timer.find_wait_s() <= 0.0
    clock.now_s += shortest_s
    timer.stop(first)
    # The timer knows an iteration by its output, which lives as long.
    outputs = [start(timer, clock, num_decodes=1)]
    clock.now_s += 0.01
    assert timer.find_wait_s() == pytest.approx(shortest_s - lead_s - 0.01)
    outputs.append(start(timer, clock, num_decodes=1))
    assert timer.find_wait_s() == 0.0


def test_the_rest_of_the_iterations_under_way_is_what_they_take_less_what_has_passed(clock) -> None:
    timer = IterationTimer()
    latency: Any = SimpleNamespace(estimate_shape_s=lambda shape: 0.02 * shape.num_decodes)
    assert timer.estimate_rest_s(latency) == (0, 0.0)
    first = start(timer, clock, num_decodes=2)
    clock.now_s += 0.01
    assert timer.estimate_rest_s(latency) == (1, pytest.approx(0.03))
    start(timer, clock, num_decodes=1)
    assert timer.estimate_rest_s(latency) == (2, pytest.approx(0.05))
    clock.now_s += 0.05
    timer.stop(first)
    # The second one began when the first ended, not when it was scheduled.
    assert timer.estimate_rest_s(latency) == (1, pytest.approx(0.02))
    clock.now_s += 1.0
    assert timer.estimate_rest_s(latency) == (1, 0.0)
