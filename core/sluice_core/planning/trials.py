"""One simulated run of one candidate, and what is learned from it.

Common random numbers: a seed fixes lengths and unit-rate gaps, so all candidates serve the same requests, and a shorter
run serves the first of a longer one's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sluice_core.planning.slider_candidates import SliderCandidate
from sluice_core.records import EngineId, Role, Slo, SloClass
from sluice_core.sim.goodput_search import count_allowed_misses
from sluice_core.sim.pickling import register
from sluice_core.sim.run_summary import RunSummary, list_latencies, summarize
from sluice_core.sim.sim_setup import Arrival, Cell, EngineSetup, RouterSetup, SimOptions
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.traces import TraceRow
from sluice_core.sim.workload import DrawnWorkload
from sluice_core.strategies import Strategy
from sluice_core.strategy_parameters import StrategyParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """What is planned for: everything that no slider changes.

    Args:
        rows: The workload's requests.
        slo: Objectives.
        engines: An engine by the GPUs that it has; name, role and chunk size do not count.
        strategies: By name.
        parameters: Of the strategies; M and alpha do not count.
        options: Semantics.
        classes: Objectives and priorities of request classes.
        routers: The routers.
        burstiness: See ``DrawnWorkload``.
    """

    rows: Sequence[TraceRow]
    slo: Slo
    engines: Mapping[int, EngineSetup]
    strategies: Mapping[str, Strategy]
    parameters: StrategyParameters = StrategyParameters()  # noqa: RUF009 - a frozen record
    options: SimOptions = SimOptions()  # noqa: RUF009 - a frozen record
    classes: Sequence[SloClass] = ()
    routers: Sequence[RouterSetup] = (RouterSetup(),)
    burstiness: float = 1.0

    def make_workload(self, seed: int) -> DrawnWorkload:
        """Make the requests of a seed."""
        return DrawnWorkload(self.rows, self.slo, seed, self.classes, burstiness=self.burstiness)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrial:
    """A run to make.

    Args:
        candidate: The sliders.
        seed: Fixes requests and random choices.
        rate_rps: Request rate.
        duration_s: Length of the run.
        least_attainment: Give up once attainment cannot reach this any more.
        is_detailed: Keep every metric.
        kv_scale: Scales the KV capacity, to see what more of it would change.
    """

    candidate: SliderCandidate
    seed: int
    rate_rps: float
    duration_s: float
    least_attainment: float = 0.0
    is_detailed: bool = False
    kv_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialDetails:
    """What is kept of a detailed run.

    Args:
        summary: Its metrics.
        latencies_s: TTFT and TPOT of finished requests that have both, in the order of arrival.
        num_missed_ttft: Requests that missed TTFT and not TPOT.
        num_missed_tpot: Requests that missed TPOT and not TTFT.
        num_missed_both: Requests that missed both, or were rejected.
    """

    summary: RunSummary
    latencies_s: tuple[tuple[float, float], ...]
    num_missed_ttft: int
    num_missed_tpot: int
    num_missed_both: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What a run came to.

    Args:
        trial: The run.
        attainment: Attainment; of a run that gave up, among the requests that had arrived by then, those in flight
            counted as met: below ``least_attainment``, and the lower the sooner it gave up.
        num_iterations: Iterations of all engines: what the run cost.
        end_s: When it ended, by the simulated clock; runs that end at the very same time did the same. NaN: not known.
        detail: Every metric, if asked for.
    """

    trial: SearchTrial
    attainment: float
    num_iterations: int
    end_s: float = math.nan
    detail: TrialDetails | None = None


def build_cell(problem: PlanningProblem, candidate: SliderCandidate, seed: int, kv_scale: float = 1.0) -> Cell:
    """Build the cluster of a candidate: P-heavy engines first."""
    template = problem.engines[candidate.tensor_parallel]
    if kv_scale != 1.0:
        template = replace(template, kv_blocks_total=max(1, int(template.kv_blocks_total * kv_scale)))
    groups = (
        (Role.PREFILL_HEAVY, "p", candidate.num_prefill_heavy, candidate.prefill_heavy_tokens),
        (Role.DECODE_HEAVY, "d", candidate.num_decode_heavy, candidate.decode_heavy_tokens),
    )
    return Cell(
        engines=[
            replace(template, engine_id=EngineId(f"{letter}{number}"), role=role, chunk_size_tokens=tokens)
            for role, letter, count, tokens in groups
            for number in range(count)
        ],
        strategy=problem.strategies[candidate.strategy],
        parameters=replace(
            problem.parameters, watermark=candidate.watermark, approaching_factor=candidate.approaching_factor
        ),
        options=problem.options,
        seed=seed,
        routers=problem.routers,
    )


class TrialEvaluator:
    """Makes runs; mutable only in the requests that it keeps.

    Args:
        problem: What is planned for.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._workloads: dict[int, DrawnWorkload] = {}
        self._latest = (0, 0.0, 0.0)
        self._arrivals: Sequence[Arrival] = ()

    def evaluate(self, trial: SearchTrial) -> TrialResult:
        """Make a run."""
        problem = self._problem
        arrivals = self._make_arrivals(trial)
        if not arrivals:
            return TrialResult(trial=trial, attainment=0.0, num_iterations=0)
        simulation = Simulation(build_cell(problem, trial.candidate, trial.seed, trial.kv_scale), arrivals)
        is_whole = simulation.run(most_missed=count_allowed_misses(len(arrivals), trial.least_attainment))
        return TrialResult(
            trial=trial,
            attainment=1.0 - simulation.num_missed / simulation.num_arrived,
            num_iterations=sum(engine.counters.num_iterations for engine in simulation.engines),
            end_s=simulation.now,
            detail=_describe(simulation) if is_whole and trial.is_detailed else None,
        )

    def _make_arrivals(self, trial: SearchTrial) -> Sequence[Arrival]:
        """Make the requests of a run; one candidate after the other serves the same."""
        problem, seed, key = self._problem, trial.seed, (trial.seed, trial.rate_rps, trial.duration_s)
        if key != self._latest:
            if seed not in self._workloads:
                self._workloads[seed] = problem.make_workload(seed)
            self._arrivals = self._workloads[seed].make_arrivals(trial.rate_rps, trial.duration_s)
            self._latest = key
        return self._arrivals


def _describe(simulation: Simulation) -> TrialDetails:
    outcomes = [request.slo_outcome for request in simulation.requests]
    late = sum(outcome.met_tpot and not outcome.met_ttft for outcome in outcomes)
    slow = sum(outcome.met_ttft and not outcome.met_tpot for outcome in outcomes)
    both = sum(not outcome.met_ttft and not outcome.met_tpot for outcome in outcomes)
    return TrialDetails(
        summary=summarize(simulation),
        latencies_s=list_latencies(simulation.requests),
        num_missed_ttft=late,
        num_missed_tpot=slow,
        num_missed_both=both,
    )


# Problems, trials and outcomes go between processes.
register(SliderCandidate, TrialDetails, TrialResult, PlanningProblem, SearchTrial)
