"""Makes the planner's runs, in processes where more than one is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from sluice_cli.simulation.worker_processes import start_workers
from sluice_core.planning.trials import PlanningProblem, SearchTrial, TrialEvaluator, TrialResult

if TYPE_CHECKING:
    from collections.abc import Sequence

_evaluators: list[TrialEvaluator] = []


def _prepare(problem: PlanningProblem) -> None:
    """Once per process: what all its runs share."""
    _evaluators[:] = [TrialEvaluator(problem)]


def _evaluate(trial: SearchTrial) -> TrialResult:
    return _evaluators[0].evaluate(trial)


class TrialPool:
    """Processes that make runs, in a ``with`` block; results do not depend on how many there are.

    Args:
        problem: What is planned for.
        num_processes: 1: this process.
    """

    def __init__(self, problem: PlanningProblem, num_processes: int) -> None:
        self._evaluator = TrialEvaluator(problem)
        self._pool = start_workers(num_processes, _prepare, problem)

    def run(self, trials: Sequence[SearchTrial]) -> list[TrialResult]:
        """Makes runs, in their order."""
        if self._pool is None:
            return [self._evaluator.evaluate(trial) for trial in trials]
        return list(self._pool.map(_evaluate, trials))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
