"""What ``sluice bench strategies`` prints: a table for people, Markdown for documents, JSON for programs."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sluice_cli.output.plan_report import describe_candidate, format_candidate_engines, list_ends, show_interval
from sluice_core.planning.prediction import Interval, estimate_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from sluice_cli.simulation.comparison_file import CellFigures, StrategyFigures


def compute_ratios(figures: CellFigures, names: Sequence[str]) -> dict[str, float]:
    """Computes each strategy's mean goodput over that of the cell's best; 0 where nothing has one."""
    means = _compute_means(figures, names)
    best = max(means.values(), default=0.0)
    return {name: mean / best if best else 0.0 for name, mean in means.items()}


def summarize(every: Sequence[CellFigures], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Summarizes each strategy's goodput over that of the best other one, over the cells where both have one.

    Returns:
        Geometric mean and least ratio by strategy.
    """
    summaries = {}
    for name in names:
        ratios = []
        for figures in every:
            means = _compute_means(figures, names)
            own, other = means.pop(name), max(means.values(), default=0.0)
            if own and other:
                ratios.append(own / other)
        if ratios:
            summaries[name] = {"geometric_mean": statistics.geometric_mean(ratios), "least": min(ratios)}
    return summaries


def make_markdown(every: Sequence[CellFigures], names: Sequence[str]) -> str:
    """Makes the tables of a document: goodput of each strategy over the best one's, and what the planner chose."""
    lines = [
        f"| cell | what | best, requests/s | {' | '.join(names)} |",
        f"|---|---|---|{'---|' * len(names)}",
    ]
    for figures in every:
        ratios, best_rps = compute_ratios(figures, names), max(_compute_means(figures, names).values())
        shown = " | ".join(f"{ratios[name]:.2f}" for name in names)
        lines.append(f"| {figures.cell.name} | {figures.cell.title} | {best_rps:.2f} | {shown} |")
    lines += ["", "| strategy | over the best of the others, geometric mean | least |", "|---|---|---|"]
    for name, summary in summarize(every, names).items():
        lines.append(f"| {name} | {summary['geometric_mean']:.3f} | {summary['least']:.3f} |")
    lines += ["", f"| cell | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for figures in every:
        sliders = " | ".join(_show_sliders(figures.strategies[name]) for name in names)
        lines.append(f"| {figures.cell.name} | {sliders} |")
    return "\n".join(lines) + "\n"


def make_comparison_report(every: Sequence[CellFigures], names: Sequence[str]) -> dict[str, Any]:
    """Makes the JSON that ``--json`` prints."""
    cells = {figures.cell.name: _report_cell(figures, names) for figures in every}
    return {"cells": cells, "summary": summarize(every, names)}


def _report_cell(figures: CellFigures, names: Sequence[str]) -> dict[str, Any]:
    strategies = []
    for name in _sort(figures, names):
        found, share = figures.strategies[name], _compare_with_best(figures, name, names)
        strategies.append(
            {
                **({"strategy": name} if found.sliders is None else describe_candidate(found.sliders)),
                "goodput_rps": statistics.fmean(found.goodputs_rps),
                "goodput_per_seed": list(found.goodputs_rps),
                "of_best": share.mean,
                "of_best_interval": list_ends(share),
            }
        )
    return {"title": figures.cell.title, "duration_s": figures.duration_s, "strategies": strategies}


def make_strategy_table(every: Sequence[CellFigures], names: Sequence[str]) -> RenderableType:
    """Shows the figures on a terminal: one cell in full, several side by side."""
    if len(every) == 1:
        return _make_cell_table(every[0], names)
    table = Table(box=None, pad_edge=False)
    for column in ("cell", "what", "best, requests/s", *names):
        table.add_column(column)
    for figures in every:
        ratios, best_rps = compute_ratios(figures, names), max(_compute_means(figures, names).values())
        table.add_row(
            figures.cell.name, figures.cell.title, f"{best_rps:.2f}", *[f"{ratios[name]:.2f}" for name in names]
        )
    lines = [
        Text(
            f"{name} over the best of the others: geometric mean {one['geometric_mean']:.3f}, least {one['least']:.3f}"
        )
        for name, one in summarize(every, names).items()
    ]
    return Group(table, Text(""), *lines)


def _make_cell_table(figures: CellFigures, names: Sequence[str]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for column in ("strategy", "engines", "goodput, requests/s", "% of the best (95 % interval)"):
        table.add_column(column)
    for name in _sort(figures, names):
        found = figures.strategies[name]
        share = show_interval(_compare_with_best(figures, name, names), ".0f", 100)
        table.add_row(name, _show_sliders(found), f"{statistics.fmean(found.goodputs_rps):.2f}", share)
    note = "Strategies whose interval contains 100 may be as good as the best."
    return Group(Text(figures.cell.title), Text(""), table, Text(""), Text(note))


def _compare_with_best(figures: CellFigures, name: str, names: Sequence[str]) -> Interval:
    """Compares a strategy with the cell's best, seed by seed: both served the same requests."""
    best = figures.strategies[_sort(figures, names)[0]].goodputs_rps
    own = figures.strategies[name].goodputs_rps
    return estimate_interval([mine / most if most else 0.0 for mine, most in zip(own, best, strict=True)])


def _compute_means(figures: CellFigures, names: Sequence[str]) -> dict[str, float]:
    return {name: statistics.fmean(figures.strategies[name].goodputs_rps) for name in names}


def _sort(figures: CellFigures, names: Sequence[str]) -> list[str]:
    means: Mapping[str, float] = _compute_means(figures, names)
    return sorted(names, key=lambda name: -means[name])


def _show_sliders(figures: StrategyFigures) -> str:
    return "meets the objectives at no rate" if figures.sliders is None else format_candidate_engines(figures.sliders)
