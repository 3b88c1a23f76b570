"""What is observed of a trial: a simulation summed up, its interference, or an engine's prefill capacity."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from benchmarks.papers.findings import Unit
from benchmarks.papers.trials import make_arrivals, run_trial

from sluice_cli.simulation.cluster_builder import build_cluster
from sluice_core.records import Slo
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.run_summary import compute_percentile
from sluice_core.sim.sim_setup import Arrival
from sluice_core.sim.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.papers.trials import PaperTrial

CAPACITY_PROMPT_TOKENS = 3000
_NUM_CAPACITY_PROMPTS = 200
_DECODE_TOKENS = 4000  # of the decodes beside the prompts: longer than the measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """How a value is called and written.

    Args:
        quantity: Its name in a finding.
        unit: Its unit in a finding.
        factor: From the value, in seconds or as a share, to that unit.
        digits: Digits after the point; None: as the unit has.
    """

    quantity: str
    unit: Unit
    factor: float = 1.0
    digits: int | None = None


METRICS: Mapping[str, Metric] = {
    "attainment": Metric(quantity="attainment", unit=Unit.PERCENT, factor=100),
    "transfer_share": Metric(
        quantity="share of transfers in the requests' time", unit=Unit.PERCENT, factor=100, digits=3
    ),
    "ttft_p90": Metric(quantity="P90 TTFT", unit=Unit.SECONDS),
    "tpot_p50": Metric(quantity="P50 TPOT", unit=Unit.MILLISECONDS, factor=1e3),
    "tpot_p90": Metric(quantity="P90 TPOT", unit=Unit.MILLISECONDS, factor=1e3),
    "intercept": Metric(quantity="TPOT without interference", unit=Unit.MILLISECONDS, factor=1e3),
    "slope": Metric(quantity="TPOT per prefill token per output token, ms", unit=Unit.NONE, factor=1e3),
    "r2": Metric(quantity="R2 of the line", unit=Unit.NONE),
    "limit": Metric(quantity="prefill tokens per output token at TPOT 100 ms", unit=Unit.TOKENS),
    "capacity": Metric(quantity="prefill capacity", unit=Unit.TOKENS_PER_S),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one seed gave.

    Args:
        values: By metric.
        points: Of a scatter plot: TTFT or interference intensity, and TPOT in seconds, of each request.
    """

    values: Mapping[str, float]
    points: tuple[tuple[float, float], ...] = ()


def observe_trial(trial: PaperTrial) -> Observation:
    """Runs a trial; attainment and latencies."""
    result = run_trial(trial)
    ttfts_s, tpots_s = sorted(result.run.ttfts_s), sorted(result.run.tpots_s)
    values = {
        "attainment": result.run.attainment,
        "transfer_share": result.run.transfer_share,
        "ttft_p90": compute_percentile(ttfts_s, 0.9) or 0.0,
        "tpot_p50": compute_percentile(tpots_s, 0.5) or 0.0,
        "tpot_p90": compute_percentile(tpots_s, 0.9) or 0.0,
    }
    return Observation(values=values, points=result.latencies_s)


def observe_interference(trial: PaperTrial) -> Observation:
    """Runs a trial of aggregation; interference intensity and TPOT of each request, and the line through them.

    Intensity: prefill tokens that the engine computes during a request's decode, over the request's output tokens.

    Source: TaiChi, section 2.3.1.
    """
    timeline = Timeline()
    simulation = Simulation(build_cluster(trial.spec, trial.seed), make_arrivals(trial), timeline)
    simulation.run()
    starts_s: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    for iteration in timeline.iterations:
        starts_s.setdefault(iteration.engine_id, []).append(iteration.start_s)
        tokens.setdefault(iteration.engine_id, []).append(iteration.prefill_tokens)
    sums = {engine_id: [0, *accumulate(of_engine)] for engine_id, of_engine in tokens.items()}
    points = []
    for request in simulation.requests:
        tpot_s = request.tpot_s
        if tpot_s is None or request.target is None or request.num_preemptions:
            continue
        begin = bisect_left(starts_s[request.target], request.first_token_s)
        end = bisect_left(starts_s[request.target], request.last_token_s)
        prefill_tokens = sums[request.target][end] - sums[request.target][begin]
        points.append((prefill_tokens / request.output_tokens, tpot_s))
    line = statistics.linear_regression(*zip(*points, strict=True))
    values = {
        "intercept": line.intercept,
        "slope": line.slope,
        "r2": statistics.correlation(*zip(*points, strict=True)) ** 2,
        "limit": (trial.spec.slo.tpot_s - line.intercept) / line.slope,
    }
    return Observation(values=values, points=tuple(points))


def observe_capacity(trial: PaperTrial) -> Observation:
    """Prefill tokens per second of all engines that prefill, with full queues.

    One engine is simulated: ``num_decodes`` requests that decode throughout, and prompts that end with their first
    token.
    """
    slo = Slo(ttft_s=1e9, tpot_s=1e9)
    requests = [(_DECODE_TOKENS, trial.num_decodes), (1, _NUM_CAPACITY_PROMPTS)]
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=CAPACITY_PROMPT_TOKENS, output_tokens=output_tokens, slo=slo)
        for output_tokens, count in requests
        for _ in range(count)
    ]
    simulation = Simulation(build_cluster(trial.spec, seed=1), arrivals)
    simulation.run()
    ends_s = sorted(request.first_token_s for request in simulation.requests)
    # The measurement begins after the decodes' own prefill and a tenth of the prompts.
    begin_s = ends_s[trial.num_decodes + _NUM_CAPACITY_PROMPTS // 10]
    num_tokens = sum(1 for end_s in ends_s if end_s > begin_s) * CAPACITY_PROMPT_TOKENS
    return Observation(values={"capacity": trial.num_engines * num_tokens / (ends_s[-1] - begin_s)})


OBSERVERS: Mapping[str, Callable[[PaperTrial], Observation]] = {
    "trial": observe_trial,
    "interference": observe_interference,
    "capacity": observe_capacity,
}
