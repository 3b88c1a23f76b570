"""Draws the cells of ``sluice bench strategies`` from the product of models, GPUs, traces, sizes, routers, objectives.

    .venv/bin/python benchmarks/strategies/draw_cells.py > benchmarks/strategies/drawn_cells.toml

A number behind it is another seed, for cells that no rule was found on.

Every value of every dimension is in as many cells as any other, as far as 24 cells allow; the seed says in which.
Objectives are ``SLOS`` by trace, for a 14B model on A100s. For others TTFT scales by the time of a prefill iteration,
TPOT by that of a decode iteration; ``tight`` is 0.7 of both.
"""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING

from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import IterationShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SEED = 14
NUM_CELLS = 24
DIMENSIONS: dict[str, Sequence[str]] = {
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
    "engines": ("4", "16", "64"),
    "routers": ("1", "4"),
    "slo": ("loose", "tight"),
}
REPORT_S = 0.05  # age of the reports, of several routers
TIGHT = 0.7
REFERENCE = ("qwen2.5-14b", "a100-80g", 1)
SLOS = {  # TTFT, TPOT in milliseconds on the reference
    "arxiv_16k_recon": (4000, 70),
    "sharegpt_dist": (3000, 110),
    "sharegpt_2k": (3000, 110),
    "sharegpt_turn1_synth": (3000, 110),
    "azure2023_code": (2000, 100),
    "azure2023_conv": (2000, 100),
    "qwentrace_synth": (3000, 100),  # rows have TTFT objectives of their own
    "bwb": (3000, 70),
}
_PREFILL = IterationShape(prefill_tokens=2048, num_chunks=1, attention_work=2048 * 1024.0)
_DECODE = IterationShape(num_decodes=64, decode_context_tokens=64_000)


def draw_cells(seed: int = SEED, num_cells: int = NUM_CELLS) -> list[dict[str, str]]:
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
            ordered = sorted(rows, key=lambda row: (int(row[3]), *row))
            return [dict(zip(DIMENSIONS, row, strict=True)) for row in ordered]


def compute_slo_ms(cell: Mapping[str, str], tensor_parallel: int) -> tuple[int, int]:
    """Computes a cell's objectives for TTFT and TPOT, in milliseconds."""
    target = load_model_on_gpu(cell["model"], cell["gpu"], tensor_parallel).profile
    reference = load_model_on_gpu(*REFERENCE).profile
    tightness = TIGHT if cell["slo"] == "tight" else 1.0
    ttft_ms, tpot_ms = SLOS[cell["trace"]]
    prefill = target.estimate_shape_s(_PREFILL) / reference.estimate_shape_s(_PREFILL)
    decode = target.estimate_shape_s(_DECODE) / reference.estimate_shape_s(_DECODE)
    return round(tightness * prefill * ttft_ms / 10) * 10, round(tightness * decode * tpot_ms)


def format_cells(cells: Sequence[Mapping[str, str]], seed: int) -> str:
    """Formats cells as TOML for ``sluice bench strategies --cells``, in a file of this folder: paths are relative."""
    lines = [f"# Drawn by draw_cells.py with seed {seed}. Do not edit."]
    for number, cell in enumerate(cells):
        tensor_parallel = 2 if cell["model"] == "qwen2.5-32b" else 1
        ttft_ms, tpot_ms = compute_slo_ms(cell, tensor_parallel)
        routers = "one router" if cell["routers"] == "1" else f"{cell['routers']} routers"
        title = f"{cell['model']}, {cell['gpu']}, {cell['trace']}, {cell['engines']} engines, {routers}, {cell['slo']}"
        several = [f"routers={cell['routers']}", f"report_s={REPORT_S}"] if cell["routers"] != "1" else []
        lines += [
            "",
            f"[cells.c{number:02}]",
            f'title = "{title}"',
            f'model = "{cell["model"]}"',
            f'gpu = "{cell["gpu"]}"',
            f"tensor_parallel = {tensor_parallel}",
            f'trace = "../traces/{cell["trace"]}.csv.gz"',
            f"replicas = {cell['engines']}",
            f"ttft_ms = {ttft_ms}",
            f"tpot_ms = {tpot_ms}",
            f"set = {json.dumps(several)}",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    seed = int(sys.argv[1]) if sys.argv[1:] else SEED
    sys.stdout.write(format_cells(draw_cells(seed), seed))
