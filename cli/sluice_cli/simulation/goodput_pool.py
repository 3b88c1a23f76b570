"""Finds goodputs of instances, in several processes where allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_cli.simulation.worker_processes import WorkerPool
from sluice_core.planning.parallelism.phase_goodput import GoodputMeter, GoodputTask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_core.planning.parallelism.phase_runs import PhaseWorkload


def _prepare(workload: PhaseWorkload) -> Callable[[GoodputTask], float]:
    return GoodputMeter(workload).measure


class GoodputPool(WorkerPool[GoodputTask, float]):
    """Processes that find goodputs.

    Args:
        workload: What instances are to serve.
        num_processes: 1: this process.
        report: Takes the share of the tasks under way that is done, and what is being done.
    """

    def __init__(self, workload: PhaseWorkload, num_processes: int, report: Callable[[float, str], None]) -> None:
        super().__init__(_prepare, workload, num_processes)
        self._report = report
        self._num_done = 0

    def run(self, tasks: Sequence[GoodputTask]) -> list[float]:
        """Finds goodputs, in the order of the tasks."""
        found = []
        for goodput_rps in self.map(tasks):
            found.append(goodput_rps)
            self._num_done += 1
            self._report(len(found) / len(tasks), f"{self._num_done} instances simulated")
        return found
