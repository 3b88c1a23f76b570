"""DynaServe's experiments in the simulator, beside what the paper states and the band of a reproduction.

python -m benchmarks.papers.dynaserve [--only table1 figure5 figure9] [--seeds N] [--duration S]

Lengths are known to the router here, as the paper's predictor is within 100 tokens for 95 % of its requests.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, MoveCause, Role, Slo
from sluice_core.sim.sim_setup import Arrival, Cell, EngineSetup, LengthsKnown, NoGrant, SimOptions
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.traces import parse_trace
from sluice_core.strategies import get_strategy
from sluice_core.strategies.dynaserve import DynaServeRules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_core.strategies import Strategy

TRACES = Path(__file__).parents[1] / "traces"
TBT_SLO_S = 0.1
NO_TTFT = 1e9
LONGEST_TTFT_S = 5.0  # median of the last fifth of a run that sustains its rate
SHAPES = {(8192, 32): 200, (2048, 512): 1500, (219, 1467): 1200}
# Completions/s of disaggregation over colocation (Table 1); None: no band is given.
TABLE_1 = {
    (8192, 32): (0.83 / 1.49, (0.50, 0.58)),
    (2048, 512): (2.56 / 2.83, (0.75, 0.87)),
    (219, 1467): (1.68 / 2.86, None),
}
SPLITS = (1024, 1127, 1229, 1331, 1434, 1536, 1741)
FIGURE_9 = {"azure2023_code": 4.0, "arxiv_4k": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Two engines under a strategy."""

    strategy: Strategy
    chunks: tuple[int, int]
    roles: tuple[Role, Role] = (Role.PREFILL_HEAVY, Role.PREFILL_HEAVY)
    waits: bool = False

    def make_cell(self, model: str, tensor_parallel: int) -> Cell:
        """Make the cell of a model on A100s."""
        target = load_model_on_gpu(model, "a100-80g", tensor_parallel)
        engines = [
            EngineSetup(
                engine_id=EngineId(f"e{number}"),
                profile=target.profile,
                role=role,
                chunk_size_tokens=chunk,
                kv_blocks_total=target.kv_capacity_tokens // 16,
                kv_bytes_per_token=target.kv_bytes_per_token,
            )
            for number, (chunk, role) in enumerate(zip(self.chunks, self.roles, strict=True))
        ]
        no_grant = NoGrant.WAIT if self.waits else NoGrant.IN_PLACE
        options = SimOptions(output_lengths=LengthsKnown.EXACT, no_grant=no_grant)
        return Cell(engines=engines, strategy=self.strategy, options=options)


def make_dynaserve(**rules: bool | int) -> System:
    """Make DynaServe with rules other than the product's: without others, answers alone are cut."""
    return System(
        strategy=replace(get_strategy("dynaserve"), policies=DynaServeRules(**{"cuts_prompts": False} | rules)),  # type: ignore[arg-type]
        chunks=(16_384, 16_384),
    )


def make_colocated(chunk: int) -> System:
    """Make colocation: round robin, chunked prefill."""
    return System(strategy=get_strategy("aggregated").vary(placement="round_robin"), chunks=(chunk, chunk))


DISAGGREGATED = System(
    strategy=get_strategy("disaggregated").vary(placement="round_robin"),
    chunks=(16_384, 0),
    roles=(Role.PREFILL_HEAVY, Role.DECODE_HEAVY),
    waits=True,
)


def measure_saturated(cell: Cell, shape: tuple[int, int], number: int) -> tuple[float, Simulation]:
    """Run requests that all come at 0 s; returns completions/s between the 20th and the 80th percentile."""
    slo = Slo(ttft_s=NO_TTFT, tpot_s=TBT_SLO_S)
    arrivals = [Arrival(at_s=0.0, prompt_tokens=shape[0], output_tokens=shape[1], slo=slo) for _ in range(number)]
    simulation = Simulation(cell, arrivals)
    simulation.run()
    ends_s = sorted(request.last_token_s for request in simulation.requests)
    first, last = int(0.2 * number), int(0.8 * number)
    return (last - first) / (ends_s[last] - ends_s[first]), simulation


def write_table1() -> None:
    """Table 1: two 14B engines, saturated, and DynaServe on the same requests."""
    systems = {
        "disaggregated 1P1D": DISAGGREGATED,
        "colocated 2048": make_colocated(2048),
        "DynaServe, answers cut": make_dynaserve(),
        "DynaServe, prompts cut too": make_dynaserve(cuts_prompts=True),
    }
    print("| prompt, output | system | requests/s | p50 TBT | p99 TBT | moves |\n|---|---|---|---|---|---|")
    for shape, number in SHAPES.items():
        rates = {}
        for name, system in systems.items():
            rates[name], run = measure_saturated(system.make_cell("qwen2.5-14b", 1), shape, number)
            p50_s, p99_s = (run.gaps.compute_percentile_s(share) or 0.0 for share in (0.5, 0.99))
            print(
                f"| {shape[0]}, {shape[1]} | {name} | {rates[name]:.2f} | {p50_s * 1e3:.0f} ms | {p99_s * 1e3:.0f} ms "
                f"| {run.num_moves[MoveCause.SPLIT]} |",
                flush=True,
            )
        paper, band = TABLE_1[shape]
        ours = rates["disaggregated 1P1D"] / rates["colocated 2048"]
        label = f"disaggregated over colocated (paper {paper:.2f}, band {band})"
        print(f"| {shape[0]}, {shape[1]} | {label} | {ours:.2f} | | | |")


def write_figure5() -> None:
    """Figure 5: where one cut serves most; 32B, prompts and outputs of 1024 tokens."""
    print("| cut at | of the output | requests/s | over the cut at 1024 |\n|---|---|---|---|")
    first_rps = 0.0
    for token in SPLITS:
        system = make_dynaserve(fixed_token=token, is_bound_to_sides=True)
        rate_rps, _ = measure_saturated(system.make_cell("qwen2.5-32b", 2), (1024, 1024), 1200)
        first_rps = first_rps or rate_rps
        print(f"| {token} | {(token - 1024) / 1024:.2f} | {rate_rps:.2f} | {rate_rps / first_rps:.2f} |", flush=True)


def find_capacity(system: System, trace: str, start_rps: float, *, seed: int, duration_s: float) -> float:
    """Find the highest rate at which the 99th percentile of TBT is within 100 ms, to 3 %."""
    with gzip.open(TRACES / f"{trace}.csv.gz", "rt") as lines:
        rows = parse_trace(lines, skips_unanswered=True)

    def is_met(rate_rps: float) -> bool:
        rng = random.Random(seed)
        lengths = rng.sample(rows, len(rows))
        at_s, arrivals = 0.0, []
        slo = Slo(ttft_s=NO_TTFT, tpot_s=TBT_SLO_S)
        for index in range(int(rate_rps * duration_s)):
            row = lengths[index % len(lengths)]
            at_s += rng.expovariate(1.0) / rate_rps
            arrivals.append(
                Arrival(at_s=at_s, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens, slo=slo)
            )
        run = Simulation(system.make_cell("qwen2.5-14b", 1), arrivals)
        run.run()
        # A rate is sustained when those that come last wait no longer for their first token than a queue explains.
        ttft_s = sorted(request.ttft_s for request in run.requests[-max(1, len(arrivals) // 5) :])
        return (
            ttft_s[len(ttft_s) // 2] < LONGEST_TTFT_S
            and (run.gaps.compute_percentile_s(0.99) or 0.0) <= TBT_SLO_S * 1.005
        )

    low, high = 0.0, start_rps
    while is_met(high):
        low, high = high, 1.6 * high
    while high - low > 0.03 * high and high > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def write_figure9(num_seeds: int, duration_s: float) -> None:
    """Figure 9: serving capacity on two of its four workloads."""
    systems = {
        "colocated 2048": make_colocated(2048),
        "colocated 1024": make_colocated(1024),
        "colocated 512": make_colocated(512),
        "disaggregated 1P1D": DISAGGREGATED,
        "DynaServe, answers cut": make_dynaserve(),
        "DynaServe, prompts cut too": make_dynaserve(cuts_prompts=True),
    }
    print("| trace | system | requests/s |\n|---|---|---|")
    for trace, start_rps in FIGURE_9.items():
        for name, system in systems.items():
            found = [
                find_capacity(system, trace, start_rps, seed=seed, duration_s=duration_s)
                for seed in range(1, num_seeds + 1)
            ]
            print(f"| {trace} | {name} | {sum(found) / len(found):.2f} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("table1", "figure5", "figure9"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=300.0, metavar="S")
    options = parser.parse_args(arguments)
    parts: dict[str, Callable[[], None]] = {
        "table1": write_table1,
        "figure5": write_figure5,
        "figure9": lambda: write_figure9(options.seeds, options.duration),
    }
    for name in options.only or parts:
        print(f"\n{parts[name].__doc__ or 'Figure 9: serving capacity on two of its four workloads.'}\n")
        parts[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
