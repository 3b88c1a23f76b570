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
# Papers reproduced in the simulator

    make bench-paper

makes this page and its plots anew from the traces in `benchmarks/traces`. `python -m benchmarks.papers.run taichi --only NAME` shows
one experiment. Every run is a function of its seed: figures repeat exactly.

| column | meaning |
| --- | --- |
| paper | what the paper states in its text; empty: nothing |
| ours | what the simulator gives: the mean over seeds ± their standard deviation |
| ours / paper | the ratio of the two; ratios between systems are paired by seed |
| band | where an independent simulation of the same published data came out |

Bands that say *about* are 5 to 10 % around that, and 30 % in Figure 17. *Overloaded* means that P90 TTFT grows by 1.3 or more with
twice the run.

Nothing but kernel measurements is fitted ([latency profiles](latency-profiles.md)). Semantics are the paper's: `no_grant=wait`,
`ttft_end=decode_join`, `early_rejection=random`, `min_tokens_between_moves=0` ([simulator](../reference/simulator.md#parameters)).

## TaiChi

*Prefill-Decode Aggregation or Disaggregation? Unifying Both for Goodput-Optimized LLM Serving*
([arXiv:2508.01989](https://arxiv.org/abs/2508.01989)). Goodput is the highest rate at which 90 % of the requests meet both objectives.

A weak baseline proves nothing. So *tuned* systems are the best of a grid by goodput, chosen at other seeds than those reported:

- aggregation over chunk sizes 256 to 2048, by round robin and by least work;
- disaggregation over ratios 1:3 to 3:1, by round robin and by least work;
- TaiChi over its three sliders.

Where a tuned cell has bands, they are of a search over TaiChi's sliders alone: tuned TaiChi beside the untuned others.
"""
