"""The papers that ``benchmarks.papers.run`` knows, each with its experiments by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.papers.taichi import GOODPUT_CELLS, H100_CELL, OTHER_CELLS
from benchmarks.papers.taichi_breakdown import measure_figure17, measure_figure18, measure_figure19
from benchmarks.papers.taichi_goodput import measure_cell, measure_tuned_cell
from benchmarks.papers.taichi_motivation import (
    measure_figure4,
    measure_figure5,
    measure_figure6,
    measure_figure8,
    measure_table2,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.papers.experiment import Bench
    from benchmarks.papers.findings import Chapter

    Experiment = Callable[[Bench], Chapter]

TAICHI: Mapping[str, Experiment] = {
    "table2": measure_table2,
    "figure4": measure_figure4,
    "figure5": measure_figure5,
    "figure6": measure_figure6,
    "figure8": measure_figure8,
    **{cell.name: partial(measure_cell, cell) for cell in (*GOODPUT_CELLS, *OTHER_CELLS)},
    **{f"{cell.name}-tuned": partial(measure_tuned_cell, cell) for cell in (*GOODPUT_CELLS, H100_CELL)},
    "figure17": measure_figure17,
    "figure18": measure_figure18,
    "figure19": measure_figure19,
}

PAPERS: Mapping[str, Mapping[str, Experiment]] = {"taichi": TAICHI}

INTRODUCTION = """
# Results: papers reproduced in the simulator

What papers state beside what the simulator gives, the ratio of the two, and the band in which an independent simulation of the
same published data came out (where that says *about*: 5 to 10 % around it, 30 % in Figure 17; where it says *overloaded*: P90 TTFT
grows by 1.3 or more with twice the run). Where no figure of a paper is given, the paper states none in its text. Nothing but kernel
measurements is fitted ([latency.md](../latency.md)); semantics are the paper's ([simulator.md](../simulator.md), `no_grant=wait`,
`ttft_end=decode_join`, `early_rejection=random`, `min_tokens_between_moves=0`).

    make bench-paper

makes this page and its plots anew from the traces in `benchmarks/traces`; `python -m benchmarks.papers.run taichi --only NAME`
shows one experiment. Every run is a function of its seed: figures repeat exactly.

## TaiChi

*Prefill-Decode Aggregation or Disaggregation? Unifying Both for Goodput-Optimized LLM Serving*. Goodput is the highest
rate at which 90 % of the requests meet both objectives, the mean over seeds ± their standard deviation; ratios are paired by seed.
*Tuned* systems are the best of a grid by goodput, chosen at other seeds than those reported: aggregation over chunk sizes 256 to 2048,
disaggregation over ratios 1:3 to 3:1, both by round robin and by least work; TaiChi over its three sliders. A weak baseline
proves nothing. Where a tuned cell has bands, they are of a search over TaiChi's sliders alone: tuned TaiChi beside the untuned others.
"""
