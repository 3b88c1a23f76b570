"""What to expect of a plan, on requests that did not choose it.

A candidate that won on some seeds was lucky on them; predictions use others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sluice_core.planning.goodput_comparison import RunTrials
from sluice_core.planning.slider_candidates import SliderCandidate
from sluice_core.planning.trials import SearchTrial, TrialDetails

# Quantiles of Student's t for two-sided 95 % intervals, by degrees of freedom; beyond, the normal one.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What to expect at a rate.

    Args:
        rate_rps: The rate.
        attainment: Share of requests that meet every objective.
        details: Of the runs.
    """

    rate_rps: float
    attainment: Interval
    details: tuple[TrialDetails, ...]


def estimate_interval(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> Interval:
    """Estimate the mean of a few independent values and its 95 % interval, by Student's t.

    Args:
        values: At least one; of a single one the interval says nothing.
        low: Least possible value.
        high: Most possible value.
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean=mean, low=low, high=high)
    freedom = len(values) - 1
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean=mean, low=max(low, mean - half), high=min(high, mean + half))


def predict(
    run_trials: RunTrials, candidate: SliderCandidate, rate_rps: float, seeds: Sequence[int], duration_s: float
) -> Prediction:
    """Predict a candidate at a rate.

    Args:
        run_trials: Makes runs.
        candidate: The sliders.
        rate_rps: The rate.
        seeds: Others than those that chose the candidate.
        duration_s: Length of each run.
    """
    outcomes = run_trials(
        [
            SearchTrial(candidate=candidate, seed=seed, rate_rps=rate_rps, duration_s=duration_s, is_detailed=True)
            for seed in seeds
        ]
    )
    return Prediction(
        rate_rps=rate_rps,
        attainment=estimate_interval([outcome.attainment for outcome in outcomes], 0.0, 1.0),
        details=tuple(outcome.detail for outcome in outcomes if outcome.detail is not None),
    )


def measure_curves(
    run_trials: RunTrials,
    candidates: Sequence[SliderCandidate],
    rates_rps: Sequence[float],
    seeds: Sequence[int],
    duration_s: float,
) -> dict[SliderCandidate, tuple[tuple[float, float], ...]]:
    """Measure attainment by rate, on the same requests for all candidates.

    Args:
        run_trials: Makes runs.
        candidates: The candidates.
        rates_rps: Rates.
        seeds: Of the runs.
        duration_s: Length of each run.

    Returns:
        Of each candidate, rates with the mean attainment over the seeds.
    """
    trials = [
        SearchTrial(candidate=candidate, seed=seed, rate_rps=rate_rps, duration_s=duration_s)
        for candidate in candidates
        for rate_rps in rates_rps
        for seed in seeds
    ]
    by_point: dict[tuple[SliderCandidate, float], list[float]] = {}
    for outcome in run_trials(trials):
        by_point.setdefault((outcome.trial.candidate, outcome.trial.rate_rps), []).append(outcome.attainment)
    return {
        candidate: tuple([(rate_rps, statistics.fmean(by_point[candidate, rate_rps])) for rate_rps in rates_rps])
        for candidate in candidates
    }
