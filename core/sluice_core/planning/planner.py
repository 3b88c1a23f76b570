"""A plan for a goal: the highest goodput of some GPUs, or the fewest GPUs for a rate.

Goodput grows a little faster than the engines (larger clusters even bursts out), so the number for a rate is guessed
from what an engine does in a small cluster and then tried one by one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from sluice_core.planning.bottleneck import Bottleneck, find_bottleneck
from sluice_core.planning.candidate_choice import rank_for_rate
from sluice_core.planning.goodput_comparison import GoodputComparison, RankedCandidate, RunTrials
from sluice_core.planning.prediction import Interval, Prediction, estimate_interval, predict
from sluice_core.planning.slider_candidates import SearchSpace, SliderCandidate, resize
from sluice_core.planning.slider_search import CandidateSearchResult, Search, SearchEffort
from sluice_core.planning.trials import PlanningProblem
from sluice_core.sim.sim_setup import EngineSetup

_FIRST_ENGINES = 4  # of the small cluster that the number for a rate is guessed from
_MOST_SIZES = 6  # numbers of engines that are tried around the guess
_PREDICTION_SEED_OFFSET = 1000  # seeds of predictions are those of the search and so much
_USED_SHARE = 0.6  # of what engines could do if nobody had to wait
_SHOWN_OVERLOAD = 0.04  # of a rate: what must show within a run
_RESPONSES_PER_RUN = 4  # one after the other: KV caches fill within the first two
_TYPICAL_CHUNK, _TYPICAL_DECODES = 1024, 64
_FEW_REQUESTS = 30  # of a run that shows what requests need


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is wanted.

    Args:
        target: Least attainment.
        rate_rps: A rate to be served by as few GPUs as can; None: the highest rate.
        least_replicas: Fewest engines.
        most_replicas: Most engines; without a rate the number, of engines with ``tensor_parallels[0]`` GPUs each.
        tensor_parallels: GPUs that an engine may have.
    """

    target: float
    most_replicas: int
    least_replicas: int = 1
    rate_rps: float | None = None
    tensor_parallels: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another candidate, and how close it comes.

    Args:
        ranked: It and its goodput.
        difference: Its goodput over that of the chosen one, on the same seeds, minus 1.
    """

    ranked: RankedCandidate
    difference: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The outcome.

    Args:
        chosen: The candidate.
        goodput_rps: Its goodput.
        prediction: At the wanted rate if it is met, else at its goodput.
        bottleneck: What holds it back.
        alternatives: Others, the best first.
        in_force: The plan in force; None: there is none, or it has other engines.
        is_met: The wanted rate is served at the target; True without one.
        found: All that the search compared.
        num_trials: Runs.
        num_iterations: Simulated iterations.
    """

    chosen: SliderCandidate
    goodput_rps: Interval
    prediction: Prediction
    bottleneck: Bottleneck
    alternatives: tuple[Alternative, ...]
    in_force: RankedCandidate | None
    is_met: bool
    found: CandidateSearchResult
    num_trials: int
    num_iterations: int


class Planner:
    """Plans; mutable in what its comparison has learned.

    Args:
        problem: What is planned for.
        space: What may be chosen.
        effort: How much is simulated.
        run_trials: Makes runs.
        report: Called with the progress, from 0 to 1, and the stage.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        space: SearchSpace,
        effort: SearchEffort,
        run_trials: RunTrials,
        report: Callable[[float, str], None] | None = None,
    ) -> None:
        self._problem = problem
        self._space = space
        filled_s = min(_RESPONSES_PER_RUN * estimate_response_s(problem), effort.most_duration_s)
        least_s = max(effort.least_duration_s, problem.slo.ttft_s / _SHOWN_OVERLOAD)
        self._effort = replace(effort, least_duration_s=min(least_s, effort.most_duration_s), filled_s=filled_s)
        self._run_trials = run_trials
        self._report = report
        self._span = (0.0, 0.9)

    def plan(self, goal: Goal, in_force: SliderCandidate | None = None) -> PlanResult:
        """Plan.

        Args:
            goal: What is wanted.
            in_force: The plan in force: where the search begins, and what it is compared with.

        Raises:
            ValueError: Nothing is within the bounds, or nothing within them meets the objectives at any rate.
        """
        comparison = GoodputComparison(self._run_trials, goal.target)
        if goal.rate_rps is None:
            found = self._find_highest(comparison, goal, in_force)
        else:
            found = self._find_fewest(comparison, goal, goal.rate_rps, in_force)
        if not _has_goodput(found):
            raise ValueError(self._explain_unmet(goal, found))
        return self._describe(comparison, goal, found, in_force)

    def _find_highest(
        self, comparison: GoodputComparison, goal: Goal, in_force: SliderCandidate | None
    ) -> CandidateSearchResult:
        """Find the highest goodput of as many GPUs as ``goal.most_replicas`` engines have."""
        num_gpus = goal.most_replicas * goal.tensor_parallels[0]
        sizes = [(num_gpus // parallel, parallel) for parallel in goal.tensor_parallels if num_gpus >= parallel]
        best: CandidateSearchResult | None = None
        for position, (replicas, parallel) in enumerate(sizes):
            self._span = (0.9 * position / len(sizes), 0.9 * (position + 1) / len(sizes))
            found = self._search(comparison, replicas, parallel, None, in_force)
            if best is None or rank_for_rate(found, None) < rank_for_rate(best, None):
                best = found
        assert best is not None
        return best

    def _find_fewest(
        self, comparison: GoodputComparison, goal: Goal, rate_rps: float, in_force: SliderCandidate | None
    ) -> CandidateSearchResult:
        """Find the fewest GPUs that serve a rate; if none do, what serves most of it."""
        best: CandidateSearchResult | None = None
        for position, parallel in enumerate(goal.tensor_parallels):
            share = 0.9 / len(goal.tensor_parallels)
            self._span = (share * position, share * (position + 1))
            found = self._find_fewest_engines(comparison, goal, rate_rps, parallel, in_force)
            if best is None or rank_for_rate(found, rate_rps) < rank_for_rate(best, rate_rps):
                best = found
        assert best is not None
        return best

    def _find_fewest_engines(
        self,
        comparison: GoodputComparison,
        goal: Goal,
        rate_rps: float,
        tensor_parallel: int,
        in_force: SliderCandidate | None,
    ) -> CandidateSearchResult:
        low, high = goal.least_replicas, goal.most_replicas
        replicas = min(max(low, _FIRST_ENGINES), high)
        found = self._search(comparison, replicas, tensor_parallel, None, in_force)
        if not _has_goodput(found):
            return found
        tried = {replicas: found}
        guess = min(max(math.ceil(rate_rps * replicas / found.best.goodput_rps), low), high)
        for _ in range(_MOST_SIZES):
            if guess not in tried:
                near = tried[min(tried, key=lambda number: abs(number - guess))].best
                start_rps = near.goodput_rps * guess / near.candidate.replicas
                tried[guess] = self._search(
                    comparison, guess, tensor_parallel, start_rps, resize(near.candidate, guess, self._space)
                )
            serves = tried[guess].best.goodput_rps >= rate_rps
            following = guess - 1 if serves else guess + 1
            if not low <= following <= high:
                break
            if following in tried and (tried[following].best.goodput_rps >= rate_rps) != serves:
                break
            guess = following
        return min(tried.values(), key=lambda one: rank_for_rate(one, rate_rps))

    def _search(
        self,
        comparison: GoodputComparison,
        replicas: int,
        tensor_parallel: int,
        start_rps: float | None,
        in_force: SliderCandidate | None,
    ) -> CandidateSearchResult:
        start, end = self._span

        def report(share: float, stage: str) -> None:
            if self._report is not None:
                self._report(start + share * (end - start), f"{replicas} engines: {stage}")

        is_same = in_force is not None and (in_force.replicas, in_force.tensor_parallel) == (replicas, tensor_parallel)
        return Search(comparison, self._space, self._effort, report).find_best(
            replicas,
            tensor_parallel,
            start_rps or estimate_start_rps(self._problem, replicas, tensor_parallel),
            in_force if is_same else None,
        )

    def _explain_unmet(self, goal: Goal, found: CandidateSearchResult) -> str:
        """Say how far the objectives are from what requests need that hardly share an engine."""
        best, duration_s, slo = found.best.candidate, found.fidelity.duration_s, self._problem.slo
        prediction = predict(self._run_trials, best, _FEW_REQUESTS / duration_s, found.fidelity.seeds[:1], duration_s)
        needed = [pair for detail in prediction.details for pair in detail.latencies_s]
        medians = [f"{1e3 * statistics.median(values):.4g} ms" for values in zip(*needed, strict=True)]
        return (
            f"no plan within the bounds meets a TTFT of {1e3 * slo.ttft_s:.4g} ms "
            f"and a TPOT of {1e3 * slo.tpot_s:.4g} ms for {goal.target:.4g} of the requests at any rate; "
            f"at {prediction.rate_rps:.2g} requests/s the best attains {prediction.attainment.mean:.4g}, "
            f"with a median TTFT and TPOT of {' and '.join(medians) or 'nothing finished'}"
        )

    def _describe(
        self,
        comparison: GoodputComparison,
        goal: Goal,
        found: CandidateSearchResult,
        in_force: SliderCandidate | None,
    ) -> PlanResult:
        chosen = found.best
        seeds = [seed + _PREDICTION_SEED_OFFSET for seed in self._effort.seeds]
        is_met = goal.rate_rps is None or chosen.goodput_rps >= goal.rate_rps
        # Far above the goodput nothing is met, and a run takes for ever.
        rate_rps = goal.rate_rps if goal.rate_rps is not None and is_met else chosen.goodput_rps
        duration_s = found.fidelity.duration_s
        prediction = predict(self._run_trials, chosen.candidate, rate_rps, seeds, duration_s)
        bottleneck = find_bottleneck(
            self._run_trials,
            chosen.candidate,
            chosen.goodput_rps,
            goal.target,
            replace(found.fidelity, seeds=tuple(seeds[:2])),
        )
        if self._report is not None:
            self._report(1.0, "done")
        others = [ranked for ranked in found.ranking if ranked is not chosen]
        return PlanResult(
            chosen=chosen.candidate,
            goodput_rps=estimate_interval(chosen.goodputs_rps, 0.0),
            prediction=prediction,
            bottleneck=bottleneck,
            alternatives=tuple(_compare(ranked, chosen) for ranked in others),
            in_force=next((one for one in found.ranking if one.candidate == in_force), None),
            is_met=is_met,
            found=found,
            num_trials=comparison.num_trials,
            num_iterations=comparison.num_iterations,
        )


def estimate_start_rps(problem: PlanningProblem, replicas: int, tensor_parallel: int) -> float:
    """Guess a goodput: what engines could do if nobody waited, times a typical share."""
    profile = problem.engines[tensor_parallel].profile
    prompt = statistics.fmean(row.prompt_tokens for row in problem.rows)
    output = statistics.fmean(row.output_tokens for row in problem.rows)
    chunk_s = profile.estimate_iteration_s(_TYPICAL_CHUNK, 1, _TYPICAL_CHUNK, _TYPICAL_CHUNK * prompt / 2, 0, 0)
    context = int(_TYPICAL_DECODES * (prompt + output / 2))
    decode_s = profile.estimate_iteration_s(_TYPICAL_DECODES, 0, 0, 0.0, _TYPICAL_DECODES, context)
    request_s = prompt * chunk_s / _TYPICAL_CHUNK + output * decode_s / _TYPICAL_DECODES
    return _USED_SHARE * replicas / request_s


def estimate_response_s(problem: PlanningProblem) -> float:
    """Estimate how long an answer takes on an engine as full as it gets; no longer than its objective allows.

    So long a cluster takes to fill. With as many decodes as there are seats or KV blocks for, each iteration has the
    prompts that take the place of the answers that end in it.
    """
    return max(_estimate_engine_response_s(problem, engine) for engine in problem.engines.values())


def _estimate_engine_response_s(problem: PlanningProblem, engine: EngineSetup) -> float:
    prompt = statistics.fmean(row.prompt_tokens for row in problem.rows)
    output = statistics.fmean(row.output_tokens for row in problem.rows)
    context = prompt + output / 2
    num_decodes = max(1, min(engine.max_num_seqs, int(engine.kv_blocks_total * engine.block_size_tokens / context)))
    prefill_tokens = round(num_decodes * prompt / output)
    iteration_s = engine.profile.estimate_iteration_s(
        num_decodes + prefill_tokens,
        max(1, round(num_decodes / output)),
        prefill_tokens,
        prefill_tokens * prompt / 2,
        num_decodes,
        int(num_decodes * context),
    )
    return output * min(iteration_s, problem.slo.tpot_s)


def _has_goodput(found: CandidateSearchResult) -> bool:
    """Say whether anything meets the objectives; less than one request in a whole run counts as nothing."""
    return found.best.goodput_rps * found.fidelity.duration_s >= 1.0


def _compare(ranked: RankedCandidate, chosen: RankedCandidate) -> Alternative:
    ratios = [
        ours / theirs - 1.0 if theirs > 0 else 0.0
        for ours, theirs in zip(ranked.goodputs_rps, chosen.goodputs_rps, strict=True)
    ]
    return Alternative(ranked=ranked, difference=estimate_interval(ratios))
