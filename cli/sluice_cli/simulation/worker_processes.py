"""Processes that simulate, for ``sluice simulate``, ``sluice plan`` and ``benchmarks/papers``."""

from __future__ import annotations

import gc
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from typing import TYPE_CHECKING

from sluice_cli.simulation.cell_settings import read_trace
from sluice_core.sim import pickling  # noqa: F401 - cells, trials and summaries go between processes
from sluice_core.sim.cell import GC_THRESHOLD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sluice_core.sim.traces import TraceRow


def start_workers(
    num_processes: int, prepare: Callable[..., None] | None = None, *arguments: object
) -> ProcessPoolExecutor | None:
    """Starts processes; None for one: then this process does the work.

    Args:
        num_processes: How many.
        prepare: Called once in each before its first task, with the arguments.
        arguments: See ``prepare``.
    """
    gc.set_threshold(GC_THRESHOLD)
    if num_processes <= 1:
        return None
    return ProcessPoolExecutor(
        num_processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(prepare, arguments)
    )


@lru_cache(maxsize=8)
def load_rows(trace: Path, *, reads_hashes: bool = False) -> list[TraceRow]:
    """Reads a trace once per process."""
    return read_trace(trace, reads_hashes=reads_hashes)


def _begin(prepare: Callable[..., None] | None, arguments: tuple[object, ...]) -> None:
    gc.set_threshold(GC_THRESHOLD)
    if prepare is not None:
        prepare(*arguments)
