"""Searches the plan of ``sluice plan``, and measures the curves that its page draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_cli.simulation.trial_pool import TrialPool
from sluice_core.planning.planner import Planner
from sluice_core.planning.prediction import measure_curves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sluice_cli.simulation.plan_inputs import PlanInputs
    from sluice_core.planning.planner import PlanResult
    from sluice_core.planning.slider_candidates import SliderCandidate
    from sluice_core.planning.slider_search import SearchEffort

_CURVE_FACTORS = (0.6, 0.75, 0.85, 0.92, 1.0, 1.08, 1.2)  # rates of a curve, in units of the plan's goodput
_MOST_CURVES = 8  # as many as a palette has colours that everybody can tell apart


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """What a search found.

    Args:
        result: The plan.
        curves: Attainment by rate of the best candidates; empty where none were asked for.
    """

    result: PlanResult
    curves: Mapping[SliderCandidate, Sequence[tuple[float, float]]] = field(default_factory=dict)


def search_plan(
    inputs: PlanInputs,
    effort: SearchEffort,
    num_processes: int,
    report: Callable[[float, str], None],
    *,
    draws_curves: bool,
) -> PlanSearch:
    """Searches a plan.

    Args:
        inputs: The task.
        effort: How long to simulate.
        num_processes: Processes to use.
        report: Takes the share done and what is being done.
        draws_curves: Measure curves too.

    Raises:
        ValueError: No plan within the bounds meets the objectives at any rate.
    """
    with TrialPool(inputs.problem, num_processes) as pool:
        planner = Planner(inputs.problem, inputs.space, effort, pool.run, report)
        result = planner.plan(inputs.goal, inputs.in_force)
        if not draws_curves:
            return PlanSearch(result=result)
        fidelity = result.found.fidelity
        curves = measure_curves(pool.run, *_choose_curves(result), fidelity.seeds, fidelity.duration_s)
        return PlanSearch(result=result, curves=curves)


def _choose_curves(result: PlanResult) -> tuple[list[SliderCandidate], list[float]]:
    """Chooses the candidates whose attainment is drawn, and the rates, around the plan's goodput."""
    candidates = [ranked.candidate for ranked in result.found.ranking[:_MOST_CURVES]]
    return candidates, [factor * result.goodput_rps.mean for factor in _CURVE_FACTORS]
