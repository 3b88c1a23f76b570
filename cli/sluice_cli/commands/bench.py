"""``sluice bench``: comparisons that take minutes to hours, and go on where they were stopped."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sluice_cli.commands.output_options import json_option
from sluice_cli.commands.simulation_options import (
    POSITIVE,
    gpu_option,
    jobs_option,
    manifest_argument,
    model_option,
    parse_bounds,
    parse_seeds,
    parse_strategies,
    parse_tensor_parallels,
    target_option,
    tpot_option,
    ttft_option,
)
from sluice_cli.errors import as_command_error
from sluice_cli.output.bench_table import make_comparison_report, make_markdown, make_strategy_table
from sluice_cli.output.console import make_console
from sluice_cli.output.progress import show_progress
from sluice_cli.simulation.comparison_file import ComparisonFile, ComparisonSettings
from sluice_cli.simulation.plan_inputs import PlanFlags
from sluice_cli.simulation.strategy_cells import StrategyCell, load_cells, make_own_cell
from sluice_cli.simulation.strategy_comparison import compare_strategies
from sluice_core.strategies import STRATEGIES
from sluice_operator.api.manifest import parse_manifest, read_manifest_text

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def bench() -> None:
    """Compares strategies in the simulator, on your requests or on pinned ones."""


@bench.command()
@manifest_argument
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Your own requests.")
@model_option
@gpu_option
@click.option(
    "--tensor-parallel", "tensor_parallels", callback=parse_tensor_parallels, metavar="N", help="GPUs per engine."
)
@click.option("--replicas", callback=parse_bounds, metavar="N", help="Engines.")
@ttft_option
@tpot_option
@target_option
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of all strategies, as for simulate; after what a cell sets.",
)
@click.option(
    "--cells",
    type=_FILE,
    default=Path("benchmarks/strategies/drawn_cells.toml"),
    show_default=True,
    help="Pinned cells, without --trace.",
)
@click.option("--only", multiple=True, metavar="CELL", help="A cell of them; may be given several times.")
@click.option(
    "--strategy",
    "strategies",
    callback=parse_strategies,
    metavar="NAME[,NAME]",
    help="Strategies to compare.  [default: all]",
)
@click.option("--seeds", default="1,2,3,4,5", show_default=True, callback=parse_seeds, help="Of the goodputs.")
@click.option("--scale", default=1.0, show_default=True, type=POSITIVE, help="Scales the length of the runs.")
@jobs_option
@click.option(
    "--results",
    type=_FILE,
    default=Path(".sluice/bench/strategies.json"),
    show_default=True,
    help="Keeps every figure; what is in it is not measured again.",
)
@click.option("--table", type=_FILE, help="Write the table as Markdown.")
@click.option("--heat-map", type=_FILE, help="Draw the table, as SVG.")
@json_option
def strategies(
    manifest: Path | None,
    *,
    trace: Path | None,
    cells: Path,
    only: tuple[str, ...],
    strategies: tuple[str, ...] | None,
    seeds: tuple[int, ...],
    scale: float,
    jobs: int,
    results: Path,
    table: Path | None,
    heat_map: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Finds which strategy serves most: tunes each as `sluice plan` does, then measures goodput on paired seeds.

    With --trace it compares them on your own requests: on the cluster of MANIFEST, or of flags. Without it, on pinned
    cells. A run that was stopped goes on where it was.
    """
    settings = ComparisonSettings(
        strategies=strategies or tuple(STRATEGIES), seeds=seeds, scale=scale, num_processes=jobs
    )
    with as_command_error(ValueError):
        chosen = _choose_cells(manifest, trace, cells, only, PlanFlags(**flags))
        file = ComparisonFile(results, settings)
        with show_progress("comparing") as report:
            figures = compare_strategies(chosen, settings, file, report, _note)
    if table is not None:
        table.write_text(make_markdown(figures, settings.strategies))
    if heat_map is not None:
        # Only pictures need the plotting library, whose import takes a second.
        from sluice_cli.output.strategy_heat_map import draw_heat_map  # noqa: PLC0415

        heat_map.write_text(draw_heat_map(figures, settings.strategies))
    if as_json:
        click.echo(json.dumps(make_comparison_report(figures, settings.strategies), indent=2))
    else:
        make_console().print(make_strategy_table(figures, settings.strategies))


def _note(measured: str) -> None:
    """Writes a line where nobody sees the bar."""
    if not sys.stderr.isatty():
        click.echo(measured, err=True)


def _choose_cells(
    manifest: Path | None, trace: Path | None, cells: Path, only: tuple[str, ...], flags: PlanFlags
) -> list[StrategyCell]:
    """Chooses the cells: the user's own, or pinned ones."""
    if trace is None:
        if manifest is not None or replace(flags, changes=()) != PlanFlags():
            raise click.UsageError("a manifest, objectives and engines need --trace: cells have their own")
        return [cell.change(flags.changes) for cell in load_cells(cells, only)]
    if only:
        raise click.UsageError("--only chooses among pinned cells; --trace has no others")
    cluster = None if manifest is None else parse_manifest(read_manifest_text(manifest))
    return [make_own_cell(trace, flags, cluster)]
