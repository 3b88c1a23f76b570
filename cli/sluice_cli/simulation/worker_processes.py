"""Processes that simulate."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from sluice_core.sim import pickling  # noqa: F401 - clusters, trials and summaries go between processes
from sluice_core.sim.sim_setup import GC_THRESHOLD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.process import BaseProcess

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")
# What a process of a pool does with a task.
_work: list[Callable[[Any], Any]] = []


class WorkerPool(Generic[TaskT, ResultT]):
    """Processes that work on one problem, in a ``with`` block; results do not depend on how many there are.

    Args:
        prepare: Called once per process with the problem; returns what to do with a task. A module's function.
        problem: What all tasks share.
        num_processes: 1: this process.
    """

    def __init__(
        self, prepare: Callable[[Any], Callable[[TaskT], ResultT]], problem: object, num_processes: int
    ) -> None:
        self._work = prepare(problem)
        self._pool = start_workers(num_processes, _keep_work, prepare, problem)

    def map(self, tasks: Iterable[TaskT]) -> Iterator[ResultT]:
        """Does tasks; results come in their order."""
        return map(self._work, tasks) if self._pool is None else self._pool.map(_do_work, tasks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _keep_work(prepare: Callable[[Any], Callable[[Any], Any]], problem: object) -> None:
    _work[:] = [prepare(problem)]


def _do_work(task: Any) -> Any:
    return _work[0](task)


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
    if (parent := parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if prepare is not None:
        prepare(*arguments)


def _end_with(parent: BaseProcess) -> None:
    """Ends this process with its parent: one of a killed pool would wait for tasks for ever."""
    parent.join()
    os._exit(1)
