"""Decodes whose last token is under way: the next iteration leaves them out. Found without a look at all others."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NONE = -1  # no entry is due then


class EndingDecodes:
    """Knows of each decode in how many iterations it may end at the soonest; most are looked at only then.

    A decode computes one token in an iteration at most, so it never ends sooner than it has tokens left.
    """

    def __init__(self) -> None:
        self._iteration = 0
        self._requests: dict[str, Request] = {}
        self._due: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def add(self, request: Request) -> None:
        """Takes a decode, also one that it has and that ends sooner from now on."""
        self._requests[request.request_id] = request
        self._push(request, self._iteration + 1 + max(0, count_left(request)))

    def remove(self, request_id: str) -> None:
        """Forgets a request; an unknown one is no error."""
        if self._requests.pop(request_id, None) is not None:
            del self._due[request_id]

    def reconsider(self, request_id: str) -> None:
        """Takes note that a request may end sooner, if it is a decode."""
        request = self._requests.get(request_id)
        if request is not None:
            self.add(request)

    def count(self) -> int:
        """Counts those that the next iteration leaves out; called once before each."""
        self._iteration += 1
        num_ending = 0
        looked_at = []
        while self._heap and self._heap[0][0] <= self._iteration:
            due, request_id = heappop(self._heap)
            if self._due.get(request_id) == due:  # else it has another due since, or is a second entry of it
                self._due[request_id] = _NONE
                looked_at.append(self._requests[request_id])
        for request in looked_at:
            num_ending += is_ending(request)
            self._push(request, self._iteration + max(1, count_left(request)))
        return num_ending

    def _push(self, request: Request, due: int) -> None:
        if self._due.get(request.request_id) != due:
            self._due[request.request_id] = due
            heappush(self._heap, (due, request.request_id))


def count_left(request: Request) -> int:
    """Counts the tokens that a decode has to compute until it may be one that ends."""
    return int(request.num_prompt_tokens + request.max_tokens - 1 - request.num_computed_tokens)


def is_ending(request: Request) -> bool:
    """Says whether a decode's last token comes with the iteration under way; the condition is that of ``schedule``."""
    in_flight = request.num_output_placeholders
    return bool(
        in_flight and request.num_computed_tokens + 2 - in_flight >= request.num_prompt_tokens + request.max_tokens
    )
