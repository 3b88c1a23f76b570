"""SLO arithmetic: TTFT and TPOT against objectives, and attainment over a sliding window.

TTFT ends with the first token at the router; TPOT includes every pause between the first and the last token; a
one-token answer has no TPOT and meets it. A rejected or failed request counts as finished and met nothing; one that
its client cancelled counts nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sluice_core.records import Slo

DEFAULT_ATTAINMENT: Final = 0.9  # share of requests that should meet both objectives, where nobody says
ATTAINMENT_WINDOW_S = 300.0  # met / finished over five minutes
_STEP_S = 5.0  # resolution of the window


class RequestEnd(StrEnum):
    """How a request ended, as attainment sees it."""

    FINISHED = "finished"
    FAILED = "failed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class SloOutcome:
    """Which objectives a request met."""

    met_ttft: bool
    met_tpot: bool

    @property
    def met_both(self) -> bool:
        """True when both objectives were met."""
        return self.met_ttft and self.met_tpot


MET_NOTHING = SloOutcome(met_ttft=False, met_tpot=False)


def compute_tpot_s(first_token_s: float, last_token_s: float, output_tokens: int) -> float | None:
    """Compute the time per output token, hand-off pauses included.

    Args:
        first_token_s: When the router received the first token, in seconds.
        last_token_s: When it received the last one.
        output_tokens: Tokens of the answer, at least 1.

    Returns:
        Seconds per token; None for one token.

    Raises:
        ValueError: No token, or the last one before the first.

    Source: (last - first token) / (output_tokens - 1), as vLLM's benchmarks define it.
    """
    if output_tokens < 1:
        raise ValueError(f"output_tokens is {output_tokens}, at least 1 is needed for a TPOT")
    if last_token_s < first_token_s:
        raise ValueError(f"last_token_s {last_token_s} is before first_token_s {first_token_s}")
    if output_tokens == 1:
        return None
    return (last_token_s - first_token_s) / (output_tokens - 1)


def is_tpot_met(tpot_s: float | None, tpot_slo_s: float) -> bool:
    """Say whether a TPOT meets its objective; None (one token) does."""
    return tpot_s is None or tpot_s <= tpot_slo_s


def check_slo(slo: Slo, ttft_s: float, tpot_s: float | None) -> SloOutcome:
    """Compare a finished request with its objectives, which are met at equality.

    Args:
        slo: The objectives fixed at admission.
        ttft_s: Time from arrival at the router to the first token, in seconds.
        tpot_s: Time per output token, in seconds; None (one token) counts as met.

    Returns:
        Which objectives were met.
    """
    return SloOutcome(met_ttft=ttft_s <= slo.ttft_s, met_tpot=is_tpot_met(tpot_s, slo.tpot_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SloCounts:
    """Requests that ended, and which objectives they met.

    Args:
        num_finished: Finished, failed and rejected requests; cancelled ones are left out.
        num_met_ttft: Of these, met TTFT.
        num_met_tpot: Of these, met TPOT.
        num_met_both: Of these, met both.
    """

    num_finished: int = 0
    num_met_ttft: int = 0
    num_met_tpot: int = 0
    num_met_both: int = 0

    def __add__(self, other: SloCounts) -> SloCounts:
        return SloCounts(
            num_finished=self.num_finished + other.num_finished,
            num_met_ttft=self.num_met_ttft + other.num_met_ttft,
            num_met_tpot=self.num_met_tpot + other.num_met_tpot,
            num_met_both=self.num_met_both + other.num_met_both,
        )

    def __sub__(self, other: SloCounts) -> SloCounts:
        return SloCounts(
            num_finished=self.num_finished - other.num_finished,
            num_met_ttft=self.num_met_ttft - other.num_met_ttft,
            num_met_tpot=self.num_met_tpot - other.num_met_tpot,
            num_met_both=self.num_met_both - other.num_met_both,
        )

    @property
    def attainment(self) -> float | None:
        """Share of requests that met both objectives; None before any ended."""
        return self.num_met_both / self.num_finished if self.num_finished else None


NO_REQUESTS = SloCounts()


def count_outcome(outcome: SloOutcome) -> SloCounts:
    """Count one ended request."""
    return SloCounts(
        num_finished=1,
        num_met_ttft=int(outcome.met_ttft),
        num_met_tpot=int(outcome.met_tpot),
        num_met_both=int(outcome.met_both),
    )


class SloWindow:
    """Counts per SLO class over a sliding window; mutable.

    Counts of five seconds share a step, so that memory is bounded whatever the request rate. A step leaves with its
    last
    request: every request of the window counts, and none counts for more than five seconds beyond it.

    Args:
        window_s: Length of the window, in seconds.
    """

    __slots__ = ("_steps", "window_s")

    def __init__(self, window_s: float = ATTAINMENT_WINDOW_S) -> None:
        self.window_s = window_s
        self._steps: deque[_WindowStep] = deque()

    def add(self, now: float, slo_class: str, counts: SloCounts) -> None:
        """Add what ended; calls come in the order of ``now``.

        Args:
            now: Seconds on the caller's monotonic clock.
            slo_class: Its class; empty for the default.
            counts: What ended.
        """
        if not self._steps or now - self._steps[-1].first_s >= _STEP_S:
            self._expire(now)
            self._steps.append(_WindowStep(now))
        step = self._steps[-1]
        step.last_s = now
        step.by_class[slo_class] = step.by_class.get(slo_class, NO_REQUESTS) + counts

    def sum_by_class(self, now: float) -> dict[str, SloCounts]:
        """Sum the window by class; classes without requests are left out.

        Args:
            now: Seconds on the caller's monotonic clock.
        """
        self._expire(now)
        totals: dict[str, SloCounts] = {}
        for step in self._steps:
            for slo_class, counts in step.by_class.items():
                totals[slo_class] = totals.get(slo_class, NO_REQUESTS) + counts
        return totals

    def _expire(self, now: float) -> None:
        while self._steps and self._steps[0].last_s < now - self.window_s:
            self._steps.popleft()


class _WindowStep:
    """Counts by class of at most five seconds; mutable, changed by ``SloWindow`` only."""

    __slots__ = ("by_class", "first_s", "last_s")

    def __init__(self, first_s: float) -> None:
        self.first_s = self.last_s = first_s
        self.by_class: dict[str, SloCounts] = {}


class AttainmentCounters:
    """Counts ended requests per SLO class, since the start and over a sliding window; mutable.

    Args:
        window_s: Length of the window, in seconds.

    Attributes:
        totals: Counts since the start, by class.
    """

    __slots__ = ("_window", "totals")

    def __init__(self, window_s: float = ATTAINMENT_WINDOW_S) -> None:
        self.totals: dict[str, SloCounts] = {}
        self._window = SloWindow(window_s)

    def record(self, now: float, slo_class: str, end: RequestEnd, outcome: SloOutcome = MET_NOTHING) -> None:
        """Count a request that ended; calls come in the order of ``now``.

        Args:
            now: Seconds on the caller's monotonic clock.
            slo_class: Its class; empty for the default.
            end: How it ended. Cancelled requests are left out; failed and rejected ones met nothing.
            outcome: What it met, for ``RequestEnd.FINISHED``.
        """
        if end is RequestEnd.CANCELLED:
            return
        counts = count_outcome(outcome if end is RequestEnd.FINISHED else MET_NOTHING)
        self.totals[slo_class] = self.totals.get(slo_class, NO_REQUESTS) + counts
        self._window.add(now, slo_class, counts)

    def window(self, now: float, slo_classes: Iterable[str] | None = None) -> SloCounts:
        """Sum the counts of the window.

        Args:
            now: Seconds on the caller's monotonic clock.
            slo_classes: Classes to sum; all when None.
        """
        by_class = self._window.sum_by_class(now)
        wanted = by_class.keys() if slo_classes is None else frozenset(slo_classes)
        total = NO_REQUESTS
        for slo_class, counts in by_class.items():
            if slo_class in wanted:
                total += counts
        return total
