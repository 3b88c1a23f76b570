"""Emulated beside simulated: metrics of a run, and batches one after the other."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.fidelity.events import count_emulated
from benchmarks.fidelity.recorded_runs import count_pauses
from benchmarks.local_cluster.figures import compute_percentile, format_number, format_table

from sluice_core.sim.moves.hand_offs import ITERATION_ENDS, HandOffStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.emulated.phases import Phase
    from benchmarks.fidelity.recorded_runs import Record, RecordedBatch
    from benchmarks.fidelity.simulated import Simulated

MS = 1e3
HEADER = ("strategy", "rate/s", "requests", "", "attainment", "TTFT p50", "p90 ms", "TPOT p50", "p90 ms", "events")
NUM_CONTEXT = 3
# An iteration is scheduled when the one before it begins: one end before its own begin.
NUM_PAUSE_ENDS = (
    ITERATION_ENDS[HandOffStep.SUBMIT] + ITERATION_ENDS[HandOffStep.NOTICE] + ITERATION_ENDS[HandOffStep.JOIN] - 1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one side.

    Args:
        attainment: Share of requests that met both objectives.
        ttft_ms: Percentiles 50 and 90.
        tpot_ms: Likewise.
        events: See ``events``.
    """

    attainment: float
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    events: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchComparison:
    """Batches of an engine and of its replay.

    Args:
        engine: The engine.
        num_iterations: Of the engine.
        num_replayed: Of the replay.
        num_equal: Equal ones before the first difference.
        first_difference: What differs, with what comes before; empty: nothing does.
    """

    engine: str
    num_iterations: int
    num_replayed: int
    num_equal: int
    first_difference: str


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One load, emulated and simulated; mutable while it is made.

    Args:
        strategy: Its name.
        rate: Requests per second.
        num_requests: Requests.
        errors: Why emulated ones failed, and how many.
        num_refused: Simulated ones that were refused, in the mean.
        emulated: Its figures.
        simulated: Its figures.
        clock_error: Median of measured over modelled time of an iteration, less 1.
        busy_cores: Use of the machine.
        goodput_rps: Simulated goodput, if it was looked for.
        pauses: Of moves; see ``count_pauses``.
        batches: By engine, if they were compared.
    """

    strategy: str
    rate: float
    num_requests: int
    errors: dict[str, int]
    num_refused: int
    emulated: Figures
    simulated: Figures
    clock_error: float
    busy_cores: float
    pauses: list[tuple[int, float]]
    goodput_rps: float | None = None
    batches: list[BatchComparison] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self)


def compare_runs(
    phase: Phase, engine_events: Counter[str], simulated: Simulated, records: Sequence[Record]
) -> Comparison:
    """Compares what came of the same arrivals; the engines' counts are those of this load."""
    tpot_ms = [tpot_s * MS for tpot_s in simulated.tpot_s if tpot_s is not None]
    ttft_ms = [ttft_s * MS for ttft_s in simulated.ttft_s]
    ratios = [
        iteration.measured_s / iteration.duration_s - 1.0
        for record in records
        for iteration in record.iterations
        if iteration.ended_s and iteration.duration_s
    ]
    return Comparison(
        strategy=phase.strategy,
        rate=phase.rate,
        num_requests=len(phase.answers),
        errors=dict(Counter(answer.error for answer in phase.answers if answer.error)),
        num_refused=round((len(simulated.has_met) - len(simulated.ttft_s)) / simulated.num_runs),
        emulated=Figures(
            attainment=phase.attainment,
            ttft_ms=(phase.compute_ttft_ms(50), phase.compute_ttft_ms(90)),
            tpot_ms=(phase.compute_tpot_ms(50), phase.compute_tpot_ms(90)),
            events=count_emulated(phase, engine_events),
        ),
        simulated=Figures(
            attainment=sum(simulated.has_met) / len(simulated.has_met) if simulated.has_met else math.nan,
            ttft_ms=(compute_percentile(ttft_ms, 50), compute_percentile(ttft_ms, 90)),
            tpot_ms=(compute_percentile(tpot_ms, 50), compute_percentile(tpot_ms, 90)),
            events=simulated.events,
        ),
        clock_error=compute_percentile(ratios, 50),
        busy_cores=phase.cores.busy,
        pauses=count_pauses(list(records)),
    )


def compare_batches(record: Record, replayed: Sequence[RecordedBatch]) -> BatchComparison:
    """Compares an engine's batches with those of its replay, up to the first difference."""
    emulated = [iteration.batch for iteration in record.iterations]
    num_equal = 0
    for ours, theirs in zip(emulated, replayed, strict=False):
        if ours != theirs:
            break
        num_equal += 1
    difference = ""
    if num_equal < max(len(emulated), len(replayed)):
        lines = [
            f"iteration {number}: {emulated[number]}" for number in range(max(0, num_equal - NUM_CONTEXT), num_equal)
        ]
        for side, batches in (("emulated", emulated), ("simulated", replayed)):
            numbers = range(num_equal, min(num_equal + NUM_CONTEXT, len(batches)))
            lines += [f"iteration {number}, {side}: {batches[number]}" for number in numbers]
        difference = "\n".join(lines)
    return BatchComparison(
        engine=record.name,
        num_iterations=len(emulated),
        num_replayed=len(replayed),
        num_equal=num_equal,
        first_difference=difference,
    )


def format_comparisons(comparisons: Sequence[Comparison]) -> str:
    """Formats three lines per load: emulated, simulated, and by how much the latter differs."""
    rows: list[list[str]] = []
    notes = []
    for comparison in comparisons:
        ours, theirs = comparison.emulated, comparison.simulated
        label = [comparison.strategy, f"{comparison.rate:.2f}", str(comparison.num_requests)]
        rows.append([*label, "emulated", *_format_figures(ours)])
        rows.append(["", "", "", "simulated", *_format_figures(theirs)])
        changes = [
            f"{100 * (simulated / emulated - 1):+.1f} %" if emulated else "-"
            for emulated, simulated in zip(
                (*ours.ttft_ms, *ours.tpot_ms), (*theirs.ttft_ms, *theirs.tpot_ms), strict=True
            )
        ]
        points = f"{100 * (theirs.attainment - ours.attainment):+.1f}"
        rows.append(["", "", "", "difference", points, *changes, ""])
        notes.append(
            f"{comparison.strategy} at {comparison.rate:.2f}/s: iterations took {100 * comparison.clock_error:+.2f} % "
            f"of the modelled time more (median), {comparison.busy_cores:.2f} cores busy, "
            f"{sum(comparison.errors.values())} failed "
            f"({comparison.num_refused} simulated)"
        )
        notes += [f"failed: {count} with {error}" for error, count in comparison.errors.items()]
        if comparison.pauses:
            ends = Counter(num_ends for num_ends, _ in comparison.pauses)
            shares = ", ".join(f"{num_ends}: {count}" for num_ends, count in sorted(ends.items()))
            pause_s = compute_percentile([pause_s for _, pause_s in comparison.pauses], 50)
            notes.append(
                f"moves: ends of the target's iterations from the hand-off to the scheduling of the join (simulated "
                f"{NUM_PAUSE_ENDS}, if link and messages are quick): {shares}; {pause_s * MS:.0f} ms (median)"
            )
        notes += [format_batches(batches) for batches in comparison.batches]
    return "\n".join([format_table(HEADER, rows), *notes])


def format_batches(batches: BatchComparison) -> str:
    """Formats the comparison of batches."""
    text = f"{batches.engine}: {batches.num_equal} of {batches.num_iterations} iterations equal"
    if not batches.first_difference:
        return text
    return f"{text} ({batches.num_replayed} replayed), then\n{batches.first_difference}"


def _format_figures(figures: Figures) -> list[str]:
    return [
        format_number(100 * figures.attainment),
        *(format_number(value, 0) for value in figures.ttft_ms),
        *(format_number(value, 2) for value in figures.tpot_ms),
        ", ".join(f"{name} {count}" for name, count in sorted(figures.events.items())) or "-",
    ]
