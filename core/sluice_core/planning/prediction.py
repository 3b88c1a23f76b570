"""What to expect of a plan, on requests that did not choose it, and what holds it back.

A candidate that won on some seeds was lucky on them; predictions use others. What binds is found by trying: a little more of
each resource, on the same requests, and whose addition helps most.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice_core.planning.arena import RunTrials
from sluice_core.planning.candidates import Candidate
from sluice_core.planning.trials import Detail, Trial

# Quantiles of Student's t for two-sided 95 % intervals, by degrees of freedom; beyond, the normal one.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.96
_OVERLOAD = 1.08  # above the goodput, where what is short shows
_EXTRA_SHARE = 8  # one engine in so many more
_KV_SHARE = 0.5  # of the help of engines, from which on KV alone is what is short


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
    details: tuple[Detail, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What keeps goodput from being higher.

    Args:
        objective: ``ttft`` or ``tpot``: what most of the requests miss that miss one.
        resource: ``prefill``, ``decode`` or ``kv``: of what a little more helps most; ``none``: nothing does.
        rate_rps: Rate at which this was tried.
        missed: Share of requests that missed ``ttft``, ``tpot`` or ``both``.
        relief: Attainment gained by more of each resource.
    """

    objective: str
    resource: str
    rate_rps: float
    missed: dict[str, float]
    relief: dict[str, float]


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
    run_trials: RunTrials, candidate: Candidate, rate_rps: float, seeds: Sequence[int], duration_s: float
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
            Trial(candidate=candidate, seed=seed, rate_rps=rate_rps, duration_s=duration_s, is_detailed=True)
            for seed in seeds
        ]
    )
    return Prediction(
        rate_rps=rate_rps,
        attainment=estimate_interval([outcome.attainment for outcome in outcomes], 0.0, 1.0),
        details=tuple(outcome.detail for outcome in outcomes if outcome.detail is not None),
    )


def find_binding(
    run_trials: RunTrials, candidate: Candidate, goodput_rps: float, seeds: Sequence[int], duration_s: float
) -> Binding:
    """Find what binds a candidate just above its goodput.

    Args:
        run_trials: Makes runs.
        candidate: The sliders.
        goodput_rps: Its goodput.
        seeds: Of the runs.
        duration_s: Length of each run.
    """
    rate_rps = goodput_rps * _OVERLOAD
    extra = max(1, candidate.replicas // _EXTRA_SHARE)
    variants = [(candidate, 1.0), (candidate, 1.0 + extra / candidate.replicas)]
    variants.append((replace(candidate, num_prefill_heavy=candidate.num_prefill_heavy + extra), 1.0))
    if candidate.num_decode_heavy:
        variants.append((replace(candidate, num_decode_heavy=candidate.num_decode_heavy + extra), 1.0))
    trials = [
        Trial(
            candidate=variant,
            seed=seed,
            rate_rps=rate_rps,
            duration_s=duration_s,
            is_detailed=position == 0,
            kv_scale=scale,
        )
        for position, (variant, scale) in enumerate(variants)
        for seed in seeds
    ]
    outcomes = run_trials(trials)
    means = [
        statistics.fmean(outcome.attainment for outcome in outcomes[start : start + len(seeds)])
        for start in range(0, len(outcomes), len(seeds))
    ]
    missed = _sum_missed([outcome.detail for outcome in outcomes if outcome.detail is not None])
    objective = "ttft" if missed["ttft"] >= missed["tpot"] else "tpot"
    relief = {"kv": means[1] - means[0]}
    # Engines that are all alike do both; which they lack is what is missed.
    names = ["prefill", "decode"] if candidate.num_decode_heavy else ["prefill" if objective == "ttft" else "decode"]
    relief |= {name: mean - means[0] for name, mean in zip(names, means[2:], strict=True)}
    return Binding(
        objective=objective,
        resource=_choose_resource(relief),
        rate_rps=rate_rps,
        missed=missed,
        relief=relief,
    )


def _choose_resource(relief: dict[str, float]) -> str:
    """Choose what is short: KV where more of it alone does half of what engines do, which bring KV too."""
    best = max((name for name in relief if name != "kv"), key=relief.__getitem__)
    if relief["kv"] > 0 and relief["kv"] >= _KV_SHARE * relief[best]:
        return "kv"
    return best if relief[best] > 0 else "none"


def _sum_missed(details: Sequence[Detail]) -> dict[str, float]:
    total = sum(detail.summary.num_requests for detail in details)
    return {
        "ttft": sum(detail.num_missed_ttft for detail in details) / total,
        "tpot": sum(detail.num_missed_tpot for detail in details) / total,
        "both": sum(detail.num_missed_both for detail in details) / total,
    }
