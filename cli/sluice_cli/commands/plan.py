"""``sluice plan``: from a trace and two objectives to sliders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sluice_cli.commands.simulate import parse_seeds
from sluice_cli.output.cluster_display import make_console
from sluice_cli.output.plan_html import choose_shown, make_page
from sluice_cli.output.plan_report import make_plan_report, make_plan_summary
from sluice_cli.simulation.cell_settings import read_trace
from sluice_cli.simulation.plan_inputs import Flags, make_inputs, parse_range
from sluice_cli.simulation.trial_pool import TrialPool
from sluice_core.planning.candidates import PrefillHeavyBounds
from sluice_core.planning.planner import Planner
from sluice_core.planning.prediction import measure_curves
from sluice_core.planning.search import SearchEffort
from sluice_core.strategies import get_strategy
from sluice_operator.api.manifest import ManifestError, parse_manifest

if TYPE_CHECKING:
    from sluice_cli.simulation.plan_inputs import PlanInputs
    from sluice_core.planning.planner import PlanResult


def _parse_counts(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    found = _parse_share(_context, _parameter, value)
    if found is None:
        return None
    if found.is_percent:
        raise click.BadParameter(f"{value!r} is in percent; numbers are needed")
    return found.low, found.high


def _parse_share(_context: click.Context, _parameter: click.Parameter, value: str | None) -> PrefillHeavyBounds | None:
    if value is None:
        return None
    try:
        low, high, is_percent = parse_range(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return PrefillHeavyBounds(low=low, high=high, is_percent=is_percent)


def _parse_strategies(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    if value is None:
        return None
    try:
        return tuple(dict.fromkeys(get_strategy(name.strip()).name for name in value.split(",")))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _parse_parallels(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    parts = value.split(",")
    if not all(part.isdigit() and 1 <= int(part) <= 64 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of numbers of GPUs such as 1,2")
    return tuple(dict.fromkeys(int(part) for part in parts))


_POSITIVE = click.FloatRange(min=0, min_open=True)
_RANGE_HELP = "LOW-HIGH"


@click.command()
@click.argument("manifest", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--trace", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Requests.")
@click.option("--rate", "rate_rps", type=_POSITIVE, help="Find the fewest GPUs for so many requests per second.")
@click.option("--model", help="Model by name, or the path of its config.json.")
@click.option("--gpu", help="GPU by name.")
@click.option("--ttft-ms", type=_POSITIVE, help="TTFT objective.")
@click.option("--tpot-ms", type=_POSITIVE, help="TPOT objective.")
@click.option("--target", type=click.FloatRange(0.01, 1), help="Attainment.  [default: the manifest's, or 0.9]")
@click.option("--replicas", callback=_parse_counts, metavar="N|LOW-HIGH", help="Engines; with --rate at most so many.")
@click.option(
    "--tensor-parallel",
    "tensor_parallels",
    callback=_parse_parallels,
    metavar="N[,N]",
    help="GPUs per engine to choose from.",
)
@click.option(
    "--strategy",
    "strategies",
    callback=_parse_strategies,
    metavar="NAME[,NAME]",
    help="Strategies to choose from.  [default: all]",
)
@click.option("--engines", metavar="NxCHUNK[,NxCHUNK]", help="Engines in force, as for simulate.")
@click.option(
    "--prefill-heavy", callback=_parse_share, metavar=_RANGE_HELP, help="Bounds of P-heavy engines: 1-3, or 25%-75%."
)
@click.option(
    "--prefill-chunk", "prefill_chunks", callback=_parse_counts, metavar=_RANGE_HELP, help="Bounds of their chunk size."
)
@click.option(
    "--decode-chunk",
    "decode_chunks",
    callback=_parse_counts,
    metavar=_RANGE_HELP,
    help="Bounds of the others' chunk size.",
)
@click.option(
    "--duration-s",
    type=_POSITIVE,
    help="Length of whole runs.  [default: as the rate and the answers ask for, 600 at most]",
)
@click.option("--seeds", default="1,2,3", show_default=True, callback=parse_seeds, help="Of whole runs.")
@click.option(
    "--prefix-reuse/--no-prefix-reuse",
    default=None,
    help="Reuse KV of prompts that begin alike, as for simulate.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter, as for simulate; M or alpha given so is kept.",
)
@click.option(
    "--jobs", default=os.cpu_count() or 1, type=click.IntRange(min=1), help="Processes.  [default: all cores]"
)
@click.option("--skip-unanswered", is_flag=True, help="Leave out requests of the trace that got no token.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with charts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    manifest: Path | None,
    *,
    trace: Path,
    duration_s: float | None,
    seeds: tuple[int, ...],
    jobs: int,
    skip_unanswered: bool,
    as_json: bool,
    html: Path | None,
    **given: Any,
) -> None:
    """Plans sliders for the requests of a trace: of MANIFEST within its bounds, or of flags.

    Without --rate it looks for the highest goodput of the engines there are; with it, for the fewest GPUs that serve the
    rate at the target.
    """
    try:
        reads_hashes = given["prefix_reuse"] is not None
        rows = read_trace(trace, skips_unanswered=skip_unanswered, reads_hashes=reads_hashes)
        cluster = None if manifest is None else parse_manifest(manifest.read_text())
        inputs = make_inputs(cluster, Flags(**given), rows)
        result, page = _carry_out(
            inputs, SearchEffort(seeds=seeds, duration_s=duration_s), jobs, draws=html is not None
        )
    except (ValueError, ManifestError) as error:
        raise click.ClickException(str(error)) from error
    if html is not None:
        html.write_text(page)
    if as_json:
        click.echo(json.dumps(make_plan_report(inputs, result), indent=2))
    else:
        make_console().print(make_plan_summary(inputs, result))
    if not result.is_met:
        raise click.ClickException(
            f"no plan within the bounds serves {inputs.goal.rate_rps:g} requests/s; "
            f"the best found reaches {result.goodput_rps.mean:.2f}"
        )


def _carry_out(inputs: PlanInputs, effort: SearchEffort, jobs: int, *, draws: bool) -> tuple[PlanResult, str]:
    """Plans, with a progress bar where standard error is a terminal; returns the plan and, if it draws, the page."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        TrialPool(inputs.problem, jobs) as pool,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("planning", total=1.0)

        def report(share: float, what: str) -> None:
            progress.update(task, completed=share, description=what)

        planner = Planner(inputs.problem, inputs.space, effort, pool.run, report)
        result = planner.plan(inputs.goal, inputs.in_force)
        if not draws:
            return result, ""
        candidates, rates_rps = choose_shown(result)
        fidelity = result.found.fidelity
        curves = measure_curves(pool.run, candidates, rates_rps, fidelity.seeds, fidelity.duration_s)
        return result, make_page(inputs, result, curves)
