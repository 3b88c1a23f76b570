"""Plots as SVG, by matplotlib: the same bytes for the same results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.papers.findings import Plot, PlotKind

if TYPE_CHECKING:
    from pathlib import Path

_SIZE_INCHES = (5.6, 3.4)
_COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#efb118", "#9c6b4e", "#a463f2")
_STYLE: Any = {
    "svg.hashsalt": "sluice",  # names inside the file: the same each time
    "svg.fonttype": "none",  # text stays text: small and searchable
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class NoMatplotlibError(RuntimeError):
    """Plots are asked for and matplotlib is not installed."""


def write_plot(plot: Plot, folder: Path) -> Path:
    """Draws a plot into ``folder``.

    Raises:
        NoMatplotlibError: It is not installed.
    """
    try:
        from matplotlib import rc_context  # noqa: PLC0415 - only those who draw need it
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise NoMatplotlibError(
            "plots need matplotlib, which the development tools bring: make .venv/stamps/dev"
        ) from error
    with rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        _draw(plot, axes)
        path = folder / f"{plot.name}.svg"
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _draw(plot: Plot, axes: Any) -> None:
    width = 0.8 / len(plot.series)
    for number, series in enumerate(plot.series):
        colour = _COLOURS[number % len(_COLOURS)]
        if plot.kind is PlotKind.LINES:
            axes.plot(series.x, series.y, label=series.name, color=colour, marker="o", markersize=3, linewidth=1.4)
        elif plot.kind is PlotKind.POINTS:
            axes.scatter(series.x, series.y, label=series.name, color=colour, s=5, alpha=0.5, linewidths=0)
        else:
            shift = (number - (len(plot.series) - 1) / 2) * width
            axes.bar([x + shift for x in series.x], series.y, width, label=series.name, color=colour)
    for x in plot.guides_x:
        axes.axvline(x, color="0.5", linewidth=0.8, linestyle="--")
    for y in plot.guides_y:
        axes.axhline(y, color="0.5", linewidth=0.8, linestyle="--")
    if plot.ticks:
        axes.set_xticks(range(len(plot.ticks)), plot.ticks)
    axes.set_title(plot.title, fontsize=9, loc="left")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if len(plot.series) > 1:
        axes.legend(frameon=False, fontsize=8)
