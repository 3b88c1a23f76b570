"""Schedules the next iteration late while a moved request is about to arrive, so that it is in it.

An engine that schedules ahead makes the next iteration up as soon as one begins: whoever comes a moment later waits for
a whole iteration more. While the last tokens of a move are on their way, the engine therefore waits for them as long as
the iteration under way surely lasts, and then schedules as ever.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_engine.core_messages import IterationReport
    from sluice_engine.scheduling.scheduled_batch import ScheduledBatch

# How long a request is expected after its KV: two iterations of its source, and then some.
EXPECTED_S = 0.5
# Time before the end of an iteration at which the next one has to be made up: the host's part of an iteration.
LEAD_S = 0.003
LEAD_SHARE = 0.1
# Of the last iterations, those with at least this share of the work are like the one under way.
ALIKE_SHARE = 0.8
NUM_REMEMBERED = 16

Work = tuple[int, int, float]


class ExpectedArrivals:
    """Requests whose KV is here and whose last tokens are not, by the key of their grant."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def expect(self, key: str, now_s: float) -> None:
        """Expects a request from now on."""
        self._until_s[key] = now_s + EXPECTED_S

    def forget(self, key: str) -> None:
        """Does not expect it any more: it has come, or never will."""
        self._until_s.pop(key, None)

    def has_any(self, now_s: float) -> bool:
        """Says whether a request may come at any moment."""
        if not self._until_s:
            return False
        for key in [key for key, until_s in self._until_s.items() if until_s <= now_s]:
            del self._until_s[key]
        return bool(self._until_s)


class RecentIterations:
    """How long the last iterations took."""

    def __init__(self) -> None:
        self._last: list[Work] = []

    def note(self, report: IterationReport) -> None:
        """Notes an iteration that has ended."""
        self._last.append((report.prefill_tokens, report.num_decodes, report.duration_s))
        del self._last[:-NUM_REMEMBERED]

    def find_shortest_s(self, batch: ScheduledBatch) -> float:
        """Finds how long an iteration lasts at least, by those like it, or else by those with less work."""
        return find_shortest_s(self._last, batch.prefill_tokens, batch.num_decodes)


def find_shortest_s(last: Sequence[Work], prefill_tokens: int, num_decodes: int) -> float:
    """Finds the shortest of the iterations that are no larger, in seconds; 0: there is none.

    Args:
        last: Prefill tokens, decodes and seconds of iterations.
        prefill_tokens: Of the iteration in question.
        num_decodes: The same.
    """
    smaller = [work for work in last if work[0] <= prefill_tokens and work[1] <= num_decodes]
    alike = [
        work for work in smaller if work[0] >= ALIKE_SHARE * prefill_tokens and work[1] >= ALIKE_SHARE * num_decodes
    ]
    return min((work[2] for work in alike or smaller), default=0.0)


def hold(engine_core: Any) -> None:
    """Lets an engine's loop wait for arrivals before it schedules on; the plugin calls it once per turn.

    Args:
        engine_core: vLLM's ``EngineCoreProc``.
    """
    scheduler = engine_core.scheduler
    if not engine_core.batch_queue or not hasattr(scheduler, "find_wait_s"):
        return  # it does not schedule ahead, or nothing is under way
    while (wait_s := scheduler.find_wait_s()) > 0:
        try:
            message = engine_core.input_queue.get(timeout=wait_s)
        except queue.Empty:
            return
        engine_core._handle_client_request(*message)  # noqa: SLF001
