"""Searches for what fleets of several sizes serve: a request as JSON on standard input, the result on standard output.

It runs in a process of its own, as ``autotune.search`` does, by whose means it is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.planning.goodput_comparison import Fidelity, GoodputComparison, RankedCandidate
from sluice_core.planning.planner import estimate_start_rps
from sluice_core.planning.slider_search import Search
from sluice_core.planning.trials import PlanningProblem, SearchTrial, TrialEvaluator, TrialResult
from sluice_operator.autoscaling.capacity_messages import CapacityPoint, CapacityRequest, CapacityResult
from sluice_operator.autotune.search import make_candidate, make_effort, make_problem, make_sliders, make_space
from sluice_operator.autotune.search_process import serve_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_core.planning.slider_search import SearchEffort
    from sluice_operator.autotune.search_messages import SearchRequest

# Of the sliders in force where the search finds no better ones: more than chance.
WORTHWHILE = 1.05


def search_capacity(request: CapacityRequest, effort: SearchEffort | None = None) -> CapacityResult:
    """Searches for the goodput of each size, with the sliders in force or, within the bounds, with better ones.

    Args:
        request: Sizes, workload, engines, objectives and bounds.
        effort: How much is simulated; None: as much as the objectives ask for.

    Raises:
        ValueError: The engines are unknown, or nothing is within the bounds.
    """
    problem = make_problem(request.largest)
    effort = effort or make_effort(problem)
    evaluator = TrialEvaluator(problem)

    def run_trials(trials: Sequence[SearchTrial]) -> list[TrialResult]:
        return [evaluator.evaluate(trial) for trial in trials]

    points: list[CapacityPoint] = []
    for sized in request.requests:
        comparison = GoodputComparison(run_trials, sized.constraints.target)
        start_rps = _guess(sized, problem, points)
        if request.may_tune and sized.constraints.replicas > 1 and not sized.constraints.is_fixed:
            points.append(_find_best(sized, comparison, effort, start_rps))
        else:
            points.append(_measure(sized, comparison, effort, start_rps))
    return CapacityResult(points=tuple(points))


def _guess(request: SearchRequest, problem: PlanningProblem, points: Sequence[CapacityPoint]) -> float:
    """Guesses the goodput, from that of the size below."""
    replicas = request.constraints.replicas
    if points:
        return points[-1].goodput_rps * replicas / points[-1].replicas
    return estimate_start_rps(problem, replicas, 1)


def _measure(
    request: SearchRequest, comparison: GoodputComparison, effort: SearchEffort, start_rps: float
) -> CapacityPoint:
    candidate = make_candidate(request)
    fidelity = Fidelity(seeds=effort.seeds, duration_s=effort.choose_duration_s(start_rps))
    (found,) = comparison.measure_goodputs([candidate], fidelity, {candidate: start_rps})
    return _describe(request, found)


def _find_best(
    request: SearchRequest, comparison: GoodputComparison, effort: SearchEffort, start_rps: float
) -> CapacityPoint:
    in_force = make_candidate(request)
    search = Search(comparison, make_space(request), effort)
    found = search.find_best(request.constraints.replicas, 1, start_rps, in_force)
    present = next(ranked for ranked in found.ranking if ranked.candidate == in_force)
    return _describe(request, found.best if _is_better(found.best, present) else present)


def _describe(request: SearchRequest, found: RankedCandidate) -> CapacityPoint:
    is_in_force = found.candidate == make_candidate(request)
    sliders = request.in_force if is_in_force else make_sliders(request, found.candidate)
    return CapacityPoint(replicas=request.constraints.replicas, goodput_rps=found.goodput_rps, sliders=sliders)


def _is_better(best: RankedCandidate, present: RankedCandidate) -> bool:
    pairs = zip(best.goodputs_rps, present.goodputs_rps, strict=True)
    return best.goodput_rps > WORTHWHILE * present.goodput_rps and all(new > old for new, old in pairs)


def main() -> None:
    """Reads one request, searches, and writes the result."""
    serve_request(lambda text: search_capacity(CapacityRequest.from_json(text)).to_json())


if __name__ == "__main__":
    main()
