"""Finds goodputs of instances, in several processes where allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from sluice_cli.simulation.worker_processes import start_workers
from sluice_core.planning.parallelism.phase_goodput import GoodputMeter, GoodputTask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_core.planning.parallelism.phase_runs import PhaseWorkload

_meters: list[GoodputMeter] = []


def _prepare(workload: PhaseWorkload) -> None:
    """Once per process: what all its runs share."""
    _meters[:] = [GoodputMeter(workload)]


def _measure(task: GoodputTask) -> float:
    return _meters[0].measure(task)


class GoodputPool:
    """Processes that find goodputs, in a ``with`` block; results do not depend on how many there are.

    Args:
        workload: What instances are to serve.
        num_processes: 1: this process.
        report: Takes the share of the tasks under way that is done, and what is being done.
    """

    def __init__(self, workload: PhaseWorkload, num_processes: int, report: Callable[[float, str], None]) -> None:
        self._meter = GoodputMeter(workload)
        self._pool = start_workers(num_processes, _prepare, workload)
        self._report = report
        self._num_done = 0

    def run(self, tasks: Sequence[GoodputTask]) -> list[float]:
        """Finds goodputs, in the order of the tasks."""
        found = []
        measured = map(self._meter.measure, tasks) if self._pool is None else self._pool.map(_measure, tasks)
        for goodput_rps in measured:
            found.append(goodput_rps)
            self._num_done += 1
            self._report(len(found) / len(tasks), f"{self._num_done} instances simulated")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
