"""Figures 15 and 16: goodput of aggregation, disaggregation and TaiChi, with the paper's sliders and tuned ones."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks.papers.experiment import compute_mean
from benchmarks.papers.findings import Chapter, Finding, Plot, PlotKind, Series, Unit
from benchmarks.papers.taichi import AGGREGATED_GRID, DISAGGREGATED_GRID, TAICHI_GRID, GoodputCell, Stated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.papers.experiment import Bench, System
    from benchmarks.papers.trials import Outcome

_UNTUNED = "The paper does not tune its baselines over all of these; its ratios are shown for comparison."
_PLOTTED_SHARES = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35)  # of the highest goodput


def measure_cell(cell: GoodputCell, bench: Bench) -> Chapter:
    """Measures one cell with the paper's sliders."""
    systems = (cell.aggregated, cell.disaggregated, cell.taichi)
    outcomes = bench.measure(cell.name, cell.testbed, systems)
    return Chapter(
        name=cell.name,
        title=f"{cell.title}, the paper's sliders",
        setting=_describe(cell, bench),
        findings=tuple(_compare(systems, outcomes, cell.paper, cell.expected)),
        notes=cell.notes,
        plots=(_plot_attainment(cell, bench, systems, outcomes),),
    )


def measure_tuned_cell(cell: GoodputCell, bench: Bench) -> Chapter:
    """Measures one cell with every system tuned, the paper's sliders among the candidates."""
    papers = (cell.aggregated, cell.disaggregated, cell.taichi)
    grids = (AGGREGATED_GRID, DISAGGREGATED_GRID, TAICHI_GRID)
    tuned = tuple(
        bench.tune(f"{cell.name} {system.strategy}", cell.testbed, [system, *_without(grid, system)])
        for system, grid in zip(papers, grids, strict=True)
    )
    outcomes = bench.measure(f"{cell.name} tuned", cell.testbed, tuned)
    names = [f"untuned {system.strategy} {system}" for system in papers[:2]]
    untuned = bench.measure(f"{cell.name} baselines of the paper", cell.testbed, papers[:2])
    return Chapter(
        name=f"{cell.name}-tuned",
        title=f"{cell.title}, all tuned",
        setting=_describe(cell, bench),
        findings=(
            *_compare(tuned, outcomes, cell.paper, Stated()),
            *_relate(outcomes[2], names, untuned, Stated(), cell.expected_tuned),
        ),
        notes=(*([_UNTUNED] if cell.paper != Stated() else cell.notes),),
    )


def _without(grid: Sequence[System], system: System) -> list[System]:
    return [other for other in grid if other != system]


def _describe(cell: GoodputCell, bench: Bench) -> str:
    testbed = cell.testbed
    return (
        f"{testbed.model} TP{testbed.tensor_parallel} on {testbed.gpu}, trace {testbed.trace}, "
        f"TTFT {testbed.slo.ttft_s:g} s, TPOT {testbed.slo.tpot_s * 1e3:g} ms; "
        f"{testbed.duration_s * bench.effort.scale:g} s, seeds {', '.join(map(str, bench.effort.seeds))}"
    )


def _compare(
    systems: Sequence[System],
    outcomes: Sequence[Sequence[Outcome]],
    paper: Stated,
    expected: Stated,
) -> list[Finding]:
    """Compares three systems: their goodputs, TaiChi's over the others', and what becomes of long prompts."""
    rates = [[outcome.rate_rps for outcome in of_system] for of_system in outcomes]
    findings = []
    bands = (expected.aggregated_rps, expected.disaggregated_rps, expected.taichi_rps)
    for system, of_system, expected_rps in zip(systems, rates, bands, strict=True):
        mean, spread = compute_mean(of_system)
        findings.append(
            Finding(
                setting=f"{system.strategy} {system}",
                quantity="goodput",
                unit=Unit.REQUESTS_PER_S,
                ours=mean,
                spread=spread,
                expected=expected_rps,
            )
        )
    findings += _relate(outcomes[2], [system.strategy for system in systems[:2]], outcomes[:2], paper, expected)
    for system, of_outcomes in zip(systems, outcomes, strict=True):
        longest = [run.summary.attainment_longest_tenth for run in of_outcomes if run.summary is not None]
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
    taichi: Sequence[Outcome],
    names: Sequence[str],
    baselines: Sequence[Sequence[Outcome]],
    paper: Stated,
    expected: Stated,
) -> list[Finding]:
    """Relates TaiChi's goodput to aggregation's and disaggregation's, seed by seed."""
    findings = []
    stated = (paper.over_aggregated, paper.over_disaggregated)
    bands = (expected.over_aggregated, expected.over_disaggregated)
    for name, of_system, stated_ratio, expected_ratio in zip(names, baselines, stated, bands, strict=True):
        ratios = [a.rate_rps / b.rate_rps if b.rate_rps else 0.0 for a, b in zip(taichi, of_system, strict=True)]
        mean, spread = compute_mean(ratios)
        findings.append(
            Finding(
                setting=f"taichi / {name}",
                quantity="goodput",
                unit=Unit.FACTOR,
                ours=mean,
                spread=spread,
                paper=stated_ratio,
                expected=expected_ratio,
            )
        )
    return findings


def _plot_attainment(
    cell: GoodputCell, bench: Bench, systems: Sequence[System], outcomes: Sequence[Sequence[Outcome]]
) -> Plot:
    """Attainment against rate with the paper's sliders, as in the paper's figures."""
    highest_rps = max(statistics.fmean(run.rate_rps for run in of_system) for of_system in outcomes)
    rates = [round(share * highest_rps, 2) for share in _PLOTTED_SHARES]
    curves: dict[str, list[float]] = {system.strategy: [] for system in systems}
    for rate_rps in rates:
        for system, of_system in zip(
            systems,
            bench.measure(f"{cell.name} at {rate_rps:g}/s", cell.testbed, systems, rate_rps=rate_rps),
            strict=True,
        ):
            attainment = statistics.fmean(outcome.run.attainment for outcome in of_system)
            curves[system.strategy].append(round(100 * attainment, 2))
    return Plot(
        name=f"taichi-{cell.name}",
        title=cell.title,
        x_label="requests per second",
        y_label="attainment, %",
        kind=PlotKind.LINES,
        series=tuple(Series(name=name, x=tuple(rates), y=tuple(curve)) for name, curve in curves.items()),
        guides_y=(90.0,),
    )
