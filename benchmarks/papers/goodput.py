"""Cells compared by goodput: with the paper's sliders, and with every system tuned."""

from __future__ import annotations

import statistics
from itertools import zip_longest
from typing import TYPE_CHECKING

from benchmarks.papers.experiment_runner import compute_mean
from benchmarks.papers.findings import Chapter, Finding, Plot, PlotKind, Series, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.papers.experiment_runner import ExperimentRunner
    from benchmarks.papers.findings import Band
    from benchmarks.papers.paper_file import GoodputCell, Paper, System
    from benchmarks.papers.trials import PaperResult

_UNTUNED = "The paper does not tune its baselines over all of these; its ratios are shown for comparison."
_PLOTTED_SHARES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35)  # of the highest goodput


def measure_cell(paper: str, cell: GoodputCell, runner: ExperimentRunner) -> Chapter:
    """Measures a cell with the paper's sliders."""
    results = runner.measure(cell.name, cell, cell.systems)
    return Chapter(
        name=cell.name,
        title=f"{cell.title}, the paper's sliders",
        setting=runner.describe(cell),
        findings=tuple(_compare(cell, cell.systems, results, goodputs=cell.goodputs, ratios=cell.ratios)),
        notes=cell.notes,
        plots=(_plot_attainment(f"{paper}-{cell.name}", cell, runner, results),),
    )


def measure_tuned_cell(paper: Paper, cell: GoodputCell, runner: ExperimentRunner) -> Chapter:
    """Measures a cell with every system tuned, the paper's sliders among the candidates."""
    tuned = [
        runner.tune(
            f"{cell.name} {system.strategy}",
            cell,
            [system, *(other for other in paper.list_grid(system.strategy) if other != system)],
        )
        for system in cell.systems
    ]
    results = runner.measure(f"{cell.name} tuned", cell, tuned)
    baselines = cell.systems[:-1]
    untuned = runner.measure(f"{cell.name} baselines of the paper", cell, baselines)
    by_name = dict(zip((f"untuned {system.strategy} {system}" for system in baselines), untuned, strict=True))
    return Chapter(
        name=f"{cell.name}-tuned",
        title=f"{cell.title}, all tuned",
        setting=runner.describe(cell),
        findings=(
            *_compare(cell, tuned, results),
            *_relate(tuned[-1].strategy, results[-1], by_name, expected=cell.tuned_ratios),
        ),
        notes=(_UNTUNED,) if cell.paper_ratios else cell.notes,
    )


def _compare(
    cell: GoodputCell,
    systems: Sequence[System],
    results: Sequence[Sequence[PaperResult]],
    *,
    goodputs: Sequence[Band] = (),
    ratios: Sequence[Band] = (),
) -> list[Finding]:
    """Compares systems: their goodputs, the last one's over the others', and what becomes of long prompts."""
    findings = []
    for system, of_system, expected in zip_longest(systems, results, goodputs):
        mean, spread = compute_mean([result.rate_rps for result in of_system])
        findings.append(
            Finding(
                setting=f"{system.strategy} {system}",
                quantity="goodput",
                unit=Unit.REQUESTS_PER_S,
                ours=mean,
                spread=spread,
                expected=expected,
            )
        )
    baselines = {system.name: of_system for system, of_system in zip(systems[:-1], results[:-1], strict=True)}
    findings += _relate(systems[-1].strategy, results[-1], baselines, stated=cell.paper_ratios, expected=ratios)
    for system, of_system in zip(systems, results, strict=True):
        longest = [result.summary.attainment_longest_tenth for result in of_system if result.summary is not None]
        if longest:
            findings.append(
                Finding(
                    setting=f"{system.strategy} {system}",
                    quantity="attainment of the longest tenth of prompts at its goodput",
                    unit=Unit.PERCENT,
                    ours=100 * statistics.fmean(longest),
                )
            )
    return findings


def _relate(
    strategy: str,
    results: Sequence[PaperResult],
    baselines: Mapping[str, Sequence[PaperResult]],
    *,
    stated: Sequence[Band] = (),
    expected: Sequence[Band] = (),
) -> list[Finding]:
    """Relates the goodput of the paper's system to that of each baseline, seed by seed."""
    findings = []
    for name, of_baseline, paper, band in zip_longest(baselines, baselines.values(), stated, expected):
        pairs = zip(results, of_baseline, strict=True)
        mean, spread = compute_mean([a.rate_rps / b.rate_rps if b.rate_rps else 0.0 for a, b in pairs])
        findings.append(
            Finding(
                setting=f"{strategy} / {name}",
                quantity="goodput",
                unit=Unit.FACTOR,
                ours=mean,
                spread=spread,
                paper=paper,
                expected=band,
            )
        )
    return findings


def _plot_attainment(
    name: str, cell: GoodputCell, runner: ExperimentRunner, results: Sequence[Sequence[PaperResult]]
) -> Plot:
    """Attainment against rate with the paper's sliders."""
    highest_rps = max(statistics.fmean(result.rate_rps for result in of_system) for of_system in results)
    rates = [round(share * highest_rps, 2) for share in _PLOTTED_SHARES]
    curves: dict[str, list[float]] = {system.name: [] for system in cell.systems}
    for rate_rps in rates:
        at_rate = runner.measure(f"{cell.name} at {rate_rps:g}/s", cell, cell.systems, rate_rps)
        for curve, of_system in zip(curves.values(), at_rate, strict=True):
            curve.append(round(100 * statistics.fmean(result.run.attainment for result in of_system), 2))
    return Plot(
        name=name,
        title=cell.title,
        x_label="requests per second",
        y_label="attainment, %",
        kind=PlotKind.LINES,
        series=tuple(Series(name=strategy, x=tuple(rates), y=tuple(curve)) for strategy, curve in curves.items()),
        guides_y=(90.0,),
    )
