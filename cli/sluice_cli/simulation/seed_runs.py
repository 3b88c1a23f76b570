"""Simulates a cluster once for each seed, at a rate or at its goodput."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice_cli.simulation.cluster_builder import build_cluster
from sluice_cli.simulation.cluster_spec import ClusterSpec, format_engines
from sluice_cli.simulation.trace_cache import load_rows
from sluice_cli.simulation.worker_processes import start_workers
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.goodput_search import search_goodput
from sluice_core.sim.run_summary import make_report, summarize
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.workload import DrawnWorkload, scale_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sluice_core.sim.run_summary import RunSummary
    from sluice_core.sim.sim_setup import Arrival

_START_RPS_PER_ENGINE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRun:
    """What one worker process simulates.

    Args:
        spec: The cluster.
        trace: File of the requests.
        seed: Fixes lengths, gaps and the policies' random choices.
        duration_s: Length of the run, in simulated seconds.
        rate_rps: Requests per second; None: search the goodput, or take the trace's times as they are.
        target: Attainment of the goodput; None: run at the rate.
        has_trace_times: Requests arrive at the trace's times, scaled to the rate.
        timeline: Where to write what happened; None: nowhere.
    """

    spec: ClusterSpec
    trace: Path
    seed: int
    duration_s: float
    rate_rps: float | None
    target: float | None
    has_trace_times: bool = False
    timeline: Path | None = None


def simulate_seeds(
    run: SeedRun, seeds: Sequence[int], num_processes: int
) -> tuple[list[SeedRun], list[tuple[float | None, RunSummary]]]:
    """Simulates several seeds, in processes where more than one is allowed.

    Args:
        run: The first seed's run; the others differ from it in their seed, and write no timeline.
        seeds: One run for each.
        num_processes: Processes to use at most.

    Returns:
        The runs, and the goodput (None where none was searched) and the summary of each.

    Raises:
        ValueError: The description or the trace is wrong.
    """
    build_cluster(run.spec, seed=0)  # what is wrong with the description is said before a process starts
    runs = [replace(run, seed=seed, timeline=run.timeline if seed == seeds[0] else None) for seed in seeds]
    pool = start_workers(min(num_processes, len(runs)))
    if pool is None:
        return runs, [simulate_seed(one) for one in runs]
    with pool:
        return runs, list(pool.map(simulate_seed, runs))


def simulate_seed(run: SeedRun) -> tuple[float | None, RunSummary]:
    """Simulates one seed; returns the goodput if that was asked for, and the run at that rate."""
    rows = load_rows(run.trace, reads_hashes=run.spec.settings.prefix_reuse is not None)
    cluster = build_cluster(run.spec, run.seed)
    workload = DrawnWorkload(rows, run.spec.slo, run.seed, run.spec.classes, burstiness=run.spec.settings.burstiness)
    if run.target is not None:
        start_rps = run.rate_rps or _START_RPS_PER_ENGINE * len(cluster.engines)
        found = search_goodput(cluster, workload, duration_s=run.duration_s, start_rps=start_rps, target=run.target)
        return found.rate_rps, found.summary
    arrivals: list[Arrival]
    if run.has_trace_times:
        arrivals = scale_trace(rows, run.spec.slo, run.rate_rps, run.duration_s, run.spec.classes)
    else:
        assert run.rate_rps is not None
        arrivals = workload.make_arrivals(run.rate_rps, run.duration_s)
    timeline = None if run.timeline is None else Timeline()
    simulation = Simulation(cluster, arrivals, timeline)
    simulation.run()
    if run.timeline is not None and timeline is not None:
        with run.timeline.open("w") as file:
            file.writelines(timeline.to_chrome_trace())
    return None, summarize(simulation)


def make_simulation_report(
    runs: Sequence[SeedRun], results: Sequence[tuple[float | None, RunSummary]]
) -> dict[str, object]:
    """Makes the JSON that ``--json`` prints."""
    spec = runs[0].spec
    rates = [rate for rate, _ in results if rate is not None]
    report: dict[str, object] = {
        "model": spec.model,
        "gpu": spec.gpu,
        "tensor_parallel": spec.tensor_parallel,
        "strategy": spec.strategy,
        "engines": format_engines(spec.engines),
        "ttft_ms": spec.slo.ttft_s * 1e3,
        "tpot_ms": spec.slo.tpot_s * 1e3,
        "rate_rps": None if rates else runs[0].rate_rps,
        "duration_s": runs[0].duration_s,
        "seeds": [run.seed for run in runs],
        "prefix_reuse": bool(spec.settings.prefix_reuse),
    }
    if rates:
        report["target"] = runs[0].target
        report["goodput_rps"] = statistics.fmean(rates)
        report["goodput_sd"] = statistics.stdev(rates) if len(rates) > 1 else 0.0
        report["goodput_per_seed"] = rates
    return report | make_report([summary for _, summary in results])
