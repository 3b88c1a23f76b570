"""When the next iteration is made up later than at once: while a moved request is about to arrive."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from sluice_engine.scheduling.expected_arrivals import EXPECTED_S, ExpectedArrivals, find_shortest_s, hold

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
