"""Compares strategies on cells, each tuned by the planner; goes on where an earlier run was stopped.

The planner tunes a strategy on a seed of its own. Then its goodput is searched on paired seeds: all strategies serve
the same requests, for the same time. A file takes every strategy's figures as soon as they are known.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sluice_cli.simulation.comparison_file import CellFigures, ComparisonFile, ComparisonSettings, StrategyFigures
from sluice_cli.simulation.plan_inputs import make_inputs
from sluice_cli.simulation.trace_cache import load_rows
from sluice_cli.simulation.trial_pool import TrialPool
from sluice_cli.simulation.worker_processes import start_workers
from sluice_core.planning.planner import Planner
from sluice_core.planning.slider_search import SearchEffort
from sluice_core.planning.trials import build_cell
from sluice_core.sim.goodput_search import NoGoodputError, search_goodput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_cli.simulation.plan_inputs import PlanInputs
    from sluice_cli.simulation.strategy_cells import StrategyCell
    from sluice_core.planning.slider_candidates import SliderCandidate
    from sluice_core.planning.trials import PlanningProblem

TUNING_SEED = 1000  # none of those that measure
NUM_REQUESTS = 1500  # of a run, at the goodput that the planner expects of the first strategy
LEAST_S, MOST_S = 30.0, 400.0  # of a run


def compare_strategies(
    cells: Sequence[StrategyCell],
    settings: ComparisonSettings,
    file: ComparisonFile,
    report: Callable[[float, str], None],
    note: Callable[[str], None],
) -> list[CellFigures]:
    """Measures what is missing.

    Args:
        cells: The cells.
        settings: How much is simulated.
        file: Keeps the figures.
        report: Takes the share done and what is being done.
        note: Takes what was measured, strategy by strategy.

    Raises:
        ValueError: A cell is wrong.
    """
    every = [file.load(cell) for cell in cells]
    missing = [(figures, name) for figures in every for name in settings.strategies if name not in figures.strategies]
    for num_done, (figures, name) in enumerate(missing):
        what = f"{figures.cell.name}, {name}"

        def report_part(share: float, stage: str, what: str = what, num_done: int = num_done) -> None:
            report((num_done + share) / len(missing), f"{what}: {stage}")

        _measure_strategy(figures, name, settings, report_part)
        file.store(figures)
        mean_rps = statistics.fmean(figures.strategies[name].goodputs_rps)
        note(f"{what}: {mean_rps:.2f} requests/s ({num_done + 1} of {len(missing)})")
    return every


def _measure_strategy(
    figures: CellFigures, name: str, settings: ComparisonSettings, report: Callable[[float, str], None]
) -> None:
    """Tunes a strategy and measures its goodput."""
    cell = figures.cell
    rows = load_rows(cell.trace, reads_hashes=cell.flags.prefix_reuse is not None)
    inputs = make_inputs(cell.manifest, replace(cell.flags, strategies=(name,)), rows)
    tuned = _tune(inputs, settings, lambda share, stage: report(0.5 * share, stage))
    if tuned is None:
        figures.strategies[name] = StrategyFigures(sliders=None, goodputs_rps=(0.0,) * len(settings.seeds))
        return
    candidate, expected_rps = tuned
    if figures.duration_s is None:
        # All strategies serve the same requests: the first one that is tuned says for how long.
        figures.duration_s = min(MOST_S, max(LEAST_S, NUM_REQUESTS / expected_rps)) * settings.scale
    report(0.5, "goodput")
    search = partial(
        find_goodput_rps,
        inputs.problem,
        candidate,
        duration_s=figures.duration_s,
        start_rps=expected_rps,
        target=inputs.goal.target,
    )
    pool = start_workers(min(settings.num_processes, len(settings.seeds)))
    if pool is None:
        goodputs_rps = [search(seed) for seed in settings.seeds]
    else:
        with pool:
            goodputs_rps = list(pool.map(search, settings.seeds))
    figures.strategies[name] = StrategyFigures(sliders=candidate, goodputs_rps=tuple(goodputs_rps))


def _tune(
    inputs: PlanInputs, settings: ComparisonSettings, report: Callable[[float, str], None]
) -> tuple[SliderCandidate, float] | None:
    """Chooses a strategy's sliders; returns them and their expected goodput, or None: no rate meets the objectives."""
    effort = SearchEffort(
        seeds=(TUNING_SEED,),
        num_requests=int(NUM_REQUESTS * settings.scale),
        least_duration_s=LEAST_S * settings.scale,
    )
    with TrialPool(inputs.problem, settings.num_processes) as pool:
        try:
            plan = Planner(inputs.problem, inputs.space, effort, pool.run, report).plan(inputs.goal)
        except ValueError:
            return None
    return plan.chosen, plan.goodput_rps.mean


def find_goodput_rps(
    problem: PlanningProblem,
    candidate: SliderCandidate,
    seed: int,
    *,
    duration_s: float,
    start_rps: float,
    target: float,
) -> float:
    """Searches the goodput of a seed, in requests/s; 0 where no rate passes."""
    workload = problem.make_workload(seed)
    try:
        found = search_goodput(
            build_cell(problem, candidate, seed), workload, duration_s=duration_s, start_rps=start_rps, target=target
        )
    except NoGoodputError:
        return 0.0
    return found.rate_rps
