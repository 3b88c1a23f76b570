"""Whole plans over drawn landscapes of goodput, against what they came to when they were recorded.

Runs are stood in for by a formula, so that a plan takes milliseconds: what is recorded is which runs the search makes,
at which rates, and what it concludes. Whoever means to change the search records it anew, and reviews the table:

    .venv/bin/python core/tests/test_planned_searches.py
"""

import csv
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planning_harness import SLO, make_problem
from test_drawn_runs import add_up

from sluice_core.planning.planner import Goal, Planner
from sluice_core.planning.prediction import measure_curves
from sluice_core.planning.slider_candidates import PrefillHeavyBounds, SearchSpace, SliderCandidate, list_chunk_sizes
from sluice_core.planning.slider_search import SearchEffort
from sluice_core.planning.trials import TrialDetails, TrialResult
from sluice_core.sim.run_summary import RunSummary
from sluice_core.strategies import STRATEGIES

RECORDED = Path(__file__).with_name("planned_searches.csv")
NUMBERS = range(48)


def make_details(trial, attainment, lean):
    """What a run of 100 requests missed: of what it missed, the share ``lean`` is TTFT, a tenth both."""
    missed = round(100 * (1.0 - attainment))
    both = missed // 10
    late = round(lean * (missed - both))
    summary = RunSummary(
        num_requests=100,
        duration_s=trial.duration_s,
        num_met=100 - missed,
        num_met_ttft=100 - late - both,
        num_met_tpot=100 - missed + late,
        num_rejected=0,
        num_longest=10,
        num_met_longest=5,
        ttfts_s=(0.5,),
        tpots_s=(0.05,),
        itl_s={},
        moves={},
        num_blocked_moves=0,
        num_preemptions=0,
        transfer_share=0.0,
        engines=(),
    )
    return TrialDetails(
        summary=summary,
        latencies_s=((0.5 + trial.rate_rps / 100, 0.05),),
        num_missed_ttft=late,
        num_missed_tpot=missed - late - both,
        num_missed_both=both,
    )


class DrawnLandscape:
    """Goodput falls with the distance from a drawn best of each slider; seeds and lengths of runs shift it a little."""

    def __init__(self, rng):
        self.best = {
            "share": rng.uniform(0.1, 0.9),
            "prefill": rng.uniform(6.0, 12.0),
            "decode": rng.uniform(0.0, 9.0),
            "watermark": rng.choice((0.85, 0.95)),
            "alpha": rng.choice((0.9, 0.96)),
        }
        self.per_gpu_rps = rng.choice((0.002, 0.3, 5.0))
        self.strategies = {name: rng.uniform(0.6, 1.0) for name in STRATEGIES}
        self.parallels = {1: 1.0, 2: rng.uniform(0.8, 1.2)}
        self.weight = rng.choice((0.02, 0.1))
        self.steepness = rng.choice((2.0, 8.0))
        self.most = rng.choice((1.0, 1.0, 1.0, 0.93))
        self.plateau = rng.choice((0, 700, 2000))
        self.lean = rng.random()
        self.kv_gain = rng.choice((0.0, 0.05, 0.2))
        self.trials = []

    def compute_goodput_rps(self, trial):
        one = trial.candidate
        parts = [self.best["share"] - one.num_prefill_heavy / one.replicas if one.num_decode_heavy else 0.3]
        parts.append((self.best["prefill"] - math.log2(max(one.prefill_heavy_tokens, self.plateau))) / 4)
        parts.append((self.best["decode"] - math.log2(one.decode_heavy_tokens + 1)) / 6)
        parts += [one.watermark - self.best["watermark"], one.approaching_factor - self.best["alpha"]]
        distance = sum(part * part for part in parts)
        noise = 1.0 + 0.01 * math.sin(12.9 * trial.seed + one.prefill_heavy_tokens)
        flatters = 1.0 + 0.5 / (1.0 + trial.duration_s / 20.0)
        kv = 1.0 + self.kv_gain * (trial.kv_scale - 1.0)
        scale = one.num_gpus * self.parallels[one.tensor_parallel] * self.strategies[one.strategy]
        return self.per_gpu_rps * scale * (1.0 - self.weight * distance) * noise * flatters * kv

    def run(self, trials):
        self.trials += trials
        return [self._run_one(trial) for trial in trials]

    def _run_one(self, trial):
        goodput_rps = self.compute_goodput_rps(trial)
        over = math.log(trial.rate_rps / goodput_rps)
        attainment = min(self.most, max(0.0, 0.9 - self.steepness * over))
        # Runs whose chunks no prompt fills do the same, to the moment.
        end_s = trial.duration_s + goodput_rps if self.plateau else math.nan
        detail = make_details(trial, attainment, self.lean) if trial.is_detailed else None
        return TrialResult(trial=trial, attainment=attainment, num_iterations=7, end_s=end_s, detail=detail)


def draw(number):
    rng = random.Random(f"planned {number}")
    landscape = DrawnLandscape(rng)
    strategies = rng.choice((tuple(STRATEGIES), ("taichi",), ("taichi", "aggregated", "disaggregated"), ("sluice",)))
    low, high = sorted(rng.sample(range(101), 2))
    bounds = rng.choice((PrefillHeavyBounds(), PrefillHeavyBounds(low=low // 2, high=50 + high // 2)))
    space = SearchSpace(
        strategies=strategies,
        prefill_heavy_tokens=list_chunk_sizes(rng.choice((64, 256)), rng.choice((1024, 8192))),
        decode_heavy_tokens=list_chunk_sizes(0, rng.choice((128, 512))),
        max_batch_tokens=8192,
        prefill_heavy=bounds,
        watermarks=rng.choice(((0.95,), (0.85, 0.95))),
        approaching_factors=rng.choice(((0.96,), (0.9, 0.96, 1.0))),
    )
    most = rng.choice((2, 4, 8, 24, 40))
    goal = Goal(
        target=rng.choice((0.9, 0.95)),
        most_replicas=most,
        least_replicas=rng.choice((1, 2)),
        rate_rps=rng.choice((None, None, landscape.per_gpu_rps * most * rng.choice((0.3, 0.7, 2.0)))),
        tensor_parallels=rng.choice(((1,), (1, 2), (2, 1))),
    )
    effort = SearchEffort(
        seeds=rng.choice(((1,), (1, 2, 3))),
        duration_s=rng.choice((None, None, 20.0)),
        num_requests=rng.choice((300, 2400)),
        num_compared=rng.choice((2, 4)),
    )
    in_force = None
    if rng.random() < 0.5:
        in_force = space.make_candidate(
            strategies[0], most, 1, num_prefill_heavy=1, prefill_heavy_tokens=512, decode_heavy_tokens=64
        )
    return landscape, space, effort, goal, in_force


def name_of(candidate: SliderCandidate | None) -> str:
    if candidate is None:
        return ""
    sliders = f"{candidate.num_prefill_heavy}+{candidate.num_decode_heavy}x{candidate.tensor_parallel}"
    chunks = f"{candidate.prefill_heavy_tokens}/{candidate.decode_heavy_tokens}"
    return f"{candidate.strategy} {sliders} {chunks} {candidate.watermark} {candidate.approaching_factor}"


def plan(number):
    """Plans, and describes what came of it: words, and numbers."""
    landscape, space, effort, goal, in_force = draw(number)
    stages = []
    planner = Planner(make_problem(), space, effort, landscape.run, lambda share, stage: stages.append((share, stage)))
    words, numbers = {}, {}
    try:
        result = planner.plan(goal, in_force)
    except ValueError as error:
        words["refused"] = str(error)
    else:
        ranking, explored = result.found.ranking, result.found.explored
        words = {
            "refused": "",
            "chosen": name_of(result.chosen),
            "alternatives": "; ".join(name_of(each.ranked.candidate) for each in result.alternatives),
            "in force": name_of(result.in_force and result.in_force.candidate),
            "met": str(result.is_met),
            "binds": f"{result.bottleneck.objective} {result.bottleneck.resource}",
        }
        numbers = {
            "goodput": result.goodput_rps.mean,
            "least": result.goodput_rps.low,
            "most": result.goodput_rps.high,
            "predicted at": result.prediction.rate_rps,
            "attainment": result.prediction.attainment.mean,
            "details": len(result.prediction.details),
            "behind": add_up(each.difference.mean for each in result.alternatives),
            "behind by at most": add_up(max(each.difference.low, -9.0) for each in result.alternatives),
            "binds at": result.bottleneck.rate_rps,
            "missed": add_up(value for _, value in sorted(result.bottleneck.missed.items())),
            "gains": add_up(value for _, value in sorted(result.bottleneck.attainment_gains.items())),
            "ranking": add_up(each.goodput_rps for each in ranking),
            "whole runs": result.found.fidelity.duration_s,
            "explored": add_up(each.goodput_rps for each in explored),
            "explored engines": add_up(each.candidate.num_prefill_heavy for each in explored),
            "runs": result.num_trials,
            "iterations": result.num_iterations,
        }
    trials = landscape.trials
    numbers |= {
        "trials": len(trials),
        "rates": add_up(trial.rate_rps for trial in trials),
        "lengths": add_up(trial.duration_s for trial in trials),
        "seeds": add_up(trial.seed for trial in trials),
        "engines": add_up(trial.candidate.replicas + 0.1 * trial.candidate.num_prefill_heavy for trial in trials),
        "chunks": add_up(
            trial.candidate.prefill_heavy_tokens + 0.1 * trial.candidate.decode_heavy_tokens for trial in trials
        ),
        "parameters": add_up(trial.candidate.watermark + 10 * trial.candidate.approaching_factor for trial in trials),
        "least attainments": add_up(trial.least_attainment for trial in trials),
        "KV scales": add_up(trial.kv_scale for trial in trials),
        "detailed": sum(trial.is_detailed for trial in trials),
        "progress": add_up(share for share, _ in stages),
    }
    words["stages"] = "; ".join(dict.fromkeys(stage for _, stage in stages))
    return words, {key: 0.0 if math.isinf(value) else float(value) for key, value in numbers.items()}


def read_recorded():
    with RECORDED.open(newline="") as file:
        return {int(row.pop("plan")): row for row in csv.DictReader(file)}


RECORDS = read_recorded() if RECORDED.exists() else {}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_drawn_plan_is_as_it_was_recorded(number):
    words, numbers = plan(number)
    recorded = RECORDS[number]
    assert words == {key: recorded[key] for key in words}
    expected = {key: float(recorded[key]) for key in numbers}
    assert {key: value for key, value in numbers.items() if value != pytest.approx(expected[key], rel=1e-8)} == {}


def test_the_drawn_plans_have_seen_everything():
    rows = list(RECORDS.values())
    assert {row["chosen"].partition(" ")[0] for row in rows} >= {"taichi", "aggregated", "sluice", "disaggregated"}
    assert {row["met"] for row in rows} >= {"True", "False"}
    assert {part for row in rows for part in row["binds"].split()} >= {"ttft", "tpot", "kv", "prefill", "decode"}
    assert any(row["in force"] for row in rows)
    assert 0 < sum(bool(row["refused"]) for row in rows) < 12


def test_curves_are_means_over_seeds_by_candidate_and_rate():
    landscape, space, *_ = draw(0)
    candidates = [space.make_candidate(space.strategies[0], 4, 1, num_prefill_heavy=count) for count in (1, 2)]
    rates = (0.5, 1.0, 9.0)
    curves = measure_curves(landscape.run, candidates, rates, (3, 4), 50.0)
    assert list(curves) == candidates
    assert {(trial.seed, trial.duration_s, trial.is_detailed) for trial in landscape.trials} == {
        (3, 50.0, False),
        (4, 50.0, False),
    }
    for candidate, points in curves.items():
        assert [rate for rate, _ in points] == list(rates)
        for rate, attainment in points:
            each = [
                one.attainment
                for one in landscape.run(
                    [t for t in landscape.trials if (t.candidate, t.rate_rps) == (candidate, rate)][:2]
                )
            ]
            assert attainment == pytest.approx(sum(each) / 2)


def test_objectives_are_of_the_problem():
    """What a refusal says of the objectives is what was asked for."""
    landscape, space, effort, _, _ = draw(1)
    landscape.most = 0.5
    planner = Planner(replace(make_problem(), slo=SLO), space, effort, landscape.run)
    with pytest.raises(ValueError, match=r"TTFT of 1000 ms and a TPOT of 40 ms for 0\.9 of the requests"):
        planner.plan(Goal(target=0.9, most_replicas=4))


def write():
    """Records all plans."""
    rows = [plan(number) for number in NUMBERS]
    names = dict.fromkeys(key for words, numbers in rows for key in (*words, *numbers))
    with RECORDED.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["plan", *names], lineterminator="\n")
        writer.writeheader()
        for number, (words, numbers) in zip(NUMBERS, rows, strict=True):
            writer.writerow({"plan": number, **words, **{key: f"{value:.10g}" for key, value in numbers.items()}})


if __name__ == "__main__":
    write()
    sys.stdout.write(f"{len(NUMBERS)} plans are in {RECORDED}\n")
