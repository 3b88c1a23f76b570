"""Sluice beside the best other strategy of each cell, on the same requests at the same rate, seed by seed.

    PYTHONPATH=build/compiled:. .venv/bin/python benchmarks/strategies/paired.py [--only CELL] [--seeds 1,2,3,4,5]
        [--factor F] [--scale S] [--set NAME=VALUE] [--results FILE]

``sluice bench strategies`` searches a goodput, which takes eight runs and more. Here a seed is one run of each: at the
goodput that the other has with seed 1 (``rivals.toml``), or ``--factor`` of it. Where Sluice meets the objectives of
more requests there, its goodput is the higher one. The longest wait for a first token is told, too, in TTFT objectives
of its request. What is in the file of results is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice_cli.simulation.plan_inputs import make_inputs
from sluice_cli.simulation.strategy_cells import load_cells
from sluice_cli.simulation.trace_cache import load_rows
from sluice_cli.simulation.worker_processes import WorkerPool
from sluice_core.planning.trials import build_cell
from sluice_core.sim.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FOLDER = Path(__file__).parent
OWN = "sluice"
LATE_OBJECTIVES = 4.0  # within which prompts are to be served that are late in any case
# Student's t for one side of 95 %, by the number of seeds.
_T95 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run to make.

    Args:
        cell: Its name.
        system: Strategy and engines, such as ``flowprefill 3x384,1x0``; without engines: the cell's, all alike.
        seed: Of requests and random choices.
        rate_rps: Requests per second.
        duration_s: Its length.
        changes: Parameters, as ``NAME=VALUE``.
    """

    cell: str
    system: str
    seed: int
    rate_rps: float
    duration_s: float
    changes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name in the file of results."""
        return json.dumps(asdict(self), sort_keys=True)


def simulate(run: Run) -> dict[str, float]:
    """Makes a run.

    Returns:
        Attainment, the longest wait for a first token in TTFT objectives, and the share of requests that waited for
        more than ``LATE_OBJECTIVES`` of them. Those without a first token count as having waited for ever.
    """
    (cell,) = load_cells(FOLDER / "drawn_cells.toml", [run.cell])
    flags = cell.change(run.changes).flags
    assert flags.replicas is not None
    strategy, _, engines = run.system.partition(" ")
    flags = replace(flags, strategies=(strategy,), engines=engines or f"{flags.replicas[1]}xmax")
    inputs = make_inputs(cell.manifest, flags, load_rows(cell.trace))
    assert inputs.in_force is not None
    arrivals = inputs.problem.make_workload(run.seed).make_arrivals(run.rate_rps, run.duration_s)
    simulation = Simulation(build_cell(inputs.problem, inputs.in_force, run.seed), arrivals)
    simulation.run()
    waits = [
        (request.first_token_s - request.arrival_s) / request.ttft_slo_s if request.first_token_s >= 0.0 else math.inf
        for request in simulation.requests
    ]
    return {
        "attainment": 1.0 - simulation.num_missed / simulation.num_arrived,
        "longest_wait": max(waits),
        "very_late": sum(wait > LATE_OBJECTIVES for wait in waits) / len(waits),
    }


def _prepare(_: object) -> Callable[[Run], dict[str, float]]:
    return simulate


def list_runs(arguments: argparse.Namespace, cell: str, rival: dict[str, Any], system: str) -> list[Run]:
    """Lists the runs of a system in a cell, one for each seed."""
    return [
        Run(
            cell=cell,
            system=system,
            seed=int(seed),
            rate_rps=rival["rate_rps"] * arguments.factor,
            duration_s=rival["duration_s"] * arguments.scale,
            changes=tuple(arguments.set),
        )
        for seed in arguments.seeds.split(",")
    ]


def make_runs(runs: Sequence[Run], num_processes: int, path: Path) -> dict[str, dict[str, float]]:
    """Makes the runs that a file of results lacks, and writes them to it; returns all that is in it, by key."""
    found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    missing = [run for run in runs if run.key not in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    with WorkerPool(_prepare, None, num_processes) as pool:
        for number, (run, result) in enumerate(zip(missing, pool.map(missing), strict=True), 1):
            found[run.key] = result
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{run.cell}, {run.system}, seed {run.seed} ({number} of {len(missing)}): {result}", flush=True)
    return found


def format_row(
    cell: str, rival: str, rate_rps: float, own: list[dict[str, float]], other: list[dict[str, float]]
) -> str:
    """Makes a row of the table, in per cent; the bound is the upper one of 95 % of the mean difference."""
    gains = [100 * (mine["attainment"] - others["attainment"]) for mine, others in zip(own, other, strict=True)]
    mean = statistics.fmean(gains)
    bound = mean + _T95[len(gains)] * statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    columns = [
        cell,
        rival,
        f"{rate_rps:.2f}",
        ", ".join(f"{100 * found['attainment']:.1f}" for found in other),
        ", ".join(f"{100 * found['attainment']:.1f}" for found in own),
        f"{mean:+.1f} (at most {bound:+.1f})",
        f"{max(found['longest_wait'] for found in other):.1f}, {max(found['longest_wait'] for found in own):.1f}",
        ", ".join(f"{100 * statistics.fmean(found['very_late'] for found in runs):.1f}" for runs in (other, own)),
    ]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    """Makes the runs that are missing, and prints a row for each cell that has all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="this cell; may be repeated")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="such as 1,2,3")
    parser.add_argument("--factor", type=float, default=1.0, help="of the other's goodput")
    parser.add_argument("--scale", type=float, default=1.0, help="scales the length of the runs")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of both")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--results", type=Path, default=Path(".sluice/bench/paired.json"))
    arguments = parser.parse_args()
    table = tomllib.loads((FOLDER / "rivals.toml").read_text())
    pairs = {
        cell: [list_runs(arguments, cell, table[cell], system) for system in (table[cell]["rival"], OWN)]
        for cell in arguments.only or table
    }
    everything = [run for pair in pairs.values() for runs in pair for run in runs]
    found = make_runs(everything, arguments.jobs, arguments.results)
    print("| cell | other | requests/s | its attainment | Sluice's | gain | longest wait | over four objectives |")
    print("|---|---|---|---|---|---|---|---|")
    for cell, pair in pairs.items():
        other, own = ([found[run.key] for run in runs] for runs in pair)
        print(format_row(cell, table[cell]["rival"], pair[0][0].rate_rps, own, other))


if __name__ == "__main__":
    main()
