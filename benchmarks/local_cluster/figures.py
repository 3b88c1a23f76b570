"""Percentiles and tables, alike in all benchmarks that run a local cluster."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def compute_percentile(samples: Sequence[float], percent: float) -> float:
    """Computes a percentile by linear interpolation; NaN without samples.

    Args:
        samples: In any order.
        percent: 0 to 100.
    """
    if not samples:
        return math.nan
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Aligns columns.

    Args:
        header: Names.
        rows: Cells.
        num_left: Columns, from the first, that are aligned to the left; the others go to the right.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_number(value: float, digits: int = 1) -> str:
    """Formats a figure; a dash for one that there is not."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def to_json_number(value: float, digits: int = 3) -> float | None:
    """Rounds a figure for JSON, which has no NaN."""
    return None if math.isnan(value) else round(value, digits)


def describe_machine() -> dict[str, str]:
    """Describes where the figures were taken."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_start": f"{os.getloadavg()[0]:.2f}",
    }
