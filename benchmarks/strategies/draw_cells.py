"""Draws the cells of ``compare.py`` from the full product of models, GPUs, traces, sizes, routers and objectives.

    .venv/bin/python benchmarks/strategies/draw_cells.py > benchmarks/strategies/drawn_cells.toml

Every value of every dimension is in as many cells as any other, as far as 24 cells allow; the seed says in which.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED = 14
NUM_CELLS = 24
DIMENSIONS: dict[str, Sequence[object]] = {
    "model": ("llama-3-8b", "qwen2.5-14b", "qwen2.5-32b"),  # the last on two GPUs
    "gpu": ("a100-80g", "h100-80g"),
    "trace": (
        "arxiv_16k_recon",
        "sharegpt_dist",
        "sharegpt_2k",
        "sharegpt_turn1_synth",
        "azure2023_code",
        "azure2023_conv",
        "qwentrace_synth",
        "bwb",
    ),
    "engines": (4, 16, 64),
    "routers": (1, 4),
    "slo": ("loose", "tight"),
}


def draw_cells(seed: int = SEED, num_cells: int = NUM_CELLS) -> list[dict[str, object]]:
    """Draws cells, no two alike.

    Args:
        seed: Fixes them.
        num_cells: How many.
    """
    rng = random.Random(seed)
    while True:
        columns = []
        for values in DIMENSIONS.values():
            column = [values[number % len(values)] for number in range(num_cells)]
            rng.shuffle(column)
            columns.append(column)
        rows = list(zip(*columns, strict=True))
        if len(set(rows)) == num_cells:
            return [dict(zip(DIMENSIONS, row, strict=True)) for row in sorted(rows, key=lambda row: (row[3], row))]


def format_cells(cells: Sequence[dict[str, object]]) -> str:
    """Formats cells as TOML."""
    lines = [f"# Drawn by draw_cells.py with seed {SEED}. Do not edit."]
    for number, cell in enumerate(cells):
        lines += ["", f"[cells.c{number:02}]"]
        lines += [f"{name} = {_quote(value)}" for name, value in cell.items()]
    return "\n".join(lines) + "\n"


def _quote(value: object) -> str:
    return str(value) if isinstance(value, int) else f'"{value}"'


if __name__ == "__main__":
    sys.stdout.write(format_cells(draw_cells()))
