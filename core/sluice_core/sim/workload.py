"""Requests to simulate: lengths from a trace, arrivals drawn, as those of a Poisson process, or from the trace.

One seed fixes the lengths and the gaps at one request per second; a rate divides the gaps. So attainment is nearly
monotone in the rate, and strategies are compared on the same requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from sluice_core.records import Slo, SloClass
from sluice_core.sim.sim_setup import Arrival
from sluice_core.sim.traces import TraceRow


class DrawnWorkload:
    """Lengths of a trace at arrivals with drawn gaps; mutable only in what it has drawn so far.

    Lengths are drawn without replacement, independently of the arrivals; a run that needs more than the trace has
    starts over in a new order. Where rows have hashes their order is what says which prompts are still in a cache: it
    is kept, from a row on that is drawn, and to a run that starts over all prompts are new ones.

    Args:
        rows: The trace.
        slo: Objectives, for rows without their own.
        seed: Fixes lengths and unit-rate gaps.
        classes: Objectives and priorities of rows with a class; others are as if they had none.
        burstiness: Shape of the gamma distribution of the gaps, as ``vllm bench serve`` has it: 1 is a Poisson process,
            and the gaps' coefficient of variation is the inverse of its root, 2 at 0.25.

    Raises:
        ValueError: A burstiness that is not positive.
    """

    def __init__(
        self,
        rows: Sequence[TraceRow],
        slo: Slo,
        seed: int,
        classes: Sequence[SloClass] = (),
        *,
        burstiness: float = 1.0,
    ) -> None:
        if not 0.0 < burstiness < math.inf:
            raise ValueError(f"burstiness is {burstiness}; a number above 0 is needed")
        self._burstiness = burstiness
        self._rows = rows
        self._slo = slo
        self._classes = {slo_class.name: slo_class for slo_class in classes}
        self._lengths_rng = random.Random(f"lengths {seed}")  # noqa: S311 - a workload
        self._gaps_rng = random.Random(f"gaps {seed}")  # noqa: S311 - a workload
        self._drawn: list[TraceRow] = []
        self._first_row = -1
        self._num_hashes = 0
        if any(row.block_hashes for row in rows):
            self._first_row = self._lengths_rng.randrange(len(rows))
            self._num_hashes = 1 + max(max(row.block_hashes, default=0) for row in rows)
        self._unit_times: list[float] = []

    def make_arrivals(self, rate_rps: float, duration_s: float) -> list[Arrival]:
        """Make the requests of a run.

        Args:
            rate_rps: Mean requests per second.
            duration_s: Length of the run.

        Raises:
            ValueError: Not positive.
        """
        if not (rate_rps > 0 and duration_s > 0):
            raise ValueError(f"rate {rate_rps} requests/s over {duration_s} s; both must be positive")
        end = rate_rps * duration_s
        self._draw_until(end)
        arrivals = []
        for index, (unit_time, row) in enumerate(zip(self._unit_times, self._drawn, strict=False)):
            if unit_time > end:
                break
            shift = index // len(self._rows) * self._num_hashes
            arrivals.append(make_arrival(row, unit_time / rate_rps, self._slo, self._classes, shift))
        return arrivals

    def _draw_gap(self) -> float:
        if self._burstiness == 1.0:
            return self._gaps_rng.expovariate(1.0)
        return self._gaps_rng.gammavariate(self._burstiness, 1.0 / self._burstiness)

    def _draw_until(self, end: float) -> None:
        last = self._unit_times[-1] if self._unit_times else 0.0
        while last <= end:
            last += self._draw_gap()
            self._unit_times.append(last)
        while len(self._drawn) < len(self._unit_times):
            if self._first_row >= 0:
                self._drawn += self._rows[self._first_row :]
                self._drawn += self._rows[: self._first_row]
            else:
                self._drawn += self._lengths_rng.sample(self._rows, len(self._rows))


def make_arrival(row: TraceRow, at_s: float, slo: Slo, classes: Mapping[str, SloClass], hash_shift: int = 0) -> Arrival:
    """Make a request of a row of a trace; the row's own TTFT objective wins over its class's.

    Args:
        row: The row.
        at_s: When it arrives.
        slo: Objectives, unless it has its own.
        classes: By their names.
        hash_shift: What its hashes grow by.
    """
    priority = 0
    slo_class = classes.get(row.slo_class)
    if slo_class is not None:
        slo, priority = slo_class.slo, slo_class.priority
    if row.ttft_slo_s is not None:
        slo = Slo(ttft_s=row.ttft_slo_s, tpot_s=slo.tpot_s)
    return Arrival(
        at_s=at_s,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        slo=slo,
        priority=priority,
        block_hashes=tuple([each + hash_shift for each in row.block_hashes]) if hash_shift else row.block_hashes,
    )


def scale_trace(
    rows: Sequence[TraceRow],
    slo: Slo,
    rate_rps: float | None,
    duration_s: float,
    classes: Sequence[SloClass] = (),
) -> list[Arrival]:
    """Make requests at the trace's own times, from its start, stretched to a mean rate.

    That keeps the shape of bursts and changes their time scale.

    Args:
        rows: The trace, with times.
        slo: Objectives, for rows without their own.
        rate_rps: Mean rate; None: times as they are.
        duration_s: Length of the run.
        classes: As for ``DrawnWorkload``.

    Raises:
        ValueError: A row without a time, or a trace without a duration.
    """
    times = [row.arrival_s for row in rows if row.arrival_s is not None]
    if len(times) != len(rows):
        raise ValueError("the trace has no arrival_s; Poisson arrivals need none")
    first_s, span_s = times[0], times[-1] - times[0]
    if span_s <= 0 and rate_rps is not None:
        raise ValueError("all requests of the trace arrive at one time: no rate can be given")
    factor = 1.0 if rate_rps is None else len(rows) / span_s / rate_rps
    by_name = {slo_class.name: slo_class for slo_class in classes}
    arrivals = []
    for row, time_s in zip(rows, times, strict=True):
        at_s = (time_s - first_s) * factor
        if at_s > duration_s:
            break
        arrivals.append(make_arrival(row, at_s, slo, by_name))
    return arrivals
