"""Cells compared by goodput: with the paper's sliders, and with every system tuned."""

from __future__ import annotations

import statistics
from itertools import product, zip_longest
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
        plots=(_plot_attainment(f"{paper}-{cell.name}", cell, runner, results),) if cell.is_plotted else (),
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
    by_name = {
        f"untuned {system.strategy} {system}": _list_rates(cell, system, of_system)
        for system, of_system in zip(baselines, untuned, strict=True)
    }
    return Chapter(
        name=f"{cell.name}-tuned",
        title=f"{cell.title}, all tuned",
        setting=runner.describe(cell),
        findings=(
            *_compare(cell, tuned, results),
            *_relate(
                tuned[-1].strategy,
                _list_rates(cell, tuned[-1], results[-1]),
                by_name,
                expected=cell.tuned_ratios,
            ),
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
        mean, spread = compute_mean(_list_rates(cell, system, of_system))
        findings.append(
            Finding(
                setting=f"{system.strategy} {system}",
                quantity="goodput per GPU" if cell.is_per_gpu else "goodput",
                unit=Unit.REQUESTS_PER_S,
                ours=mean,
                spread=spread,
                expected=expected,
            )
        )
    rates = [_list_rates(cell, system, of_system) for system, of_system in zip(systems, results, strict=True)]
    baselines = {system.name: of_system for system, of_system in zip(systems[:-1], rates[:-1], strict=True)}
    findings += _relate(systems[-1].strategy, rates[-1], baselines, stated=cell.paper_ratios, expected=ratios)
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


def _list_rates(cell: GoodputCell, system: System, results: Sequence[PaperResult]) -> list[float]:
    """Lists the goodput of each seed."""
    return [result.rate_rps / cell.count_gpus(system) for result in results]


def _relate(
    strategy: str,
    rates: Sequence[float],
    baselines: Mapping[str, Sequence[float]],
    *,
    stated: Sequence[Band] = (),
    expected: Sequence[Band] = (),
) -> list[Finding]:
    """Relates the goodput of the paper's system to that of each baseline, seed by seed."""
    findings = []
    for name, of_baseline, paper, band in zip_longest(baselines, baselines.values(), stated, expected):
        mean, spread = compute_mean([a / b if b else 0.0 for a, b in zip(rates, of_baseline, strict=True)])
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
    highest_rps = max(
        statistics.fmean(_list_rates(cell, system, of_system))
        for system, of_system in zip(cell.systems, results, strict=True)
    )
    rates = [round(share * highest_rps, 2) for share in _PLOTTED_SHARES]
    curves: dict[str, list[float]] = {system.name: [] for system in cell.systems}
    for rate_rps, (system, curve) in product(rates, zip(cell.systems, curves.values(), strict=True)):
        what = f"{cell.name}, {system.name} at {rate_rps:g}/s"
        (of_system,) = runner.measure(what, cell, [system], rate_rps * cell.count_gpus(system))
        curve.append(round(100 * statistics.fmean(result.run.attainment for result in of_system), 2))
    return Plot(
        name=name,
        title=cell.title,
        x_label="requests per second of a GPU" if cell.is_per_gpu else "requests per second",
        y_label="attainment, %",
        kind=PlotKind.LINES,
        series=tuple(Series(name=strategy, x=tuple(rates), y=tuple(curve)) for strategy, curve in curves.items()),
        guides_y=(90.0,),
    )
