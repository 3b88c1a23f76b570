"""Simulates the planner's trials, in several processes where allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_cli.simulation.worker_processes import WorkerPool
from sluice_core.planning.trials import PlanningProblem, SearchTrial, TrialEvaluator, TrialResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _prepare(problem: PlanningProblem) -> Callable[[SearchTrial], TrialResult]:
    return TrialEvaluator(problem).evaluate


class TrialPool(WorkerPool[SearchTrial, TrialResult]):
    """Processes that simulate trials.

    Args:
        problem: What is planned for.
        num_processes: 1: this process.
    """

    def __init__(self, problem: PlanningProblem, num_processes: int) -> None:
        super().__init__(_prepare, problem, num_processes)

    def run(self, trials: Sequence[SearchTrial]) -> list[TrialResult]:
        """Simulates trials, in their order."""
        return list(self.map(trials))
