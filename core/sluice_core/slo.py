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

from sluice_core.records import Slo

ATTAINMENT_WINDOW_S = 300.0  # met / finished over five minutes
_BUCKET_S = 5.0  # resolution of the window: memory is bounded whatever the request rate


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


def check_slo(slo: Slo, ttft_s: float, tpot_s: float | None) -> SloOutcome:
    """Compare a finished request with its objectives, which are met at equality.

    Args:
        slo: The objectives fixed at admission.
        ttft_s: Time from arrival at the router to the first token, in seconds.
        tpot_s: Time per output token, in seconds; None (one token) counts as met.

    Returns:
        Which objectives were met.
    """
    return SloOutcome(met_ttft=ttft_s <= slo.ttft_s, met_tpot=tpot_s is None or tpot_s <= slo.tpot_s)


@dataclass(slots=True, kw_only=True)
class ClassCounters:
    """Counters of one SLO class; mutable, changed by ``AttainmentCounters`` only.

    Args:
        num_finished: Finished, failed and rejected requests.
        num_met_ttft: Of these, met TTFT.
        num_met_tpot: Of these, met TPOT.
        num_met_both: Of these, met both.
    """

    num_finished: int = 0
    num_met_ttft: int = 0
    num_met_tpot: int = 0
    num_met_both: int = 0

    def add(self, outcome: SloOutcome) -> None:
        """Count one ended request."""
        self.num_finished += 1
        self.num_met_ttft += outcome.met_ttft
        self.num_met_tpot += outcome.met_tpot
        self.num_met_both += outcome.met_both

    def add_all(self, other: ClassCounters) -> None:
        """Add the counts of ``other``."""
        self.num_finished += other.num_finished
        self.num_met_ttft += other.num_met_ttft
        self.num_met_tpot += other.num_met_tpot
        self.num_met_both += other.num_met_both

    @property
    def attainment(self) -> float | None:
        """Share of requests that met both objectives; None before any ended."""
        return self.num_met_both / self.num_finished if self.num_finished else None


class AttainmentCounters:
    """Counts ended requests per SLO class, since the start and over a sliding window.

    The window is kept in buckets of five seconds, so a request leaves it between 300 and 305 seconds after its end.

    Args:
        window_s: Length of the window, in seconds.
    """

    def __init__(self, window_s: float = ATTAINMENT_WINDOW_S) -> None:
        self.window_s = window_s
        self.totals: dict[str, ClassCounters] = {}
        self._buckets: deque[tuple[int, dict[str, ClassCounters]]] = deque()

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
        counted = outcome if end is RequestEnd.FINISHED else MET_NOTHING
        self.totals.setdefault(slo_class, ClassCounters()).add(counted)
        self._bucket(now).setdefault(slo_class, ClassCounters()).add(counted)

    def window(self, now: float, slo_classes: Iterable[str] | None = None) -> ClassCounters:
        """Sum the counters of the last ``window_s`` seconds.

        Args:
            now: Seconds on the caller's monotonic clock.
            slo_classes: Classes to sum; all when None.

        Returns:
            A fresh sum; its ``attainment`` is that of the window.
        """
        self._expire(now)
        wanted = None if slo_classes is None else frozenset(slo_classes)
        total = ClassCounters()
        for _, classes in self._buckets:
            for name, counters in classes.items():
                if wanted is None or name in wanted:
                    total.add_all(counters)
        return total

    def _bucket(self, now: float) -> dict[str, ClassCounters]:
        number = int(now // _BUCKET_S)
        if not self._buckets or self._buckets[-1][0] < number:
            self._expire(now)
            self._buckets.append((number, {}))
        return self._buckets[-1][1]

    def _expire(self, now: float) -> None:
        while self._buckets and (self._buckets[0][0] + 1) * _BUCKET_S <= now - self.window_s:
            self._buckets.popleft()
