"""Problems and spaces of a search, for the tests of planning."""

from __future__ import annotations

import math
import random

from sluice_core.latency import IterationProfile
from sluice_core.planning.slider_candidates import (
    SearchSpace,
    SliderCandidate,
)
from sluice_core.planning.slider_search import SearchEffort
from sluice_core.planning.trials import PlanningProblem, SearchTrial, TrialResult
from sluice_core.records import EngineId, Role, Slo
from sluice_core.sim.sim_setup import EngineSetup
from sluice_core.sim.traces import TraceRow
from sluice_core.strategies import STRATEGIES

# An engine whose iterations take 10 ms and 0.1 ms per token beyond 64.
PROFILE = IterationProfile(
    linear_s=(0.0, *(0.01 + 1e-4 * max(0, 8 * row - 64) for row in range(1, 257))),
    slope_s=1e-4,
    prefill_work_s=2e-9,
    decode_base_s=1e-3,
    decode_context_s=1e-7,
)


SLO = Slo(ttft_s=1.0, tpot_s=0.04)


REPORTS = ((200, 2000), (10, 60))


def make_problem(kv_blocks: int = 4000, lengths=REPORTS, max_num_seqs: int = 256) -> PlanningProblem:
    rng = random.Random(5)
    prompt, output = lengths
    engine = EngineSetup(
        engine_id=EngineId("any"),
        profile=PROFILE,
        role=Role.PREFILL_HEAVY,
        chunk_size_tokens=256,
        kv_blocks_total=kv_blocks,
        kv_bytes_per_token=100_000,
        max_batch_tokens=2048,
        max_num_seqs=max_num_seqs,
    )
    rows = [TraceRow(prompt_tokens=rng.randint(*prompt), output_tokens=rng.randint(*output)) for _ in range(400)]
    return PlanningProblem(rows=rows, slo=SLO, engines={1: engine, 2: engine}, strategies=STRATEGIES)


def make_space(**changes) -> SearchSpace:
    values = {
        "strategies": tuple(STRATEGIES),
        "prefill_heavy_tokens": (256, 512, 1024),
        "decode_heavy_tokens": (0, 128),
        "max_batch_tokens": 2048,
        "watermarks": (0.95,),
        "approaching_factors": (0.96,),
    }
    return SearchSpace(**(values | changes))


def make_taichi(**changes) -> SliderCandidate:
    values = {
        "strategy": "taichi",
        "num_prefill_heavy": 2,
        "num_decode_heavy": 2,
        "prefill_heavy_tokens": 512,
        "decode_heavy_tokens": 128,
    }
    return SliderCandidate(**(values | changes))


# --- the comparison
# -----------------------------------------------------------------------------------------------------


class Formula:
    """Stands in for runs: attainment is 1 up to a candidate's own rate and falls by half in a tenth above it."""

    def __init__(self, goodputs: dict[int, float]) -> None:
        self.goodputs = goodputs
        self.trials: list[SearchTrial] = []

    def run(self, trials):
        self.trials += trials
        return [
            TrialResult(
                trial=trial,
                attainment=min(1.0, max(0.0, 0.9 - 5.0 * math.log(trial.rate_rps / self._goodput(trial)))),
                num_iterations=1,
            )
            for trial in trials
        ]

    def _goodput(self, trial: SearchTrial) -> float:
        return self.goodputs[trial.candidate.prefill_heavy_tokens] * (1.0 + 0.01 * trial.seed)


EFFORT = SearchEffort(seeds=(1,), duration_s=20.0)


class Shares(Formula):
    """Stands in for runs: the goodput per engine falls with the distance from the best share of P-heavy engines."""

    def __init__(self, best_share: float) -> None:
        super().__init__({})
        self.best_share = best_share

    def _goodput(self, trial: SearchTrial) -> float:
        candidate = trial.candidate
        share = candidate.num_prefill_heavy / candidate.replicas
        return (
            candidate.replicas
            * (1.0 - abs(share - self.best_share))
            * (0.8 if candidate.strategy == "aggregated" else 1)
        )
