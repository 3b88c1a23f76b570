"""Charts as inline SVG: lines, points in a box, a heat map. No script, no font, nothing fetched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 620, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 48
_MANY = 100  # a value from which on decimals say nothing
# Okabe and Ito's palette: told apart by everybody.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis.

    Args:
        label: What it shows, with its unit.
        low: Value at its start.
        high: Value at its end.
    """

    label: str
    low: float
    high: float


class _Frame:
    """Turns values into places."""

    def __init__(self, x: Axis, y: Axis) -> None:
        self.x, self.y = x, y

    def place_x(self, value: float) -> float:
        share = (value - self.x.low) / (self.x.high - self.x.low)
        return _LEFT + min(max(share, 0.0), 1.0) * (WIDTH - _LEFT - _RIGHT)

    def place_y(self, value: float) -> float:
        share = (value - self.y.low) / (self.y.high - self.y.low)
        return HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - _TOP - _BOTTOM)

    def draw(self) -> list[str]:
        """Grid, numbers and labels."""
        parts = []
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        for value in choose_ticks(self.x.low, self.x.high):
            at = self.place_x(value)
            parts += [_line(at, _TOP, at, bottom, "grid"), _text(at, bottom + 16, f"{value:g}", "middle")]
        for value in choose_ticks(self.y.low, self.y.high):
            at = self.place_y(value)
            parts += [_line(_LEFT, at, right, at, "grid"), _text(_LEFT - 6, at + 4, f"{value:g}", "end")]
        parts.append(_text((_LEFT + right) / 2, HEIGHT - 10, self.x.label, "middle"))
        middle = (_TOP + bottom) / 2
        parts.append(
            f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(self.y.label)}</text>'
        )
        return parts


def choose_ticks(low: float, high: float) -> list[float]:
    """Chooses about six round values of an axis."""
    step = 10.0 ** math.floor(math.log10((high - low) / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 7)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def draw_lines(series: Mapping[str, Sequence[tuple[float, float]]], x: Axis, y: Axis, *, target: float) -> str:
    """Draws a line for each series, with a dashed line at ``target``."""
    frame = _Frame(x, y)
    at = frame.place_y(target)
    parts = [*frame.draw(), _line(_LEFT, at, WIDTH - _RIGHT, at, "limit")]
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(frame.place_x(rate), frame.place_y(value)) for rate, value in points]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (left, top), (rate, value) in zip(places, points, strict=True):
            title = escape(f"{name}: {value:g} at {rate:.3g}")
            parts.append(
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="{colour}"><title>{title}</title></circle>'
            )
    return _wrap(parts)


def draw_scatter(points: Sequence[tuple[float, float]], x: Axis, y: Axis, *, box: tuple[float, float]) -> str:
    """Draws points and the box of those that meet both limits; points beyond an axis stand at its end."""
    frame = _Frame(x, y)
    right, top = frame.place_x(box[0]), frame.place_y(box[1])
    bottom = HEIGHT - _BOTTOM
    parts = [
        f'<rect x="{_LEFT}" y="{top:.1f}" width="{right - _LEFT:.1f}" height="{bottom - top:.1f}" class="box"/>',
        *frame.draw(),
    ]
    for left, high in points:
        is_inside = left <= box[0] and high <= box[1]
        colour = COLOURS[0] if is_inside else COLOURS[1]
        parts.append(
            f'<circle cx="{frame.place_x(left):.1f}" cy="{frame.place_y(high):.1f}" r="2" fill="{colour}" opacity="0.5"/>'
        )
    return _wrap(parts)


def draw_heat_map(
    values: Mapping[tuple[int, int], float], x_label: str, y_label: str, *, marked: tuple[int, int]
) -> str:
    """Draws a cell for each value, blank where there is none, with a frame around the marked one."""
    columns, rows = sorted({x for x, _ in values}), sorted({y for _, y in values})
    width, height = (WIDTH - _LEFT - _RIGHT) / len(columns), (HEIGHT - _TOP - _BOTTOM) / len(rows)
    best = max(values.values()) or 1.0
    parts = []
    for (x, y), value in sorted(values.items(), key=lambda cell: cell[0] == marked):  # its frame is drawn last
        left = _LEFT + columns.index(x) * width
        top = HEIGHT - _BOTTOM - (rows.index(y) + 1) * height
        # From 60 % of the best on: below it all is equally bad.
        share = max(0.0, (value / best - 0.6) / 0.4)
        is_marked = (x, y) == marked
        edge = 'stroke="#d55e00" stroke-width="3"' if is_marked else 'stroke="#fff" stroke-width="1"'
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="rgb({235 - 200 * share:.0f},{240 - 130 * share:.0f},{245 - 70 * share:.0f})" {edge}/>'
        )
        ink = "light" if share > 0.55 else ""
        parts.append(
            _text(
                left + width / 2,
                top + height / 2 + 4,
                f"{value:.2f}" if value < _MANY else f"{value:.0f}",
                "middle",
                ink,
            )
        )
    parts += [
        _text(_LEFT + (index + 0.5) * width, HEIGHT - _BOTTOM + 16, str(value), "middle")
        for index, value in enumerate(columns)
    ]
    parts += [
        _text(_LEFT - 6, HEIGHT - _BOTTOM - (index + 0.5) * height + 4, str(value), "end")
        for index, value in enumerate(rows)
    ]
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 10, x_label, "middle"))
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return _wrap(parts)


def _line(left: float, top: float, right: float, bottom: float, kind: str) -> str:
    return f'<line x1="{left:.1f}" y1="{top:.1f}" x2="{right:.1f}" y2="{bottom:.1f}" class="{kind}"/>'


def _text(left: float, top: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _wrap(parts: Sequence[str]) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
