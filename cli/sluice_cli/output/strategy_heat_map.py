"""The heat map of ``sluice bench strategies``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from sluice_cli.output.bench_table import compute_ratios
from sluice_cli.output.plan_charts import STYLE, to_svg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_cli.simulation.comparison_file import CellFigures

_WORST_SHARE = 0.5  # of the best goodput: all below is equally bad
_BRIGHT_SHARE = 0.8  # from here on numbers are written in black


def draw_heat_map(every: Sequence[CellFigures], names: Sequence[str]) -> str:
    """Draws each strategy's goodput over that of the cell's best, as SVG."""
    ratios = [compute_ratios(figures, names) for figures in every]
    with mpl.rc_context({**STYLE, "axes.grid": False, "font.size": 9}):
        figure = Figure(figsize=(1.6 + 0.9 * len(names), 1.0 + 0.3 * len(ratios)), layout="constrained")
        axes = figure.add_subplot()
        values = [[each[name] for name in names] for each in ratios]
        axes.imshow(values, vmin=_WORST_SHARE, vmax=1.0, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(names)), names, rotation=30)
        axes.set_yticks(range(len(ratios)), [figures.cell.name for figures in every])
        for row, each in enumerate(values):
            for column, value in enumerate(each):
                ink = "black" if value > _BRIGHT_SHARE else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink)
        axes.set_title("goodput over that of the cell's best strategy", fontsize=9, loc="left")
        return to_svg(figure)
