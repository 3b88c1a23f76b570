"""What simulating costs: requests and iterations per second of CPU time of one core.

    .venv/bin/python benchmarks/simulator/run.py [--json OUT] [--repeats N] [--quick]

Cells are those of docs/measurements/simulator.md at about nine tenths of their goodput: four engines of a 14B model on
A100s, prompts as long as papers (``arxiv``, 600 s) and as chats (``chat``, 300 s), under each strategy; and clusters of
64 and 1024 engines on the chat lengths, which show that the cost per request does not grow with the engines, but for
what reads all of them. Lengths are those of traces (``benchmarks/traces``).

``--profile CELL`` prints where the time goes (of the interpreted core: compiled functions do not show).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import gzip
import json
import os
import platform
import pstats
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import sluice_core.sim.engine.sim_engine
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, Role, Slo
from sluice_core.sim.sim_setup import GC_THRESHOLD, Cell, EngineSetup, NoGrant, SimOptions, TtftEnd
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.traces import TraceRow, parse_trace
from sluice_core.sim.workload import DrawnWorkload
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters

TARGETS_RPS = {"arxiv": 12_000, "chat": 30_000}  # docs/measurements/simulator.md, per core, four engines
TRACES_FOLDER = Path(__file__).parents[1] / "traces"
TRACES = {"arxiv": "arxiv_16k_recon.csv.gz", "chat": "sharegpt_dist.csv.gz"}
SLOS = {"arxiv": Slo(ttft_s=4.0, tpot_s=0.07), "chat": Slo(ttft_s=3.0, tpot_s=0.11)}
P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorCase:
    """One line of the table.

    Args:
        lengths: Key of ``TRACES``.
        strategy: Its name.
        placement: Its placement.
        groups: Count, chunk size and role of engines.
        rate_rps: Requests per second.
        duration_s: Length of the run.
    """

    lengths: str
    strategy: str
    placement: str
    groups: tuple[tuple[int, int, Role], ...]
    rate_rps: float
    duration_s: float


def scale(case: SimulatorCase, factor: int, duration_s: float) -> SimulatorCase:
    """Make the same load per engine on more engines."""
    groups = tuple((count * factor, chunk, role) for count, chunk, role in case.groups)
    return SimulatorCase(
        lengths=case.lengths,
        strategy=case.strategy,
        placement=case.placement,
        groups=groups,
        rate_rps=case.rate_rps * factor,
        duration_s=duration_s,
    )


def list_cases() -> dict[str, SimulatorCase]:
    """List the cells by name."""
    shapes: dict[str, tuple[str, dict[str, tuple[tuple[int, int, Role], ...]]]] = {
        "taichi": ("length_aware", {"arxiv": ((2, 1024, P), (2, 256, D)), "chat": ((2, 1024, P), (2, 512, D))}),
        "aggregated": ("round_robin", {"arxiv": ((4, 512, P),), "chat": ((4, 1024, P),)}),
        "disaggregated": ("round_robin", dict.fromkeys(TRACES, ((2, 16_384, P), (2, 0, D)))),
    }
    rates = {
        ("arxiv", "taichi"): 2.1,
        ("arxiv", "aggregated"): 1.6,
        ("arxiv", "disaggregated"): 1.4,
        ("chat", "taichi"): 23.0,
        ("chat", "aggregated"): 22.0,
        ("chat", "disaggregated"): 19.5,
    }
    cases = {}
    for (lengths, strategy), rate_rps in rates.items():
        placement, groups = shapes[strategy]
        cases[f"{lengths} {strategy}"] = SimulatorCase(
            lengths=lengths,
            strategy=strategy,
            placement=placement,
            groups=groups[lengths],
            rate_rps=rate_rps,
            duration_s=600.0 if lengths == "arxiv" else 300.0,
        )
    cases["chat taichi, 64 engines"] = scale(cases["chat taichi"], 16, 60.0)
    cases["chat taichi, 1024 engines"] = scale(cases["chat taichi"], 256, 6.0)
    return cases


def load_rows(lengths: str) -> list[TraceRow]:
    """Read a trace."""
    with gzip.open(TRACES_FOLDER / TRACES[lengths], "rt") as file:
        return parse_trace(file)


def make_cell(case: SimulatorCase) -> Cell:
    """Make the cluster, with the semantics of the papers."""
    target = load_model_on_gpu("qwen2.5-14b", "a100-80g")
    engines = [
        EngineSetup(
            engine_id=EngineId(f"{role.value[0].lower()}{number}"),
            profile=target.profile,
            role=role,
            chunk_size_tokens=chunk,
            kv_blocks_total=target.kv_capacity_tokens // 16,
            kv_bytes_per_token=target.kv_bytes_per_token,
        )
        for count, chunk, role in case.groups
        for number in range(count)
    ]
    return Cell(
        engines=engines,
        strategy=get_strategy(case.strategy).vary(placement=case.placement),
        parameters=StrategyParameters(early_rejection=EarlyRejection.RANDOM),
        options=SimOptions(no_grant=NoGrant.WAIT, ttft_end=TtftEnd.DECODE_JOIN),
    )


def measure(case: SimulatorCase, rows: list[TraceRow], seed: int) -> dict[str, float]:
    """Simulate once; making the requests is not part of it."""
    cell = make_cell(case)
    arrivals = DrawnWorkload(rows, SLOS[case.lengths], seed).make_arrivals(case.rate_rps, case.duration_s)
    gc.collect()
    started = time.process_time()
    simulation = Simulation(cell, arrivals)
    simulation.run()
    cpu_s = time.process_time() - started
    num_iterations = sum(engine.counters.num_iterations for engine in simulation.engines)
    return {
        "cpu_s": cpu_s,
        "requests": len(arrivals),
        "iterations": num_iterations,
        "requests_per_s": len(arrivals) / cpu_s,
        "iterations_per_s": num_iterations / cpu_s,
        "attainment": sum(request.has_met_slo for request in simulation.requests) / len(arrivals),
    }


def profile(case: SimulatorCase, rows: list[TraceRow]) -> None:
    """Print where the time goes."""
    arrivals = DrawnWorkload(rows, SLOS[case.lengths], 1).make_arrivals(case.rate_rps, case.duration_s)
    simulation = Simulation(make_cell(case), arrivals)
    profiler = cProfile.Profile()
    profiler.runcall(simulation.run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Measure all cells and print the table."""
    cases = list_cases()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short repeat: shows that it works")
    parser.add_argument("--cell", action="append", choices=list(cases), help="measure these only")
    parser.add_argument("--profile", choices=list(cases))
    options = parser.parse_args()
    rows = {lengths: load_rows(lengths) for lengths in TRACES}
    if options.profile:
        profile(cases[options.profile], rows[cases[options.profile].lengths])
        return
    is_compiled = not str(sluice_core.sim.engine.sim_engine.__file__).endswith(".py")
    print(
        f"core {'compiled' if is_compiled else 'interpreted'}, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    gc.set_threshold(GC_THRESHOLD)
    results: dict[str, dict[str, float]] = {}
    print(
        f"{'cell':28}{'requests/s':>12}{'(worst)':>10}{'iterations/s':>14}{'us/iteration':>14}{'attainment':>12}{'target':>9}"
    )
    for name, case in cases.items():
        if options.cell and name not in options.cell:
            continue
        runs = [measure(case, rows[case.lengths], 1) for _ in range(1 if options.quick else options.repeats)]
        best = max(runs, key=lambda run: run["requests_per_s"])
        worst = min(run["requests_per_s"] for run in runs)
        target = TARGETS_RPS[case.lengths] if "engines" not in name else 0
        median = statistics.median(run["requests_per_s"] for run in runs)
        results[name] = best | {"median_requests_per_s": median, "worst_requests_per_s": worst, "target": target}
        print(
            f"{name:28}{best['requests_per_s']:12.0f}{worst:10.0f}{best['iterations_per_s']:14.0f}"
            f"{1e6 / best['iterations_per_s']:14.2f}{best['attainment']:12.3f}{target or '-':>9}"
        )
    if options.json:
        machine = {"compiled": is_compiled, "python": sys.version, "load": os.getloadavg()[0]}
        options.json.write_text(json.dumps({"machine": machine, "cells": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
