"""Replica autoscaling over a day: the operator's decision beside an HPA, an oracle, and a static fleet.

    PYTHONPATH=build/compiled:. .venv/bin/python -m benchmarks.autoscaling.run [--workload day|step|mooncake]
        [--strategy sluice|taichi] [--start-s 30 120 600] [--policy scaler oracle static hpa] [--factors 0.95 1.0]
        [--hours 24] [--day-seed 7] [--gives-up] [--json FILE]

Engines are Qwen2.5-32B on an A100, TTFT 2 s, TPOT 100 ms, wanted of 90 %; goodputs by size are searched first.
``oracle`` knows each minute's rate, has the same start time, and takes the least of ``--factors`` on rates at which its
own run keeps 90 % in all and 80 % in each five minutes. ``static`` is the fewest engines that hold 90 % in every window
of the busiest two hours. With ``--gives-up`` a run ends at its first window below 80 %. Hours of an engine count from
being asked for until it is gone.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.autoscaling.day_trace import DAY, DAY_S, count_arrivals, digest, make_step
from benchmarks.autoscaling.fleet import LEAST_SHARE, WINDOW_S, Fleet, FleetFigures, compute_figures, simulate_fleet
from benchmarks.autoscaling.policies import HpaPolicy, ScalerPolicy, SchedulePolicy, make_oracle_schedule

from sluice_cli.simulation.trace_cache import load_rows
from sluice_core.autoscaling.capacity_curve import CapacityCurve
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, Role, Slo
from sluice_core.scheduling.router_wait_limit import ROUTER_WAIT_LIMIT_S
from sluice_core.sim.goodput_search import search_goodput
from sluice_core.sim.sim_setup import (
    BLOCK_SIZE_TOKENS,
    GC_THRESHOLD,
    MAX_BATCH_TOKENS,
    Cell,
    EngineSetup,
    SimOptions,
)
from sluice_core.sim.workload import DrawnWorkload, scale_trace
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT
from sluice_core.strategies import STRATEGIES, get_strategy
from sluice_operator.api.sliders import Sliders, scale_sliders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.autoscaling.policies import Policy

    from sluice_core.sim.sim_setup import Arrival
    from sluice_core.sim.traces import TraceRow

TRACES = Path(__file__).parent.parent / "traces"
MODEL, GPU = "qwen2.5-32b", "a100-80g"
MOST_ENGINES = 40
SIZES = (2, 4, 8, 16)
SEARCH_S, SEARCH_SEED = 300.0, 7
ORACLE_BIN_S = 60.0
ORACLE_FACTORS = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2)
QUEUES = (0.25, 1.0, 4.0)
KV_USES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
STATIC_SLICE_S = 7200.0
# Of four engines, where the strategy uses them.
NUM_PREFILL_HEAVY, PREFILL_HEAVY_TOKENS, DECODE_HEAVY_TOKENS = 2, 1024, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is served, and by which engines.

    Args:
        rows: Lengths.
        arrivals: The requests.
        slo: Objectives.
        template: An engine.
        sliders: Of four engines.
        capacity: Goodput by engines.
        gives_up: See ``Fleet``.
    """

    rows: Sequence[TraceRow]
    arrivals: Sequence[Arrival]
    slo: Slo
    template: EngineSetup
    sliders: Sliders
    capacity: CapacityCurve
    gives_up: bool = False

    def run(self, policy: Policy, start_s: float, first: int) -> FleetFigures:
        """Runs a policy."""
        fleet = Fleet(self.template, self.sliders, 4, policy, start_s, gives_up=self.gives_up)
        return compute_figures(simulate_fleet(self.arrivals, fleet, first), fleet)

    @property
    def first(self) -> int:
        """Engines that serve at the start: what the first five minutes need."""
        rate_rps = sum(arrival.at_s < WINDOW_S for arrival in self.arrivals) / WINDOW_S
        return self.capacity.count_engines(rate_rps, 1, MOST_ENGINES)


def make_sliders(strategy: str) -> Sliders:
    """Makes the sliders of four engines under a strategy."""
    use = get_strategy(strategy).sliders
    prefill_tokens, decode_tokens = use.resolve(PREFILL_HEAVY_TOKENS, DECODE_HEAVY_TOKENS, MAX_BATCH_TOKENS)
    return Sliders(
        num_prefill_heavy=NUM_PREFILL_HEAVY if use.has_roles else 0,
        prefill_heavy_tokens=prefill_tokens,
        decode_heavy_tokens=decode_tokens,
        strategy=strategy,
    )


def load_engine(workload: str) -> tuple[list[TraceRow], EngineSetup, Slo]:
    """Loads what a workload is served by: lengths that fit, an engine, and objectives."""
    is_long = workload == "mooncake"
    slo = Slo(ttft_s=20.0 if is_long else 2.0, tpot_s=0.1)
    target = load_model_on_gpu(MODEL, GPU, 2 if is_long else 1)
    template = EngineSetup(
        engine_id=EngineId("any"),
        profile=target.profile,
        role=Role.DECODE_HEAVY,
        chunk_size_tokens=0,
        kv_blocks_total=target.kv_capacity_tokens // BLOCK_SIZE_TOKENS,
        kv_bytes_per_token=target.kv_bytes_per_token,
    )
    rows = load_rows(TRACES / f"{'mooncake_conversation' if is_long else 'azure2023_conv'}.csv.gz")
    fitting = [row for row in rows if row.prompt_tokens + row.output_tokens < 0.5 * target.kv_capacity_tokens]
    return fitting, template, slo


def make_scenario(workload: str, strategy: str, hours: float, day_seed: int) -> Scenario:
    """Makes a scenario: ``day``, ``step`` or ``mooncake``."""
    rows, template, slo = load_engine(workload)
    sliders = make_sliders(strategy)
    points = [(size, _search(template, sliders, rows, slo, size)) for size in SIZES]
    capacity = CapacityCurve(tuple(points))
    arrivals: Sequence[Arrival]
    if workload == "step":
        arrivals = make_step(rows, slo, low_rps=3.0, high_rps=18.0)
    elif workload == "mooncake":
        arrivals = scale_trace(rows, slo, None, DAY_S)
    else:
        arrivals = replace(DAY, seed=day_seed).make_arrivals(rows, slo, hours)
    return Scenario(rows=rows, arrivals=arrivals, slo=slo, template=template, sliders=sliders, capacity=capacity)


def _search(template: EngineSetup, sliders: Sliders, rows: Sequence[TraceRow], slo: Slo, size: int) -> float:
    """Searches the goodput of so many engines at 90 %, in requests per second."""
    count = scale_sliders(sliders, 4, size).num_prefill_heavy
    roles = [Role.PREFILL_HEAVY] * count + [Role.DECODE_HEAVY] * (size - count)
    engines = [
        replace(
            template, engine_id=EngineId(f"e{number}"), role=role, chunk_size_tokens=sliders.chunk_size_tokens(role)
        )
        for number, role in enumerate(roles)
    ]
    options = SimOptions(wait_limit_s=ROUTER_WAIT_LIMIT_S)
    cell = Cell(engines=engines, strategy=get_strategy(sliders.strategy), options=options)
    workload = DrawnWorkload(rows, slo, SEARCH_SEED)
    return search_goodput(cell, workload, duration_s=SEARCH_S, start_rps=0.5 * size).rate_rps


def run_oracle(scenario: Scenario, start_s: float, factors: Sequence[float]) -> tuple[FleetFigures, float]:
    """Runs the oracle with one factor after the other until its run keeps the promise; returns figures and factor."""
    rates = [count / ORACLE_BIN_S for count in count_arrivals(scenario.arrivals, ORACLE_BIN_S)]
    for factor in factors:
        schedule = make_oracle_schedule(
            rates, ORACLE_BIN_S, scenario.capacity, start_s, most=MOST_ENGINES, factor=factor
        )
        figures = scenario.run(SchedulePolicy(schedule=schedule), start_s, schedule[0][1])
        if figures.attainment >= DEFAULT_ATTAINMENT and figures.worst_window >= LEAST_SHARE:
            break
    return figures, factor


def find_static(scenario: Scenario) -> tuple[FleetFigures, int]:
    """Finds the fewest engines that hold 90 % in every window of the busiest two hours; figures are of these."""
    counts = count_arrivals(scenario.arrivals, WINDOW_S)
    busiest_s = WINDOW_S * max(range(len(counts)), key=counts.__getitem__)
    begin_s = max(busiest_s - STATIC_SLICE_S / 2, 0.0)
    part = [
        replace(arrival, at_s=arrival.at_s - begin_s)
        for arrival in scenario.arrivals
        if begin_s <= arrival.at_s < begin_s + STATIC_SLICE_S
    ]
    busy = replace(scenario, arrivals=part)
    number = scenario.capacity.count_engines(max(counts) / WINDOW_S, 1, MOST_ENGINES)
    while True:
        figures = busy.run(SchedulePolicy(schedule=[(0.0, number)]), 0.0, number)
        if figures.worst_window >= DEFAULT_ATTAINMENT or number == MOST_ENGINES:
            return figures, number
        number += 1


def list_hpas() -> list[tuple[str, HpaPolicy]]:
    """Lists HPAs over a grid of targets."""
    queues = [
        (f"hpa queue {target:g}", HpaPolicy(metric="queue", target=target, max_replicas=MOST_ENGINES))
        for target in QUEUES
    ]
    uses = [
        (f"hpa kv {target:.0%}", HpaPolicy(metric="kv", target=target, max_replicas=MOST_ENGINES)) for target in KV_USES
    ]
    return queues + uses


def measure(
    scenario: Scenario, policy: str, start_s: float, factors: Sequence[float]
) -> list[tuple[str, FleetFigures]]:
    """Measures a policy, or a grid of them."""
    if policy == "scaler":
        chosen = ScalerPolicy(
            capacity=scenario.capacity, start_s=start_s, ttft_slo_s=scenario.slo.ttft_s, max_replicas=MOST_ENGINES
        )
        return [("scaler", scenario.run(chosen, start_s, scenario.first))]
    if policy == "oracle":
        figures, factor = run_oracle(scenario, start_s, factors)
        return [(f"oracle x{factor:g}", figures)]
    if policy == "static":
        figures, number = find_static(scenario)
        return [(f"static {number}", figures)]
    return [(name, scenario.run(hpa, start_s, scenario.first)) for name, hpa in list_hpas()]


def main() -> None:
    """Runs what is asked for and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=("day", "step", "mooncake"), default="day")
    parser.add_argument("--strategy", choices=STRATEGIES, default="sluice")
    parser.add_argument("--start-s", type=float, nargs="+", default=[30.0, 120.0, 600.0])
    parser.add_argument("--policy", nargs="+", default=["oracle", "scaler", "hpa", "static"])
    parser.add_argument("--factors", type=float, nargs="+", default=ORACLE_FACTORS)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--day-seed", type=int, default=DAY.seed, help="of arrivals and lengths")
    parser.add_argument("--gives-up", action="store_true", help="end a run at its first window below 80 %%")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gc.set_threshold(GC_THRESHOLD)
    scenario = make_scenario(arguments.workload, arguments.strategy, arguments.hours, arguments.day_seed)
    scenario = replace(scenario, gives_up=arguments.gives_up)
    goodputs = ", ".join(f"{size}: {rps:.2f}/s" for size, rps in scenario.capacity.points)
    sys.stdout.write(f"{len(scenario.arrivals)} requests, digest {digest(scenario.arrivals)}; goodput of {goodputs}\n")
    found = []
    for start_s in arguments.start_s:
        for policy in arguments.policy:
            for name, figures in measure(scenario, policy, start_s, arguments.factors):
                found.append({"start_s": start_s, "policy": name, **asdict(figures)})
                sys.stdout.write(
                    f"{start_s:5.0f} s  {name:15} attainment {figures.attainment:6.1%}  worst window "
                    f"{figures.worst_window:6.1%}  below 80 %: {figures.bad_windows:3}  "
                    f"{figures.engine_hours:7.1f} engine hours in {figures.hours:.1f}, at most {figures.peak_engines}\n"
                )
                sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
