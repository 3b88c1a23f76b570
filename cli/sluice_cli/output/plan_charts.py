"""The charts of ``sluice plan --html``, drawn by matplotlib as SVG that stands inline in a page."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
MET_COLOUR, MISSED_COLOUR = COLOURS[0], COLOURS[1]
_LIMIT_STYLE: Any = {"color": "0.35", "linestyle": "--", "linewidth": 1.0}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "svg.hashsalt": "sluice",  # the same names inside the file each time
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.borderaxespad": 0.2,
}
_SIZE_INCHES = (6.2, 4.0)
# Ends of a heat map's colour scale, in units of the best goodput: all below it is equally bad, and the dark end, which
# would hide the numbers, stays unused.
_WORST_SHARE, _DARKEST_SHARE = 0.6, 1.15
_DARK_COLOUR = 0.5  # of the colour scale, from which on numbers are written in white


def draw_attainment(curves: Mapping[str, Sequence[tuple[float, float]]], target_percent: float) -> str:
    """Draws attainment against the rate.

    Args:
        curves: For each plan (requests per second, attainment in percent).
        target_percent: Attainment that is asked for.
    """
    with mpl.rc_context(STYLE):
        # Names of plans are long: the legend stands below the chart, and needs a line for each.
        figure, axes = _make_figure("requests per second", "attainment, %", extra_inches=0.2 * len(curves))
        for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
            rates, attainments = zip(*points, strict=True)
            axes.plot(rates, attainments, color=colour, marker="o", markersize=4, linewidth=1.6, label=name)
        axes.axhline(target_percent, **_LIMIT_STYLE, label=f"target, {target_percent:g} %")
        axes.set_ylim(0, 102)
        figure.legend(loc="outside lower left", fontsize=10, markerscale=1.5)
        return to_svg(figure)


def draw_latencies(latencies: Sequence[tuple[float, float]], ttft_s: float, tpot_ms: float) -> str:
    """Draws a point for each request, and the objectives; points beyond an axis stand at its end.

    Args:
        latencies: (TTFT in seconds, TPOT in milliseconds) of each request.
        ttft_s: TTFT objective.
        tpot_ms: TPOT objective.
    """
    with mpl.rc_context(STYLE):
        figure, axes = _make_figure("TTFT, s", "TPOT, ms")
        axes.add_patch(Rectangle((0, 0), ttft_s, tpot_ms, color="#e8f3ea", zorder=0))
        axes.axvline(ttft_s, **_LIMIT_STYLE)
        axes.axhline(tpot_ms, **_LIMIT_STYLE)
        for is_met, colour, label in ((True, MET_COLOUR, "both met"), (False, MISSED_COLOUR, "one missed")):
            points = [
                (min(ttft, 2 * ttft_s), min(tpot, 2 * tpot_ms))
                for ttft, tpot in latencies
                if (ttft <= ttft_s and tpot <= tpot_ms) is is_met
            ]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.scatter(xs, ys, s=10, color=colour, alpha=0.5, linewidths=0, label=label, clip_on=False)
        axes.set_xlim(0, 2 * ttft_s)
        axes.set_ylim(0, 2 * tpot_ms)
        figure.legend(loc="outside lower left", ncols=2, fontsize=10, markerscale=1.5)
        return to_svg(figure)


def draw_goodput_by_chunk_sizes(goodputs_rps: Mapping[tuple[int, int], float], chosen: tuple[int, int]) -> str:
    """Draws a heat map of goodput, blank where nothing was tried.

    Args:
        goodputs_rps: By chunk sizes of P-heavy and of D-heavy engines, in tokens.
        chosen: Chunk sizes of the plan; its cell gets a frame, where it was tried.
    """
    columns, rows = sorted({x for x, _ in goodputs_rps}), sorted({y for _, y in goodputs_rps})
    cells = [[goodputs_rps.get((x, y), math.nan) for x in columns] for y in rows]
    best = max(goodputs_rps.values()) or 1.0
    scale = Normalize(_WORST_SHARE * best, _DARKEST_SHARE * best, clip=True)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = _make_figure("chunk size of P-heavy engines, tokens", "chunk size of D-heavy engines, tokens")
        axes.pcolormesh(cells, cmap="Blues", norm=scale, edgecolors="white", linewidth=1)
        axes.set_xticks([index + 0.5 for index in range(len(columns))], [str(value) for value in columns])
        axes.set_yticks([index + 0.5 for index in range(len(rows))], [str(value) for value in rows])
        axes.tick_params(length=0)
        for (x, y), value in goodputs_rps.items():
            ink = "white" if scale(value) > _DARK_COLOUR else "0.2"
            shown = f"{value:.2f}" if value < 100 else f"{value:.0f}"
            axes.text(columns.index(x) + 0.5, rows.index(y) + 0.5, shown, ha="center", va="center", color=ink)
        if chosen in goodputs_rps:
            corner = (columns.index(chosen[0]), rows.index(chosen[1]))
            frame = Rectangle(corner, 1, 1, fill=False, edgecolor=COLOURS[1], linewidth=2.5, clip_on=False, zorder=5)
            axes.add_patch(frame)
        return to_svg(figure)


def _make_figure(x_label: str, y_label: str, extra_inches: float = 0.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_SIZE_INCHES[0], _SIZE_INCHES[1] + extra_inches), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def to_svg(figure: Figure) -> str:
    """Writes the ``svg`` element without the XML declaration, which HTML does not take."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
