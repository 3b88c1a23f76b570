"""Searches for the sliders with the most goodput: a request as JSON on standard input, the result on standard output.

It runs in a process of its own (``search_process``): it computes for seconds, and a process can be killed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sluice_core.latency.known_gpus import parse_gpus
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.latency.transfer import find_link
from sluice_core.planning.goodput_comparison import GoodputComparison, RankedCandidate
from sluice_core.planning.planner import estimate_response_s, estimate_start_rps
from sluice_core.planning.slider_candidates import PrefillHeavyBounds, SearchSpace, SliderCandidate, list_chunk_sizes
from sluice_core.planning.slider_search import Search, SearchEffort
from sluice_core.planning.trials import PlanningProblem, SearchTrial, TrialEvaluator, TrialResult
from sluice_core.records import EngineId, Role, Slo, SloClass
from sluice_core.scheduling.router_wait_limit import ROUTER_WAIT_LIMIT_S
from sluice_core.sim.sim_setup import BLOCK_SIZE_TOKENS, MAX_NUM_SEQS, EngineSetup, SimOptions, TransferLink
from sluice_core.sim.traces import TraceRow
from sluice_core.strategies import STRATEGIES, get_strategy
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
from sluice_operator.autotune.search_process import serve_request

if TYPE_CHECKING:
    from collections.abc import Sequence

# Less than `sluice plan` does, so that a search takes seconds: the sliders are measured afterwards anyway.
# Where prompts are so long that few come in a minute, runs last longer. Of a few dozen requests, those that no sliders
# serve in time would hide what the sliders do for the others.
EFFORT = SearchEffort(seeds=(1, 2), num_requests=700, most_duration_s=1200.0, most_requests=3000, num_compared=2)
# Whole runs last so many times the TTFT objective at least, so that a few percent of overload show as late requests.
OBJECTIVES_PER_RUN = 15.0
MIN_DURATION_S, ENOUGH_DURATION_S = 20.0, 60.0
# They also last for so many answers of full engines in a row, so that engines are full most of the time.
ANSWERS_PER_RUN = 4.0
FILLED_DURATION_S = 90.0
# Seeds of predictions: others than those that chose.
FRESH_SEEDS = (1001, 1002)
# Far above the goodput no objective is met, whatever the sliders, and runs take very long.
MAX_OVERLOAD = 1.3
# Requests that a prediction is made of.
MIN_PREDICTED_REQUESTS = 30
MAX_PREDICTED_REQUESTS = 10_000


def search(request: SearchRequest, effort: SearchEffort | None = None) -> SearchResult:
    """Searches for the best sliders.

    Args:
        request: Workload, engines, objectives and bounds.
        effort: How much is simulated; None: as much as the objectives ask for.

    Raises:
        ValueError: The engines are unknown, or nothing is within the bounds.
    """
    problem = make_problem(request)
    effort = effort or make_effort(problem)
    in_force = make_candidate(request)
    constraints, evaluator = request.constraints, TrialEvaluator(problem)

    def run_trials(trials: Sequence[SearchTrial]) -> list[TrialResult]:
        return [evaluator.evaluate(trial) for trial in trials]

    comparison = GoodputComparison(run_trials, constraints.target)
    start_rps = estimate_start_rps(problem, constraints.replicas, 1)
    found = Search(comparison, make_space(request), effort).find_best(constraints.replicas, 1, start_rps, in_force)
    present = next(ranked for ranked in found.ranking if ranked.candidate == in_force)
    best = found.best

    def predict(ranked: RankedCandidate) -> float:
        return _predict_attainment(evaluator, request, effort, ranked, best.goodput_rps)

    def count(goodput_rps: float) -> float:
        # Less than one request in a whole run measures nothing.
        return goodput_rps if goodput_rps * effort.most_duration_s >= 1.0 else 0.0

    return SearchResult(
        sliders=make_sliders(request, best.candidate),
        goodput_rps=count(best.goodput_rps),
        attainment=predict(best),
        in_force_goodput_rps=count(present.goodput_rps),
        in_force_attainment=predict(present),
        least_gain=compute_least_gain(
            [count(rps) for rps in best.goodputs_rps], [count(rps) for rps in present.goodputs_rps]
        ),
    )


def compute_least_gain(best_rps: Sequence[float], in_force_rps: Sequence[float]) -> float:
    """Goodput over that of the sliders in force, minus 1, on the seed where it is least.

    Args:
        best_rps: Goodput of the best sliders on each seed, in requests per second.
        in_force_rps: Goodput of the sliders in force on the same seeds.

    Returns:
        The gain; 1 where the sliders in force serve nothing and the best ones something.
    """
    pairs = zip(best_rps, in_force_rps, strict=True)
    return min(best / present - 1.0 if present > 0 else float(best > 0) for best, present in pairs)


def _predict_attainment(
    evaluator: TrialEvaluator, request: SearchRequest, effort: SearchEffort, ranked: RankedCandidate, best_rps: float
) -> float:
    """Predicts the attainment of a candidate at the request's rate, as a mean over fresh seeds."""
    # The attainment is what users read: a few percent of overload must show in it.
    patient = replace(effort, most_requests=MAX_PREDICTED_REQUESTS)
    most_rps = MAX_OVERLOAD * max(ranked.goodput_rps, best_rps / 2)
    # Objectives that nothing meets have no goodput, and yet an attainment.
    rate_rps = min(request.workload.rate_rps, max(most_rps, MIN_PREDICTED_REQUESTS / effort.most_duration_s))
    duration_s = patient.choose_duration_s(rate_rps)
    trials = [
        SearchTrial(candidate=ranked.candidate, seed=seed, rate_rps=rate_rps, duration_s=duration_s)
        for seed in FRESH_SEEDS
    ]
    return sum(evaluator.evaluate(trial).attainment for trial in trials) / len(trials)


def make_effort(problem: PlanningProblem) -> SearchEffort:
    """Decides how much is simulated."""
    least_s = min(max(OBJECTIVES_PER_RUN * problem.slo.ttft_s, MIN_DURATION_S), ENOUGH_DURATION_S)
    filled_s = min(ANSWERS_PER_RUN * estimate_response_s(problem), FILLED_DURATION_S)
    return replace(EFFORT, least_duration_s=least_s, filled_s=filled_s)


def make_problem(request: SearchRequest) -> PlanningProblem:
    """Makes the planning problem of a request.

    Raises:
        ValueError: The engines are unknown.
    """
    constraints = request.constraints
    default, *named = (
        SloClass(
            name=item.name,
            slo=Slo(ttft_s=item.ttft_milliseconds / 1e3, tpot_s=item.tpot_milliseconds / 1e3),
            priority=item.priority,
        )
        for item in constraints.classes
    )
    return PlanningProblem(
        rows=[
            TraceRow(prompt_tokens=prompt, output_tokens=output, slo_class=name)
            for prompt, output, name in request.workload.rows
        ],
        slo=default.slo,
        engines={1: make_engine(request)},
        strategies=STRATEGIES,
        # Those that candidates vary are each candidate's own.
        parameters=constraints.strategy_parameters,
        # As the engines and routers that it plans for.
        options=SimOptions(schedules_ahead=True, wait_limit_s=ROUTER_WAIT_LIMIT_S),
        classes=named,
    )


def make_engine(request: SearchRequest) -> EngineSetup:
    """Makes the engine of a request; its role and chunk size are placeholders."""
    facts, constraints = request.engine, request.constraints
    link = TransferLink(speed=find_link(constraints.link))
    if isinstance(facts, EmulatedEngineFacts):
        target = load_model_on_gpu(facts.model, *parse_gpus(facts.gpu))
        profile, kv_bytes_per_token = target.profile, target.kv_bytes_per_token
        block_size_tokens, max_num_seqs = BLOCK_SIZE_TOKENS, MAX_NUM_SEQS
        kv_blocks_total = target.kv_capacity_tokens // block_size_tokens
    else:
        profile = facts.profile
        kv_bytes_per_token, kv_blocks_total = facts.kv_bytes_per_token, facts.kv_blocks_total
        block_size_tokens, max_num_seqs = facts.block_size_tokens, facts.max_num_seqs
    return EngineSetup(
        engine_id=EngineId("engine"),
        profile=profile,
        role=Role.DECODE_HEAVY,
        chunk_size_tokens=0,
        kv_blocks_total=kv_blocks_total,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size_tokens=block_size_tokens,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=constraints.max_batch_tokens,
        link=link,
    )


def make_space(request: SearchRequest) -> SearchSpace:
    """Makes the search space."""
    constraints, in_force = request.constraints, request.in_force
    low, high = constraints.prefill_heavy
    return SearchSpace(
        strategies=tuple(STRATEGIES) if constraints.chooses_strategy else (constraints.strategy,),
        prefill_heavy_tokens=list_chunk_sizes(*constraints.prefill_tokens, [in_force.prefill_heavy_tokens]),
        decode_heavy_tokens=list_chunk_sizes(*constraints.decode_tokens, [in_force.decode_heavy_tokens]),
        max_batch_tokens=constraints.max_batch_tokens,
        prefill_heavy=PrefillHeavyBounds(
            low=int(low.removesuffix("%")), high=int(high.removesuffix("%")), is_percent=low.endswith("%")
        ),
        watermarks=(constraints.strategy_parameters.watermark,),
        approaching_factors=(constraints.strategy_parameters.approaching_factor,),
    )


def make_candidate(request: SearchRequest) -> SliderCandidate:
    """Makes the candidate in force; equal chunk sizes are aggregation, whatever the strategy says."""
    constraints, sliders = request.constraints, request.in_force
    is_aggregated = sliders.prefill_heavy_tokens == sliders.decode_heavy_tokens
    strategy = sliders.strategy or constraints.strategy
    has_roles = get_strategy(strategy).sliders.has_roles
    count = constraints.replicas if is_aggregated else sliders.num_prefill_heavy
    return SliderCandidate(
        strategy="aggregated" if is_aggregated and has_roles else strategy,
        num_prefill_heavy=count,
        num_decode_heavy=constraints.replicas - count,
        prefill_heavy_tokens=sliders.prefill_heavy_tokens,
        decode_heavy_tokens=0 if is_aggregated else sliders.decode_heavy_tokens,
        watermark=constraints.strategy_parameters.watermark,
        approaching_factor=constraints.strategy_parameters.approaching_factor,
    )


def make_sliders(request: SearchRequest, candidate: SliderCandidate) -> Sliders:
    """Makes the sliders of a candidate; strategies without roles keep the P-heavy engines in force."""
    strategy = candidate.strategy if request.constraints.chooses_strategy else ""
    if not get_strategy(candidate.strategy).sliders.has_roles:
        return Sliders(
            num_prefill_heavy=request.in_force.num_prefill_heavy,
            prefill_heavy_tokens=candidate.prefill_heavy_tokens,
            decode_heavy_tokens=candidate.prefill_heavy_tokens,
            strategy=strategy,
        )
    return Sliders(
        num_prefill_heavy=candidate.num_prefill_heavy,
        prefill_heavy_tokens=candidate.prefill_heavy_tokens,
        decode_heavy_tokens=candidate.decode_heavy_tokens,
        strategy=strategy,
    )


def main() -> None:
    """Reads one request, searches, and writes the result."""
    serve_request(lambda text: search(SearchRequest.from_json(text)).to_json())


if __name__ == "__main__":
    main()
