"""Whose turn it is among owners whose requests wait: start-time fair queueing by tokens.

Each request starts, in virtual time, when its owner's last one has finished, or now; it takes its tokens over the
owner's weight. The least start goes first. So owners with requests to spare get tokens in proportion to their weights,
within one request of each, and every request gets its turn. An owner that was idle neither saves up nor pays for it.

Source: Goyal, Vin, Cheng: Start-Time Fair Queueing (SIGCOMM 1996), section 2, with tokens as length. As the virtual
token counters of Sheng et al.: Fairness in Serving Large Language Models (OSDI 2024), section 3, it counts prompts when
they are placed, and outputs when they are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final, TypeVar

from sluice_core.scheduling.waiting_order import MAX_ASSIGNED_AT_ONCE, Urgency, is_of_recovery, select_urgent

_MAX_OWNERS: Final = 1024  # owners kept at most
_T = TypeVar("_T")


class FairShare:
    """What each owner has had; mutable."""

    def __init__(self) -> None:
        self._virtual_now = 0.0
        self._finishes: dict[str, float] = {}

    def start_of(self, owner: str) -> float:
        """Return the virtual start of an owner's next request."""
        return max(self._virtual_now, self._finishes.get(owner, 0.0))

    def place(self, owner: str, tokens: int, weight: int) -> None:
        """Count a prompt that is placed.

        Args:
            owner: Whose it is.
            tokens: Its length.
            weight: The owner's share.
        """
        start = self.start_of(owner)
        self._virtual_now = start
        self._finishes[owner] = start + tokens / weight
        if len(self._finishes) > _MAX_OWNERS:
            self._forgive()

    def _forgive(self) -> None:
        """Forget the half of the owners that owes less, so that what is kept is bounded."""
        finishes = sorted(self._finishes.values())
        self._virtual_now = max(self._virtual_now, finishes[len(finishes) // 2])
        self._finishes = {name: finish for name, finish in self._finishes.items() if finish > self._virtual_now}

    def charge(self, owner: str, tokens: int, weight: int) -> None:
        """Count an output that has ended; see ``place``."""
        self._finishes[owner] = self.start_of(owner) + tokens / weight

    def select(
        self,
        waiting: Sequence[_T],
        owner_of: Callable[[_T], str],
        urgency_of: Callable[[_T], Urgency],
        tokens_of: Callable[[_T], int],
        weight_of: Callable[[str], int],
    ) -> list[_T]:
        """Select what one pass looks at, in order: recoveries as ever, then owners in turn, each by its own urgency.

        Args:
            waiting: All that waits.
            owner_of: Gives the owner of one.
            urgency_of: Gives its order within its owner.
            tokens_of: Gives its length.
            weight_of: Gives the share of an owner.
        """
        recoveries = [item for item in waiting if is_of_recovery(urgency_of(item))]
        others = [item for item in waiting if not is_of_recovery(urgency_of(item))]
        room = MAX_ASSIGNED_AT_ONCE if not recoveries else MAX_ASSIGNED_AT_ONCE // 2
        selected = sorted(select_urgent(recoveries, urgency_of), key=urgency_of)[:room]
        queues: dict[str, list[tuple[Urgency, int]]] = {}
        for index, item in enumerate(others):
            queues.setdefault(owner_of(item), []).append((urgency_of(item), index))
        turns: list[tuple[float, Urgency, str]] = []
        for owner, queue in queues.items():
            heapify(queue)
            turns.append((self.start_of(owner), queue[0][0], owner))
        heapify(turns)
        while turns and len(selected) < MAX_ASSIGNED_AT_ONCE:
            start, _, owner = turns[0]
            queue = queues[owner]
            item = others[heappop(queue)[1]]
            selected.append(item)
            if queue:
                heapreplace(turns, (start + tokens_of(item) / weight_of(owner), queue[0][0], owner))
            else:
                heappop(turns)
        return selected
