"""Compares the goodputs of candidates on common random numbers: the same rates, the same requests.

``rank`` ranks many: candidates that pass at a rate go on to the next higher one, until none passes. So those that fall
behind cost one run each, which gives up early, and the goodput of those in front is known from both sides. Candidates
whose runs have ended at the very same moment so far, such as those whose chunk sizes no prompt fills, share the next
run. ``locate_goodput`` finds where to begin, ``measure_goodputs`` the goodput of a few, of each seed by itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sluice_core.planning.attainment_curve import AttainmentCurve
from sluice_core.planning.slider_candidates import SliderCandidate
from sluice_core.planning.trials import SearchTrial, TrialResult

_Key = tuple[SliderCandidate, int, float]  # with seed and length of the run
RunTrials = Callable[[Sequence[SearchTrial]], Sequence[TrialResult]]
COMPARISON_PRECISION = 0.04  # of a goodput: a straight line between rates so close is good to a percent
_LEAST_CONTENDERS = 4
_LEAST_RATE_RPS = 1e-4  # what misses the target even here misses it at any rate
_MOST_STEPS = 60
_MOST_OPTIMISM = 3.0  # of a goodput by shorter runs
# Runs give up once so many times the misses that the target allows are certain: soon where candidates are only ranked,
# later where a goodput is interpolated.
_RANKING_MISSES, _MEASURING_MISSES = 2.0, 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How much of a candidate is simulated.

    Args:
        seeds: One run for each.
        duration_s: Length of each.
    """

    seeds: tuple[int, ...]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCandidate:
    """A candidate and its goodput.

    Args:
        candidate: The sliders.
        goodputs_rps: Of each seed.
    """

    candidate: SliderCandidate
    goodputs_rps: tuple[float, ...]

    @property
    def goodput_rps(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.goodputs_rps)


class GoodputComparison:
    """Compares the goodputs of candidates; mutable: it keeps what it has learned.

    Args:
        run_trials: Makes runs, in any number of processes.
        target: Attainment of the goodput.
    """

    def __init__(self, run_trials: RunTrials, target: float) -> None:
        self.num_trials = 0
        self.num_iterations = 0
        self._run_trials = run_trials
        self._target = target
        self._curves: dict[_Key, AttainmentCurve] = {}
        self._ends_s: dict[_Key, dict[float, float]] = {}

    def rank(
        self, candidates: Sequence[SliderCandidate], fidelity: Fidelity, rate_rps: float, factor: float
    ) -> list[RankedCandidate]:
        """Compare candidates, the best first.

        Args:
            candidates: The candidates.
            fidelity: How much is simulated.
            rate_rps: Where to begin; best where some pass and most do not.
            factor: From a rate to the next.
        """
        least = self._compute_least_attainment(_RANKING_MISSES)
        passing = self._find_passing(candidates, fidelity, rate_rps, least)
        rate_down = rate_rps
        contenders = candidates
        while not passing:
            contenders = self._sort_by_goodput(contenders, fidelity)[: max(_LEAST_CONTENDERS, len(contenders) // 2)]
            rate_down /= factor
            if rate_down < _LEAST_RATE_RPS:
                break
            passing = self._find_passing(contenders, fidelity, rate_down, least)
        if rate_down == rate_rps:
            while passing:
                rate_rps *= factor
                passing = self._find_passing(passing, fidelity, rate_rps, least)
        return [self._describe(candidate, fidelity) for candidate in self._sort_by_goodput(candidates, fidelity)]

    def measure_goodputs(
        self, candidates: Sequence[SliderCandidate], fidelity: Fidelity, starts_rps: Mapping[SliderCandidate, float]
    ) -> list[RankedCandidate]:
        """Find the goodput of each candidate and seed to ``COMPARISON_PRECISION``, the best candidate first.

        Seeds are harder or easier for all candidates alike, and shorter runs have flattered them alike, so the first
        candidate's goodputs say where to begin with the others'.

        Args:
            candidates: The candidates, one of the best first.
            fidelity: How much is simulated.
            starts_rps: Where to begin, by candidate.
        """
        leader, first = candidates[0], fidelity.seeds[0]
        self._measure_goodputs({(leader, seed): starts_rps[leader] for seed in fidelity.seeds}, fidelity)
        # A leader that whole runs refute says nothing about the others.
        optimism = starts_rps[leader] / (self._estimate(leader, first, fidelity) or 1.0)
        share = 1.0 / optimism if 0.0 < optimism < _MOST_OPTIMISM else 1.0
        self._measure_goodputs(
            {(candidate, first): starts_rps[candidate] * share for candidate in candidates[1:]}, fidelity
        )

        def expect(candidate: SliderCandidate, seed: int) -> float:
            share = self._estimate(leader, seed, fidelity) / (self._estimate(leader, first, fidelity) or 1.0)
            return self._estimate(candidate, first, fidelity) * share or starts_rps[candidate]

        behind = [(candidate, seed) for candidate in candidates[1:] for seed in fidelity.seeds[1:]]
        self._measure_goodputs({pair: expect(*pair) for pair in behind}, fidelity)
        return [self._describe(candidate, fidelity) for candidate in self._sort_by_goodput(candidates, fidelity)]

    def locate_goodput(self, candidate: SliderCandidate, fidelity: Fidelity, start_rps: float) -> float:
        """Find about where a candidate begins to fail, by itself: to get there with all is what costs most.

        Args:
            candidate: The candidate.
            fidelity: How much is simulated; of the seeds the first.
            start_rps: Where to begin; as shorter runs have it, which flatter.

        Returns:
            The highest rate that it is known to pass; ``start_rps`` if that is far below, so that others may pass
            there.
        """
        self._measure_goodputs({(candidate, fidelity.seeds[0]): start_rps}, fidelity, _RANKING_MISSES)
        rate_rps = self.find_passing_rate(candidate, fidelity) or 0.0
        return rate_rps if rate_rps * _MOST_OPTIMISM > start_rps else start_rps

    def run(self, trials: Sequence[SearchTrial]) -> Sequence[TrialResult]:
        """Make runs, and learn from them."""
        outcomes = self._run_trials(trials)
        for outcome in outcomes:
            self._record_result(outcome)
            self.num_trials += 1
            self.num_iterations += outcome.num_iterations
        return outcomes

    def behave_alike(self, one: SliderCandidate, other: SliderCandidate, fidelity: Fidelity) -> bool:
        """Say whether two candidates did the same wherever both ran, as with chunk sizes that prompts never fill."""
        keys = [((one, seed, fidelity.duration_s), (other, seed, fidelity.duration_s)) for seed in fidelity.seeds]
        return all(self._behaved_alike(*pair) for pair in keys)

    def find_passing_rate(self, candidate: SliderCandidate, fidelity: Fidelity) -> float | None:
        """Find the highest rate at which a candidate is known to reach the target; None: none is."""
        passing = [rate for rate, attainment in self.list_points(candidate, fidelity) if attainment >= self._target]
        return max(passing, default=None)

    def list_points(self, candidate: SliderCandidate, fidelity: Fidelity) -> list[tuple[float, float]]:
        """List what is known of a candidate's attainment by rate, means over the seeds that ran at it."""
        by_rate: dict[float, list[float]] = {}
        for seed in fidelity.seeds:
            for rate, attainment in self._curve(candidate, seed, fidelity).points.items():
                by_rate.setdefault(rate, []).append(attainment)
        return [(rate, statistics.fmean(attainments)) for rate, attainments in sorted(by_rate.items())]

    def _curve(self, candidate: SliderCandidate, seed: int, fidelity: Fidelity) -> AttainmentCurve:
        return self._curves.setdefault((candidate, seed, fidelity.duration_s), AttainmentCurve())

    def _behaved_alike(self, one: _Key, other: _Key) -> bool:
        ours, theirs = self._ends_s.get(one, {}), self._ends_s.get(other, {})
        shared = ours.keys() & theirs.keys()
        return bool(shared) and all(ours[rate] == theirs[rate] for rate in shared)

    def _record_result(self, outcome: TrialResult) -> None:
        key, rate_rps = _make_key(outcome.trial), outcome.trial.rate_rps
        self._curves.setdefault(key, AttainmentCurve()).points[rate_rps] = outcome.attainment
        self._ends_s.setdefault(key, {})[rate_rps] = outcome.end_s

    def _run_ranking_trials(self, trials: Sequence[SearchTrial]) -> None:
        """Make runs that rank, one for all candidates that have done the same so far."""
        followers: dict[SearchTrial, list[SearchTrial]] = {}
        for trial in trials:
            key = _make_key(trial)
            leader = next(
                (one for one in followers if one.seed == trial.seed and self._behaved_alike(key, _make_key(one))),
                None,
            )
            if leader is None:
                followers[trial] = []
            else:
                followers[leader].append(trial)
        for outcome in self.run(list(followers)):
            for trial in followers[outcome.trial]:
                self._record_result(replace(outcome, trial=trial))

    def _find_passing(
        self, candidates: Sequence[SliderCandidate], fidelity: Fidelity, rate_rps: float, least: float
    ) -> list[SliderCandidate]:
        trials = [
            SearchTrial(
                candidate=candidate,
                seed=seed,
                rate_rps=rate_rps,
                duration_s=fidelity.duration_s,
                least_attainment=least,
            )
            for candidate in candidates
            for seed in fidelity.seeds
            if rate_rps not in self._curve(candidate, seed, fidelity).points
        ]
        if trials:
            self._run_ranking_trials(trials)
        return [
            candidate
            for candidate in candidates
            if statistics.fmean(self._curve(candidate, seed, fidelity).points[rate_rps] for seed in fidelity.seeds)
            >= self._target
        ]

    def _measure_goodputs(
        self,
        starts_rps: Mapping[tuple[SliderCandidate, int], float],
        fidelity: Fidelity,
        misses: float = _MEASURING_MISSES,
    ) -> None:
        """Find the goodput of pairs of candidate and seed; runs give up after ``misses`` times the allowed misses."""
        open_ = list(starts_rps)
        for _ in range(_MOST_STEPS):
            trials = [
                SearchTrial(
                    candidate=candidate,
                    seed=seed,
                    rate_rps=rate,
                    duration_s=fidelity.duration_s,
                    least_attainment=self._compute_least_attainment(misses),
                )
                for candidate, seed in open_
                if (rate := self._choose_rate(self._curve(candidate, seed, fidelity), starts_rps[candidate, seed]))
                is not None
                and rate >= _LEAST_RATE_RPS
            ]
            if not trials:
                break
            self.run(trials)
            open_ = [(trial.candidate, trial.seed) for trial in trials]

    def _choose_rate(self, curve: AttainmentCurve, start_rps: float) -> float | None:
        """Choose the next rate for a goodput between two close rates; None: it is.

        Steps grow: a start is good as a rule, and where it is not, two or three steps get there.
        """
        low, high = curve.find_bracket(self._target)
        estimate = curve.estimate_goodput_rps(self._target)
        step = 1.0 + COMPARISON_PRECISION * 2.0 ** len(curve.points)
        if low is None and high is None:
            return start_rps
        if high is None:
            assert low is not None
            is_far = curve.points[low] >= self._target + 0.5 * (1.0 - self._target)
            return max(
                low * (step if is_far else 1.0 + COMPARISON_PRECISION), estimate * (1.0 + COMPARISON_PRECISION / 2)
            )
        if low is None:
            is_far = curve.points[high] <= self._target - (1.0 - self._target)
            return min(
                high / (step if is_far else 1.0 + COMPARISON_PRECISION), estimate / (1.0 + COMPARISON_PRECISION / 2)
            )
        if high / low <= 1.0 + COMPARISON_PRECISION * 1.5:
            return None
        assert low is not None
        if high / low > 1.0 + 3.0 * COMPARISON_PRECISION and curve.points[low] >= self._target + 0.5 * (
            1.0 - self._target
        ):
            # Far below the goodput attainment is level, so a straight line crosses the target too soon.
            estimate = max(estimate, math.sqrt(low * high))
        return min(max(estimate, low * (1.0 + COMPARISON_PRECISION / 2)), high / (1.0 + COMPARISON_PRECISION / 2))

    def _sort_by_goodput(self, candidates: Iterable[SliderCandidate], fidelity: Fidelity) -> list[SliderCandidate]:
        return sorted(candidates, key=lambda candidate: -self._describe(candidate, fidelity).goodput_rps)

    def _describe(self, candidate: SliderCandidate, fidelity: Fidelity) -> RankedCandidate:
        return RankedCandidate(
            candidate=candidate,
            goodputs_rps=tuple(self._estimate(candidate, seed, fidelity) for seed in fidelity.seeds),
        )

    def _compute_least_attainment(self, misses: float) -> float:
        return max(0.0, 1.0 - misses * (1.0 - self._target))

    def _estimate(self, candidate: SliderCandidate, seed: int, fidelity: Fidelity) -> float:
        return self._curve(candidate, seed, fidelity).estimate_goodput_rps(self._target)


def _make_key(trial: SearchTrial) -> _Key:
    return trial.candidate, trial.seed, trial.duration_s
