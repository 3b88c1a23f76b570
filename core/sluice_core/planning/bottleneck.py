"""What keeps a plan's goodput from being higher.

It is found by trying: a little more of each resource, on the same requests, and whose addition helps most.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice_core.planning.goodput_comparison import Fidelity, RunTrials
from sluice_core.planning.slider_candidates import SliderCandidate
from sluice_core.planning.trials import SearchTrial, TrialDetails

_OVERLOAD = 1.08  # above the goodput, where what is short shows
_MOST_OVERLOADS = 6
_EXTRA_SHARE = 8  # one engine in so many more
_KV_SHARE = 0.5  # of the help of engines, from which on KV alone is what is short


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What keeps goodput from being higher.

    Args:
        objective: ``ttft`` or ``tpot``: what most of the requests miss that miss one.
        resource: ``prefill``, ``decode`` or ``kv``: of what a little more helps most; ``none``: nothing does.
        rate_rps: Rate at which this was tried.
        missed: Share of requests that missed ``ttft``, ``tpot`` or ``both``.
        attainment_gains: Attainment gained by more of each resource.
    """

    objective: str
    resource: str
    rate_rps: float
    missed: dict[str, float]
    attainment_gains: dict[str, float]


def find_bottleneck(
    run_trials: RunTrials,
    candidate: SliderCandidate,
    start_rps: float,
    target: float,
    fidelity: Fidelity,
) -> Bottleneck:
    """Find what binds a candidate just above its goodput.

    Args:
        run_trials: Makes runs.
        candidate: The sliders.
        start_rps: Its goodput, as other seeds see it.
        target: Attainment of the goodput.
        fidelity: Of the runs.
    """
    rate_rps, attainment, details = _overload(run_trials, candidate, start_rps, target, fidelity)
    missed = _sum_missed(details)
    objective = "ttft" if missed["ttft"] >= missed["tpot"] else "tpot"
    attainment_gains = {
        resource: _run_variant(run_trials, variant, rate_rps, fidelity, kv_scale)[0] - attainment
        for resource, variant, kv_scale in _list_relaxations(candidate, objective)
    }
    return Bottleneck(
        objective=objective,
        resource=_choose_resource(attainment_gains),
        rate_rps=rate_rps,
        missed=missed,
        attainment_gains=attainment_gains,
    )


def _overload(
    run_trials: RunTrials, candidate: SliderCandidate, start_rps: float, target: float, fidelity: Fidelity
) -> tuple[float, float, list[TrialDetails]]:
    """Raise the rate until the target is missed; returns that rate, its attainment and the details of its runs."""
    rate_rps = start_rps
    attainment = 1.0
    details: list[TrialDetails] = []
    for _ in range(_MOST_OVERLOADS):
        rate_rps *= _OVERLOAD
        attainment, details = _run_variant(run_trials, candidate, rate_rps, fidelity)
        if attainment < target:
            break
    return rate_rps, attainment, details


def _run_variant(
    run_trials: RunTrials, variant: SliderCandidate, rate_rps: float, fidelity: Fidelity, kv_scale: float = 1.0
) -> tuple[float, list[TrialDetails]]:
    """Run a candidate at a rate; returns its mean attainment and the details of its runs."""
    trials = [
        SearchTrial(
            candidate=variant,
            seed=seed,
            rate_rps=rate_rps,
            duration_s=fidelity.duration_s,
            kv_scale=kv_scale,
            is_detailed=True,
        )
        for seed in fidelity.seeds
    ]
    outcomes = run_trials(trials)
    details = [outcome.detail for outcome in outcomes if outcome.detail is not None]
    return statistics.fmean([outcome.attainment for outcome in outcomes]), details


def _list_relaxations(candidate: SliderCandidate, objective: str) -> list[tuple[str, SliderCandidate, float]]:
    """List a little more of each resource: its name, the candidate with more engines, the scale of KV capacity."""
    extra = max(1, candidate.replicas // _EXTRA_SHARE)
    more_prefill = replace(candidate, num_prefill_heavy=candidate.num_prefill_heavy + extra)
    more_decode = replace(candidate, num_decode_heavy=candidate.num_decode_heavy + extra)
    more_kv = ("kv", candidate, 1.0 + extra / candidate.replicas)
    if candidate.num_decode_heavy:
        return [more_kv, ("prefill", more_prefill, 1.0), ("decode", more_decode, 1.0)]
    # Engines that are all alike do both; which they lack is what is missed.
    return [more_kv, ("prefill" if objective == "ttft" else "decode", more_prefill, 1.0)]


def _choose_resource(attainment_gains: dict[str, float]) -> str:
    """Choose what is short: KV where more of it alone does half of what engines do, which bring KV too."""
    best = max((name for name in attainment_gains if name != "kv"), key=attainment_gains.__getitem__)
    if attainment_gains["kv"] > 0 and attainment_gains["kv"] >= _KV_SHARE * attainment_gains[best]:
        return "kv"
    return best if attainment_gains[best] > 0 else "none"


def _sum_missed(details: Sequence[TrialDetails]) -> dict[str, float]:
    total = sum(detail.summary.num_requests for detail in details)
    return {
        "ttft": sum(detail.num_missed_ttft for detail in details) / total,
        "tpot": sum(detail.num_missed_tpot for detail in details) / total,
        "both": sum(detail.num_missed_both for detail in details) / total,
    }
