"""What came out, beside what the paper states and the band in which a reproduction lies.

These records are also the file that a document is made from (``docs/measurements/papers/*.json``), so that some experiments can be
carried out again without the others.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Unit(StrEnum):
    """Unit of a finding: how it is written."""

    REQUESTS_PER_S = "requests/s"
    TOKENS_PER_S = "tokens/s"
    TOKENS = "tokens"
    MILLISECONDS = "ms"
    SECONDS = "s"
    PERCENT = "%"
    FACTOR = "x"
    NONE = ""


_DIGITS = {
    Unit.REQUESTS_PER_S: 2,
    Unit.TOKENS_PER_S: 0,
    Unit.TOKENS: 0,
    Unit.MILLISECONDS: 1,
    Unit.SECONDS: 2,
    Unit.PERCENT: 1,
    Unit.FACTOR: 2,
    Unit.NONE: 3,
}


class Record(BaseModel):
    """What all of them are: facts, nothing unknown in them."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Band(Record):
    """From ``low`` to ``high``; without one of them open on that side."""

    low: float | None = None
    high: float | None = None

    def contains(self, value: float) -> bool:
        """Whether a value lies in it."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @property
    def middle(self) -> float | None:
        """Its middle; None where it is open."""
        return None if self.low is None or self.high is None else (self.low + self.high) / 2

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"≤ {self.high:g}" if self.low is None else f"≥ {self.low:g}"
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}-{self.high:g}"


def band(low: float | None, high: float | None = None) -> Band:
    """Makes a band of two bounds."""
    return Band(low=low, high=high)


def exactly(value: float) -> Band:
    """Makes the band of one value: what a paper states."""
    return Band(low=value, high=value)


class Finding(Record):
    """One quantity.

    Args:
        setting: What it was measured on.
        quantity: What was measured.
        unit: Its unit, also of ``paper`` and ``expected``.
        ours: What came out.
        spread: Standard deviation over the seeds.
        paper: What the paper states; None: it states nothing.
        expected: Where a reproduction lies; None: no band is known.
        digits: Digits after the point; None: as the unit has.
    """

    setting: str
    quantity: str
    unit: Unit
    ours: float
    spread: float | None = None
    paper: Band | None = None
    expected: Band | None = None
    digits: int | None = None

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        middle = None if self.paper is None else self.paper.middle
        return self.ours / middle if middle else None

    @property
    def is_expected(self) -> bool | None:
        """Whether it lies in the band; None without one."""
        return None if self.expected is None else self.expected.contains(round(self.ours, self._digits))

    @property
    def _digits(self) -> int:
        return _DIGITS[self.unit] if self.digits is None else self.digits

    def format_ours(self) -> str:
        """Writes what came out."""
        digits = self._digits
        spread = "" if self.spread is None else f" ± {self.spread:.{digits}f}"
        return f"{self.ours:.{digits}f}{spread}"


class PlotKind(StrEnum):
    """How a plot is drawn."""

    LINES = "lines"
    POINTS = "points"
    BARS = "bars"


class Series(Record):
    """Points of one name; in bars ``x`` is the position of the bar."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class Plot(Record):
    """A plot.

    Args:
        name: Of its file.
        title: Over it.
        x_label: With the unit.
        y_label: With the unit.
        kind: How it is drawn.
        series: What is drawn.
        ticks: Names of the positions 0, 1, ... of bars.
        guides_x: Vertical guide lines, such as an objective.
        guides_y: Horizontal ones.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    kind: PlotKind
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()
    guides_x: tuple[float, ...] = ()
    guides_y: tuple[float, ...] = ()


class Chapter(Record):
    """The result of one experiment.

    Args:
        name: As ``--only`` names it.
        title: What the paper calls it.
        setting: What was run.
        findings: What came out.
        notes: What differs from the paper and why.
        plots: Pictures.
    """

    name: str
    title: str
    setting: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()


class Results(Record):
    """All chapters of a paper."""

    paper: str
    chapters: tuple[Chapter, ...]
