"""What waits at the router: in which order it goes, and what of it one pass looks at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Final, TypeAlias, TypeVar

from sluice_core.records import PrefillRequest

MAX_ASSIGNED_AT_ONCE: Final = 256  # requests of one call of a router's policy
PRIORITY_HEAD_START_S: Final = 10.0  # one level of priority is worth this much earlier arrival
Urgency: TypeAlias = tuple[int, float, float]
_RECOVERY: Final = 0
_NEW: Final = 1
_T = TypeVar("_T")


def compute_urgency(
    *, is_recovery: bool, next_token_due_s: float, priority: int, arrival_s: float, turn: int = 0
) -> Urgency:
    """Order what waits, lowest first: recoveries by TPOT debt, then the others by turn and as engines order them.

    As there, a level of priority is worth a bounded head start, so that every request becomes first.

    Args:
        is_recovery: See ``PrefillRequest``, also for the others.
        next_token_due_s: See there.
        priority: See there.
        arrival_s: See there.
        turn: See there.
    """
    if is_recovery:
        return _RECOVERY, next_token_due_s, arrival_s
    return _NEW + turn, arrival_s - priority * PRIORITY_HEAD_START_S, arrival_s


def compute_allowed_s(ttft_slo_s: float, priority: int) -> float:
    """Compute how long after its arrival a prompt is due on engines that compute by deadline, in seconds."""
    return ttft_slo_s - priority * PRIORITY_HEAD_START_S


def find_allowed_s(request: PrefillRequest) -> float:
    """Find how long after its arrival a prompt is due; recoveries, which go first in any case, pass no other."""
    return math.inf if request.is_recovery else compute_allowed_s(request.slo.ttft_s, request.priority)


def get_urgency(request: PrefillRequest) -> Urgency:
    """See ``compute_urgency``."""
    return compute_urgency(
        is_recovery=request.is_recovery,
        next_token_due_s=request.next_token_due_s,
        priority=request.priority,
        arrival_s=request.arrival_s,
        turn=request.turn,
    )


def is_of_recovery(urgency: Urgency) -> bool:
    """Say whether an urgency is that of a recovery."""
    return urgency[0] == _RECOVERY


def select_urgent(waiting: Sequence[_T], urgency_of: Callable[[_T], Urgency]) -> Sequence[_T]:
    """Select what one pass looks at: all, or the most urgent recoveries, at most half of them, and then the others.

    Args:
        waiting: All that waits.
        urgency_of: Gives the order of one.
    """
    if len(waiting) <= MAX_ASSIGNED_AT_ONCE:
        return waiting
    recoveries = [item for item in waiting if urgency_of(item)[0] == _RECOVERY]
    others = [item for item in waiting if urgency_of(item)[0] != _RECOVERY]
    urgent = nsmallest(MAX_ASSIGNED_AT_ONCE // 2, recoveries, key=urgency_of)
    return urgent + nsmallest(MAX_ASSIGNED_AT_ONCE - len(urgent), others, key=urgency_of)
