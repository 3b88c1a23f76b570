"""A formula in place of simulated runs: a search asks it, and tests know what it must find."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sluice_core.planning.trials import TrialResult

if TYPE_CHECKING:
    from sluice_core.planning.trials import SearchTrial


class FormulaEvaluator:
    """Stands in for ``TrialEvaluator``: attainment is 0.9 at a trial's goodput."""

    trials: list[SearchTrial]

    def __init__(self, problem: object) -> None:
        self.problem = problem

    @classmethod
    def find_goodput_rps(cls, trial: SearchTrial) -> float:
        """Goodput of a trial's candidate and seed, in requests/s."""
        raise NotImplementedError

    def evaluate(self, trial: SearchTrial) -> TrialResult:
        """See ``TrialEvaluator.evaluate``."""
        self.trials.append(trial)
        over = math.log(trial.rate_rps / self.find_goodput_rps(trial))
        return TrialResult(trial=trial, attainment=min(1.0, max(0.0, 0.9 - 4.0 * over)), num_iterations=1)
