"""Turns trials into a table of medians and of ratios with their spread, and into JSON.

A ratio compares trials of one repeat, which ran within seconds of each other: the machine's speed changes from minute
to minute by more than the routers differ.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trial import Measurement

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median and its range.

    Args:
        median: Median of the repeats.
        low: Smallest value.
        high: Largest value.
        count: Number of repeats.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarizes values; NaN is left out."""
        numbers = [value for value in values if not math.isnan(value)]
        if not numbers:
            return cls(median=math.nan, low=math.nan, high=math.nan, count=0)
        return cls(median=statistics.median(numbers), low=min(numbers), high=max(numbers), count=len(numbers))

    def format(self, digits: int = 2, *, has_range: bool = True) -> str:
        """For a table."""
        if not self.count:
            return "-"
        text = f"{self.median:.{digits}f}"
        return f"{text} [{self.low:.{digits}f}-{self.high:.{digits}f}]" if has_range and self.count > 1 else text

    def as_json(self) -> dict[str, float | int | None]:
        """Returns the values for the result file."""
        if not self.count:
            return {"median": None, "low": None, "high": None, "count": 0}
        return {"median": self.median, "low": self.low, "high": self.high, "count": self.count}


Repeats = list[dict[str, "Measurement"]]


def choose_valid(repeats: Repeats, name: str) -> list[Measurement]:
    """Returns a contestant's trials that are not void, or all of them if every one is void."""
    trials = [repeat[name] for repeat in repeats if name in repeat]
    return [trial for trial in trials if not trial.void_reasons] or trials


def find_ratios(repeats: Repeats, name: str, reference: str) -> Spread:
    """CPU per token of the reference over the contestant's, by repeat: how many times the tokens one core handles.

    Void trials are left out, unless all are void.
    """
    pairs = [(repeat[name], repeat[reference]) for repeat in repeats if name in repeat and reference in repeat]
    valid = [pair for pair in pairs if not (pair[0].void_reasons or pair[1].void_reasons)] or pairs
    return Spread.of([other.cpu_us_per_token / own.cpu_us_per_token for own, other in valid if own.usage.router_cpu_s])


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in (header, rule, *rows))
    )


def format_comparison(repeats: Repeats, names: Sequence[str], reference: str) -> str:
    """Makes the table of a comparison.

    Args:
        repeats: Trials by name, one mapping per repeat.
        names: Rows, in order.
        reference: Contestant whose CPU per token is 1.
    """
    header = (
        *("router", f"tokens/core vs {reference}", "CPU us/token", "router core", "tokens/s", "added p50", "p99 ms"),
        *("p99.9", "TTFT+ p50", "p99 ms", "PSS MiB idle", "loaded", "errors", "void"),
    )
    return format_table(header, [_row(repeats, name, reference) for name in names])


def _row(repeats: Repeats, name: str, reference: str) -> tuple[str, ...]:
    trials = choose_valid(repeats, name)

    def median(value: Callable[[Measurement], float], digits: int = 2) -> str:
        return Spread.of([value(trial) for trial in trials]).format(digits, has_range=False)

    has_router = any(trial.usage.router_cpu_s for trial in trials)
    num_trials = sum(name in repeat for repeat in repeats)
    num_void = sum(bool(repeat[name].void_reasons) for repeat in repeats if name in repeat)
    return (
        name,
        find_ratios(repeats, name, reference).format() if has_router else "-",
        Spread.of([trial.cpu_us_per_token for trial in trials]).format(1) if has_router else "-",
        median(lambda trial: trial.usage.router_cores) if has_router else "-",
        median(lambda trial: trial.tokens_per_s, 0),
        median(lambda trial: trial.load.token_latency.p50_ms),
        median(lambda trial: trial.load.token_latency.p99_ms),
        median(lambda trial: trial.load.token_latency.p999_ms),
        median(lambda trial: trial.load.added_ttft.p50_ms),
        median(lambda trial: trial.load.added_ttft.p99_ms),
        median(lambda trial: trial.idle_pss_bytes / MIB, 0) if has_router else "-",
        median(lambda trial: trial.pss_bytes / MIB, 0) if has_router else "-",
        str(sum(trial.load.num_errors for trial in trials)),
        f"{num_void}/{num_trials}",
    )


def format_calibration(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Describes the machine's speed in one line."""
    parts = [f"{name} {before[name]:.2f} -> {after[name]:.2f}" for name in before]
    return "machine, before -> after: " + ", ".join(parts)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Writes the result file; NaN becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_without_nan(result), indent=2) + "\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
