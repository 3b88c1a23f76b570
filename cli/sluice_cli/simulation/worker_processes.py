"""Processes that simulate."""

from __future__ import annotations

import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from sluice_core.sim import pickling  # noqa: F401 - clusters, trials and summaries go between processes
from sluice_core.sim.sim_setup import GC_THRESHOLD

if TYPE_CHECKING:
    from collections.abc import Callable


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


def _begin(prepare: Callable[..., None] | None, arguments: tuple[object, ...]) -> None:
    gc.set_threshold(GC_THRESHOLD)
    if prepare is not None:
        prepare(*arguments)
