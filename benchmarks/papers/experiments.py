"""Experiments that are tables: rows of trials, ratios between rows, and plots of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.papers.experiment_runner import compute_mean
from benchmarks.papers.findings import Chapter, Finding, Plot, PlotKind, Series, Unit
from benchmarks.papers.observations import METRICS, OBSERVERS, Observation
from benchmarks.papers.trials import run_trial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.papers.experiment_runner import ExperimentRunner
    from benchmarks.papers.paper_file import ExperimentTable, Paper, PlotTable, RatioRow, SeriesRow, TrialRow
    from benchmarks.papers.trials import PaperTrial

    from sluice_core.records import Slo

_MOST_POINTS = 200  # of a scatter plot, per series
_NUM_LINE_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """A row and what its seeds gave.

    Args:
        row: The row.
        slo: Its objectives.
        observations: One per seed.
    """

    row: TrialRow
    slo: Slo
    observations: Sequence[Observation]

    def read(self, metric: str) -> list[float]:
        """Reads a metric of every seed, in seconds or as a share."""
        return [observation.values[metric] for observation in self.observations]

    def find(self, metric: str) -> Finding:
        """Makes the finding of a metric."""
        row, shown = self.row, METRICS[metric]
        stated = row.stated.get(metric, row)
        ours, spread = compute_mean([shown.factor * value for value in self.read(metric)])
        return Finding(
            setting=f"{row.system.strategy} {row.system}" if row.label is None else row.label,
            quantity=shown.quantity,
            unit=shown.unit,
            ours=ours,
            spread=spread,
            paper=stated.paper,
            expected=stated.band,
            digits=shown.digits,
        )


def measure_experiment(paper: Paper, table: ExperimentTable, runner: ExperimentRunner) -> Chapter:
    """Runs the rows of an experiment; makes its findings and plots."""
    table_rows = paper.list_rows(table)
    trials = [_make_trials(paper, table, row, runner) for row in table_rows]
    flat = [trial for of_row in trials for trial in of_row]
    found = iter(runner.pool.run(table.name, OBSERVERS[table.observe], flat))
    rows = {
        row.name: MeasuredRow(row=row, slo=of_row[0].spec.slo, observations=[next(found) for _ in of_row])
        for row, of_row in zip(table_rows, trials, strict=True)
    }
    findings = [rows[row.name].find(metric) for row in table_rows if row.is_shown for metric in table.metrics]
    return Chapter(
        name=table.name,
        title=table.title,
        setting=table.setting or runner.describe(paper.find_testbed(table.testbed)),
        findings=(*findings, *(_relate(rows[ratio.of], rows[ratio.over], ratio) for ratio in table.ratios)),
        notes=table.notes,
        plots=tuple(_make_plot(plot, rows) for plot in table.plots),
    )


def _make_trials(paper: Paper, table: ExperimentTable, row: TrialRow, runner: ExperimentRunner) -> list[PaperTrial]:
    """Makes the trials of a row, one per seed."""
    testbed = paper.find_testbed(row.testbed or table.testbed)
    changes = {
        "slo": row.slo or testbed.slo,
        "duration_s": testbed.duration_s * row.duration_factor,
        "settings": {**testbed.settings, **row.settings},
    }
    seeds = table.seeds or runner.effort.seeds
    rates: list[float | None] = [row.rate_rps or table.rate_rps] * len(seeds)
    if row.goodput_of is not None:
        searches = [runner.make_trial(testbed, row.goodput_of, seed) for seed in seeds]
        rates = [result.rate_rps for result in runner.pool.run(f"{table.name}, goodput", run_trial, searches)]
    changed = testbed.model_copy(update=changes)
    trials = [runner.make_trial(changed, row.system, seed, rate) for seed, rate in zip(seeds, rates, strict=True)]
    return [replace(trial, num_engines=row.num_engines, num_decodes=row.num_decodes) for trial in trials]


def _relate(of: MeasuredRow, over: MeasuredRow, ratio: RatioRow) -> Finding:
    """Makes the finding of a ratio, seed by seed."""
    pairs = zip(of.read(ratio.metric), over.read(ratio.metric), strict=True)
    ours, spread = compute_mean([a / b for a, b in pairs])
    return Finding(
        setting=ratio.label or f"{ratio.of} / {ratio.over}",
        quantity=ratio.quantity or METRICS[ratio.metric].quantity,
        unit=Unit.FACTOR,
        ours=ours,
        spread=spread,
        paper=ratio.paper,
        expected=ratio.band,
    )


def _make_plot(table: PlotTable, rows: Mapping[str, MeasuredRow]) -> Plot:
    make_series = _draw_points if table.kind is PlotKind.POINTS else _draw_bars
    series = tuple(make_series(of_series, [rows[name] for name in of_series.rows]) for of_series in table.series)
    return Plot.model_validate({**dict(table), "series": series})


def _draw_bars(table: SeriesRow, rows: Sequence[MeasuredRow]) -> Series:
    """A bar per row: the mean over the seeds."""
    assert table.metric is not None
    heights = []
    for row in rows:
        values = row.read(table.metric)
        if table.is_share_of_slo:
            height = statistics.fmean(values) / (row.slo.ttft_s if table.metric.startswith("ttft") else row.slo.tpot_s)
        else:
            height = statistics.fmean([METRICS[table.metric].factor * value for value in values]) / table.scale
        heights.append(round(height, table.digits[1]))
    return Series(name=table.name, x=tuple(float(index) for index in range(len(rows))), y=tuple(heights))


def _draw_points(table: SeriesRow, rows: Sequence[MeasuredRow]) -> Series:
    """The requests of the first seed, or the line through them."""
    first = rows[0].observations[0]
    # Evenly spaced points only, so that a plot stays small.
    shown = first.points[:: max(1, -(-len(first.points) // _MOST_POINTS))]
    if table.is_fit:
        highest = max(x for x, _ in shown)
        steps = [highest * step / _NUM_LINE_STEPS for step in range(_NUM_LINE_STEPS + 1)]
        intercept, slope = first.values["intercept"], first.values["slope"]
        line = tuple(
            1e3 * (intercept + slope * highest * step / _NUM_LINE_STEPS) for step in range(_NUM_LINE_STEPS + 1)
        )
        return Series(name=table.name, x=tuple(steps), y=line)
    x_digits, y_digits = table.digits
    return Series(
        name=table.name,
        x=tuple(round(x, x_digits) for x, _ in shown),
        y=tuple(round(1e3 * tpot_s, y_digits) for _, tpot_s in shown),
    )
