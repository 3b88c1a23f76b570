"""Which requests are late before their first token: what a run that may give up need not wait for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sluice_core.sim.requests import RequestState, SimRequest


class TtftDeadlines:
    """The TTFT deadlines of a run; mutable, changed by ``mark_late`` only.

    Args:
        requests: The requests.

    Attributes:
        next_s: The earliest deadline that has not passed yet; infinite after the last.
    """

    __slots__ = ("_by_deadline", "_position", "next_s")

    def __init__(self, requests: Sequence[SimRequest]) -> None:
        self._by_deadline = sorted(requests, key=_deadline_of)
        self._position = 0
        self.next_s = _deadline_of(self._by_deadline[0]) if requests else math.inf

    def mark_late(self, now: float) -> int:
        """Mark the requests whose deadline has passed without a first token.

        Args:
            now: Seconds of the simulated clock.

        Returns:
            How many there are that had not ended yet.
        """
        num_late = 0
        while self.next_s < now:
            request = self._by_deadline[self._position]
            is_open = request.first_token_s < 0.0 and request.state is not RequestState.REJECTED
            # The same subtraction as in TTFT: rounded, the sum may be below a TTFT that just meets the objective.
            if is_open and now - request.arrival_s > request.ttft_slo_s:
                request.has_missed_ttft = True
                num_late += 1
            self._position += 1
            has_more = self._position < len(self._by_deadline)
            self.next_s = _deadline_of(self._by_deadline[self._position]) if has_more else math.inf
        return num_late


def _deadline_of(request: SimRequest) -> float:
    return request.arrival_s + request.ttft_slo_s
