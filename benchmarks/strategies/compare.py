"""Every strategy on every drawn cell, each tuned by the planner: one table and one heat map.

    PYTHONPATH=build/compiled:. .venv/bin/python benchmarks/strategies/compare.py --json FILE
        [--only CELL] [--strategy NAME] [--most-engines N] [--seeds N] [--scale X] [--plot FILE.svg]

The planner tunes each strategy for a cell with one router that sees loads as they are, on seeds of its own. Sluice has
one set of defaults. Then goodput is searched on paired seeds, with the cell's routers; of four, each sees loads 50 ms
late. Nobody is rejected, and no policy sees output lengths. FILE is written after each strategy of each cell: a run
that was stopped goes on where it was. Objectives are ``cells.toml``'s by trace, for a 14B model on A100s. For others
TTFT scales by the time of a prefill iteration, TPOT by that of a decode iteration; ``tight`` is 0.7 of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice_cli.simulation.trace_files import load_rows
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.planning.candidates import SearchSpace, SliderCandidate, list_chunk_sizes
from sluice_core.planning.planner import Goal, Planner
from sluice_core.planning.search import SearchEffort
from sluice_core.planning.trials import PlanningProblem, TrialEvaluator, build_cell
from sluice_core.records import EngineId, IterationShape, Role, Slo
from sluice_core.sim.cell import BLOCK_SIZE_TOKENS, MAX_BATCH_TOKENS, EngineSetup, RouterSetup, SimOptions
from sluice_core.sim.goodput import NoGoodputError, search_goodput
from sluice_core.sim.workload import PoissonWorkload
from sluice_core.strategies import STRATEGIES, get_strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sluice_core.latency import ModelOnGpu

FOLDER = Path(__file__).parent
TRACES = FOLDER.parent / "traces"
REPORT_S = 0.05  # age of the reports, of several routers
TUNING_SEED = 1000
NUM_REQUESTS = 1500  # of a run at the first goodput that the planner found
LEAST_S, MOST_S = 30.0, 400.0
TIGHT = 0.7
REFERENCE = ("qwen2.5-14b", "a100-80g", 1)
SLOS = {  # TTFT, TPOT in seconds on the reference
    "arxiv_16k_recon": (4.0, 0.070),
    "sharegpt_dist": (3.0, 0.110),
    "sharegpt_2k": (3.0, 0.110),
    "sharegpt_turn1_synth": (3.0, 0.110),
    "azure2023_code": (2.0, 0.100),
    "azure2023_conv": (2.0, 0.100),
    "qwentrace_synth": (3.0, 0.100),  # rows have TTFT objectives of their own
    "bwb": (3.0, 0.070),
}
_PREFILL = IterationShape(prefill_tokens=2048, num_chunks=1, attention_work=2048 * 1024.0)
_DECODE = IterationShape(num_decodes=64, decode_context_tokens=64_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCell:
    """A row of ``drawn_cells.toml``; see ``draw_cells``."""

    model: str
    gpu: str
    trace: str
    engines: int
    routers: int
    slo: str

    @property
    def tensor_parallel(self) -> int:
        """GPUs of an engine."""
        return 2 if self.model == "qwen2.5-32b" else 1


def compute_slo(cell: DrawnCell, target: ModelOnGpu) -> Slo:
    """Computes a cell's objectives."""
    reference = load_model_on_gpu(*REFERENCE).profile
    tightness = TIGHT if cell.slo == "tight" else 1.0
    ttft_s, tpot_s = SLOS[cell.trace]
    prefill = target.profile.estimate_shape_s(_PREFILL) / reference.estimate_shape_s(_PREFILL)
    decode = target.profile.estimate_shape_s(_DECODE) / reference.estimate_shape_s(_DECODE)
    return Slo(ttft_s=round(tightness * prefill * ttft_s, 2), tpot_s=round(tightness * decode * tpot_s, 3))


def make_problem(cell: DrawnCell) -> PlanningProblem:
    """Makes what is planned for."""
    target = load_model_on_gpu(cell.model, cell.gpu, cell.tensor_parallel)
    engine = EngineSetup(
        engine_id=EngineId("engine"),
        profile=target.profile,
        role=Role.PREFILL_HEAVY,
        chunk_size_tokens=MAX_BATCH_TOKENS,
        kv_blocks_total=target.kv_capacity_tokens // BLOCK_SIZE_TOKENS,
        kv_bytes_per_token=target.kv_bytes_per_token,
    )
    return PlanningProblem(
        rows=load_rows(TRACES / f"{cell.trace}.csv.gz"),
        slo=compute_slo(cell, target),
        engines={cell.tensor_parallel: engine},
        strategies={name: get_strategy(name) for name in STRATEGIES},
    )


def tune(problem: PlanningProblem, cell: DrawnCell, name: str, scale: float) -> tuple[SliderCandidate, float] | None:
    """Chooses a strategy's sliders.

    Returns:
        They and the goodput that the planner expects; None: no rate meets the objectives.
    """
    space = SearchSpace(
        strategies=(name,),
        prefill_heavy_tokens=list_chunk_sizes(64, MAX_BATCH_TOKENS),
        decode_heavy_tokens=list_chunk_sizes(0, MAX_BATCH_TOKENS),
        max_batch_tokens=MAX_BATCH_TOKENS,
    )
    if name == "sluice":  # one set of defaults
        space = replace(space, watermarks=(0.95,), approaching_factors=(0.96,))
    effort = SearchEffort(
        seeds=(TUNING_SEED,), num_requests=int(NUM_REQUESTS * scale), least_duration_s=LEAST_S * scale
    )
    evaluator = TrialEvaluator(problem)
    planner = Planner(problem, space, effort, lambda trials: [evaluator.evaluate(trial) for trial in trials])
    goal = Goal(target=0.9, most_replicas=cell.engines, tensor_parallels=(cell.tensor_parallel,))
    try:
        plan = planner.plan(goal)
    except ValueError:
        return None
    return plan.chosen, plan.goodput_rps.mean


def measure(
    problem: PlanningProblem,
    cell: DrawnCell,
    tuned: tuple[SliderCandidate, float],
    seeds: Sequence[int],
    duration_s: float,
) -> list[float]:
    """Measures the goodput of each seed, in requests/s; 0 where no rate passes."""
    candidate, expected_rps = tuned
    found = []
    for seed in seeds:
        simulated = replace(
            build_cell(problem, candidate, seed),
            routers=(RouterSetup(),) * cell.routers,
            options=SimOptions(report_s=REPORT_S if cell.routers > 1 else 0.0),
        )
        workload = PoissonWorkload(problem.rows, problem.slo, seed)
        try:
            run = search_goodput(simulated, workload, duration_s=duration_s, start_rps=expected_rps)
        except NoGoodputError:
            found.append(0.0)
        else:
            found.append(run.rate_rps)
    return found


def compare_cell(
    cell: DrawnCell, names: Sequence[str], seeds: Sequence[int], scale: float, done: dict[str, Any]
) -> None:
    """Measures the strategies of a cell that are not done yet, and notes them in ``done``."""
    problem = make_problem(cell)
    done["slo"] = [problem.slo.ttft_s, problem.slo.tpot_s]
    for name in names:
        if name in done["strategies"]:
            continue
        tuned = tune(problem, cell, name, scale)
        if tuned is None:
            done["strategies"][name] = {"sliders": "", "goodput_rps": [0.0] * len(seeds)}
            continue
        # All strategies serve the same requests: the first one that is tuned says for how long.
        length_s = min(MOST_S, max(LEAST_S, NUM_REQUESTS / tuned[1])) * scale
        duration_s = done.setdefault("duration_s", length_s)
        rates = measure(problem, cell, tuned, seeds, duration_s)
        done["strategies"][name] = {"sliders": describe(tuned[0]), "goodput_rps": rates}
        return  # so that the caller can write what there is


def describe(candidate: SliderCandidate) -> str:
    """Describes sliders, as ``--engines`` of ``sluice simulate`` takes them."""
    groups = [f"{candidate.num_prefill_heavy}x{candidate.prefill_heavy_tokens}"]
    if candidate.num_decode_heavy:
        groups.append(f"{candidate.num_decode_heavy}x{candidate.decode_heavy_tokens}")
    return ",".join(groups)


def compute_ratios(strategies: Mapping[str, Any]) -> dict[str, float]:
    """Computes each strategy's mean goodput over that of the cell's best."""
    means = {name: statistics.fmean(found["goodput_rps"]) for name, found in strategies.items()}
    best = max(means.values(), default=0.0)
    return {name: mean / best if best else 0.0 for name, mean in means.items()}


def format_table(figures: Mapping[str, Any], cells: Mapping[str, DrawnCell], names: Sequence[str]) -> str:
    """Formats the table of docs/measurements: goodput of each strategy over the best one's."""
    lines = [
        f"| cell | what | best, requests/s | {' | '.join(names)} |",
        f"|---|---|---|{'---|' * len(names)}",
    ]
    for number, found in figures.items():
        cell, ratios = cells[number], compute_ratios(found["strategies"])
        means = [statistics.fmean(each["goodput_rps"]) for each in found["strategies"].values()]
        what = f"{cell.model}, {cell.gpu}, {cell.trace}, {cell.engines} engines, {cell.routers} routers, {cell.slo}"
        values = [f"{ratios[name]:.2f}" if name in ratios else "" for name in names]
        lines.append(f"| {number} | {what} | {max(means, default=0.0):.2f} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def summarize(figures: Mapping[str, Any]) -> dict[str, float]:
    """Summarizes Sluice's goodput over that of the best other strategy, in cells with both."""
    ratios = []
    for found in figures.values():
        means = {name: statistics.fmean(each["goodput_rps"]) for name, each in found["strategies"].items()}
        own, others = means.pop("sluice", 0.0), list(means.values())
        if own and any(others):
            ratios.append(own / max(others))
    return {"geometric_mean": statistics.geometric_mean(ratios), "least": min(ratios)} if ratios else {}


def draw_heat_map(figures: Mapping[str, Any], names: Sequence[str], path: Path) -> None:
    """Draws the table."""
    from matplotlib import rc_context  # noqa: PLC0415 - only plots need it
    from matplotlib.figure import Figure  # noqa: PLC0415

    ratios = [compute_ratios(found["strategies"]) for found in figures.values()]
    values = [[each.get(name, float("nan")) for name in names] for each in ratios]
    with rc_context({"svg.hashsalt": "sluice", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(1.6 + 0.9 * len(names), 1.0 + 0.3 * len(values)), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(values, vmin=0.5, vmax=1.0, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(names)), names, rotation=30)
        axes.set_yticks(range(len(values)), list(figures))
        for row, each in enumerate(values):
            for column, value in enumerate(each):
                colour = "black" if value > 0.8 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
        axes.set_title("goodput over that of the cell's best strategy", fontsize=9, loc="left")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def load_cells() -> dict[str, DrawnCell]:
    """Loads the drawn cells, by name."""
    table = tomllib.loads((FOLDER / "drawn_cells.toml").read_text())["cells"]
    return {name: DrawnCell(**values) for name, values in table.items()}


def main() -> None:
    """Measures what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="a cell")
    parser.add_argument("--strategy", action="append", default=[])
    parser.add_argument("--most-engines", type=int, default=64, help="leave larger cells out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the runs' lengths")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="figures; a file that is there is gone on with")
    arguments = parser.parse_args()
    cells, names = load_cells(), arguments.strategy or list(STRATEGIES)
    settings = {"seeds": arguments.seeds, "scale": arguments.scale}
    report: dict[str, Any] = {"settings": settings, "cells": {}}
    if arguments.json.exists():
        report = json.loads(arguments.json.read_text())
        if report["settings"] != settings:
            sys.exit(f"{arguments.json} was measured with {report['settings']}; name another file")
    for name in arguments.only or cells:
        if cells[name].engines > arguments.most_engines:
            continue
        done = report["cells"].setdefault(name, {"strategies": {}})
        while not set(names) <= set(done["strategies"]):
            compare_cell(cells[name], names, range(1, arguments.seeds + 1), arguments.scale, done)
            report["summary"] = summarize(report["cells"])
            arguments.json.write_text(json.dumps(report, indent=1))
            sys.stderr.write(f"{name}: {len(done['strategies'])} of {len(names)} strategies\n")
    sys.stdout.write(format_table(report["cells"], cells, names))
    sys.stdout.write(f"Sluice over the best of the others: {report.get('summary')}\n")
    if arguments.plot:
        draw_heat_map(report["cells"], names, arguments.plot)


if __name__ == "__main__":
    main()
