"""Searches for the sliders that serve most: a question as JSON on standard input, the answer as JSON on standard output.

The operator and the launcher run it as a process of its own (``asking``): seconds of computing have no place in an event
loop, and a process can be killed.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from sluice_core.latency.catalog import load_model_on_gpu, parse_gpus
from sluice_core.latency.transfer import find_link
from sluice_core.planning.candidates import PrefillHeavyBounds, SearchSpace, SliderCandidate, list_chunk_sizes
from sluice_core.planning.comparison import CandidateComparison, RankedCandidate
from sluice_core.planning.planner import estimate_response_s, estimate_start_rps
from sluice_core.planning.search import Search, SearchEffort
from sluice_core.planning.trials import PlanningProblem, SearchTrial, TrialEvaluator, TrialResult
from sluice_core.records import EarlyRejection, EngineId, FlowParameters, Role, Slo, SloClass
from sluice_core.sim.cell import BLOCK_SIZE_TOKENS, GC_THRESHOLD, MAX_NUM_SEQS, EngineSetup, SimOptions, TransferLink
from sluice_core.sim.traces import TraceRow
from sluice_core.strategies import STRATEGIES
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult

if TYPE_CHECKING:
    from collections.abc import Sequence

# Less than `sluice plan` does, so that an edit is answered in seconds: the sliders are measured afterwards anyway.
# Where prompts are so long that few come in a minute, runs last longer: in a few dozen requests those that no sliders serve in
# time hide what the sliders do for the others.
EFFORT = SearchEffort(seeds=(1, 2), num_requests=700, most_duration_s=1200.0, most_requests=3000, num_compared=2)
# Whole runs last so many times the TTFT objective at least, so that a few percent of overload show as late requests.
OBJECTIVES_PER_RUN = 15.0
MIN_DURATION_S, ENOUGH_DURATION_S = 20.0, 60.0
# And so many answers of full engines, one after the other, so that engines are full most of the time; of long answers fewer.
ANSWERS_PER_RUN = 4.0
FILLED_DURATION_S = 90.0
# Seeds of predictions: others than those that chose.
FRESH_SEEDS = (1001, 1002)
# Far above the goodput nothing is met, whatever the sliders, and runs take for ever.
MAX_OVERLOAD = 1.3
# Requests that a prediction is made of.
MIN_PREDICTED_REQUESTS = 30
MAX_PREDICTED_REQUESTS = 10_000
# Of the processor, beside engines and routers that share it.
NICENESS = 10
MAX_CPU_S = 600


def search(request: SearchRequest, effort: SearchEffort | None = None) -> SearchResult:
    """Searches.

    Args:
        request: What for.
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

    comparison = CandidateComparison(run_trials, constraints.target)
    start_rps = estimate_start_rps(problem, constraints.replicas, 1)
    found = Search(comparison, make_space(request), effort).find_best(constraints.replicas, 1, start_rps, in_force)
    present = next(ranked for ranked in found.ranking if ranked.candidate == in_force)
    best = found.best
    # The attainment is what users read: a few percent of overload must show in it.
    patient = replace(effort, most_requests=MAX_PREDICTED_REQUESTS)

    def predict(ranked: RankedCandidate) -> float:
        most_rps = MAX_OVERLOAD * max(ranked.goodput_rps, best.goodput_rps / 2)
        # Objectives that nothing meets have no goodput, and yet an attainment.
        rate_rps = min(request.workload.rate_rps, max(most_rps, MIN_PREDICTED_REQUESTS / effort.most_duration_s))
        trials = [
            SearchTrial(
                candidate=ranked.candidate,
                seed=seed,
                rate_rps=rate_rps,
                duration_s=patient.choose_duration_s(rate_rps),
            )
            for seed in FRESH_SEEDS
        ]
        return sum(evaluator.evaluate(trial).attainment for trial in trials) / len(trials)

    def count(goodput_rps: float) -> float:
        # Of less than one request in a whole run nothing is known but that it is little.
        return goodput_rps if goodput_rps * effort.most_duration_s >= 1.0 else 0.0

    pairs = zip(map(count, best.goodputs_rps), map(count, present.goodputs_rps), strict=True)
    return SearchResult(
        sliders=make_sliders(request, best.candidate),
        goodput_rps=count(best.goodput_rps),
        attainment=predict(best),
        in_force_goodput_rps=count(present.goodput_rps),
        in_force_attainment=predict(present),
        least_gain=min(ours / theirs - 1.0 if theirs > 0 else float(ours > 0) for ours, theirs in pairs),
    )


def make_effort(problem: PlanningProblem) -> SearchEffort:
    """Makes how much is simulated."""
    least_s = min(max(OBJECTIVES_PER_RUN * problem.slo.ttft_s, MIN_DURATION_S), ENOUGH_DURATION_S)
    filled_s = min(ANSWERS_PER_RUN * estimate_response_s(problem), FILLED_DURATION_S)
    return replace(EFFORT, least_duration_s=least_s, filled_s=filled_s)


def make_problem(request: SearchRequest) -> PlanningProblem:
    """Makes what is planned for.

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
        parameters=FlowParameters(
            early_rejection=EarlyRejection(constraints.early_rejection),
            min_tokens_between_moves=constraints.min_tokens_between_moves,
        ),
        options=SimOptions(schedules_ahead=True),  # as the engines that it plans for
        classes=named,
    )


def make_engine(request: SearchRequest) -> EngineSetup:
    """Makes the engine of a question; its role and chunk size do not count."""
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
    """Makes what may be chosen."""
    constraints, in_force = request.constraints, request.in_force
    low, high = constraints.prefill_heavy
    return SearchSpace(
        strategies=(constraints.strategy,),
        prefill_heavy_tokens=list_chunk_sizes(*constraints.prefill_tokens, [in_force.prefill_heavy_tokens]),
        decode_heavy_tokens=list_chunk_sizes(*constraints.decode_tokens, [in_force.decode_heavy_tokens]),
        max_batch_tokens=constraints.max_batch_tokens,
        prefill_heavy=PrefillHeavyBounds(
            low=int(low.removesuffix("%")), high=int(high.removesuffix("%")), is_percent=low.endswith("%")
        ),
        watermarks=(constraints.watermark,),
        approaching_factors=(constraints.approaching_factor,),
    )


def make_candidate(request: SearchRequest) -> SliderCandidate:
    """Makes the candidate in force; equal chunk sizes are aggregation, whatever the strategy says."""
    constraints, sliders = request.constraints, request.in_force
    is_aggregated = sliders.prefill_heavy_tokens == sliders.decode_heavy_tokens
    count = constraints.replicas if is_aggregated else sliders.num_prefill_heavy
    return SliderCandidate(
        strategy="aggregated" if is_aggregated else constraints.strategy,
        num_prefill_heavy=count,
        num_decode_heavy=constraints.replicas - count,
        prefill_heavy_tokens=sliders.prefill_heavy_tokens,
        decode_heavy_tokens=0 if is_aggregated else sliders.decode_heavy_tokens,
        watermark=constraints.watermark,
        approaching_factor=constraints.approaching_factor,
    )


def make_sliders(request: SearchRequest, candidate: SliderCandidate) -> Sliders:
    """Makes the sliders of a candidate; aggregation leaves roles as they are."""
    if candidate.strategy == "aggregated":
        return Sliders(
            num_prefill_heavy=request.in_force.num_prefill_heavy,
            prefill_heavy_tokens=candidate.prefill_heavy_tokens,
            decode_heavy_tokens=candidate.prefill_heavy_tokens,
        )
    return Sliders(
        num_prefill_heavy=candidate.num_prefill_heavy,
        prefill_heavy_tokens=candidate.prefill_heavy_tokens,
        decode_heavy_tokens=candidate.decode_heavy_tokens,
    )


def main() -> None:
    """Answers one question."""
    os.nice(NICENESS)
    # Whoever asked ends it earlier; but may have been killed.
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    gc.set_threshold(GC_THRESHOLD)
    request = SearchRequest.from_json(sys.stdin.read())
    try:
        result = search(request)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(result.to_json())


if __name__ == "__main__":
    main()
