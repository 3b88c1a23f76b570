"""``sluice plan``: from a trace and two objectives to sliders."""

from __future__ import annotations

import json
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
    parse_share,
    parse_strategies,
    parse_tensor_parallels,
    target_option,
    tpot_option,
    trace_option,
    ttft_option,
)
from sluice_cli.errors import CommandError, as_command_error
from sluice_cli.output.console import make_console
from sluice_cli.output.plan_report import make_plan_report, make_plan_summary
from sluice_cli.output.progress import show_progress
from sluice_cli.simulation.plan_inputs import PlanFlags, make_inputs
from sluice_cli.simulation.plan_search import search_plan
from sluice_cli.simulation.trace_cache import read_trace
from sluice_core.planning.slider_search import SearchEffort
from sluice_operator.api.manifest import parse_manifest, read_manifest_text


@click.command()
@manifest_argument
@trace_option
@click.option("--rate", "rate_rps", type=POSITIVE, help="Find the fewest GPUs for so many requests per second.")
@model_option
@gpu_option
@ttft_option
@tpot_option
@target_option
@click.option("--replicas", callback=parse_bounds, metavar="N|LOW-HIGH", help="Engines; with --rate at most so many.")
@click.option(
    "--tensor-parallel",
    "tensor_parallels",
    callback=parse_tensor_parallels,
    metavar="N[,N]",
    help="GPUs per engine to choose from.",
)
@click.option(
    "--strategy",
    "strategies",
    callback=parse_strategies,
    metavar="NAME[,NAME]",
    help="Strategies to choose from.  [default: all]",
)
@click.option("--engines", metavar="NxCHUNK[,NxCHUNK]", help="Engines that run now, as for simulate.")
@click.option(
    "--prefill-heavy", callback=parse_share, metavar="LOW-HIGH", help="Bounds of P-heavy engines: 1-3, or 25%-75%."
)
@click.option(
    "--prefill-chunk", "prefill_chunks", callback=parse_bounds, metavar="LOW-HIGH", help="Bounds of their chunk size."
)
@click.option(
    "--decode-chunk",
    "decode_chunks",
    callback=parse_bounds,
    metavar="LOW-HIGH",
    help="Bounds of the others' chunk size.",
)
@click.option(
    "--duration-s",
    type=POSITIVE,
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
@jobs_option
@click.option("--skip-unanswered", is_flag=True, help="Leave out requests of the trace that got no token.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with charts.")
@json_option
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
    **flags: Any,
) -> None:
    """Plans sliders for the requests of a trace: of MANIFEST within its bounds, or of flags.

    Without --rate it searches for the highest goodput of the engines there are. With --rate it searches for the fewest
    GPUs that serve the rate at the target.
    """
    effort = SearchEffort(seeds=seeds, duration_s=duration_s)
    with as_command_error(ValueError):  # a ManifestError is one
        given = PlanFlags(**flags)
        rows = read_trace(trace, skips_unanswered=skip_unanswered, reads_hashes=given.prefix_reuse is not None)
        cluster = None if manifest is None else parse_manifest(read_manifest_text(manifest))
        inputs = make_inputs(cluster, given, rows)
        with show_progress("planning") as report:
            found = search_plan(inputs, effort, jobs, report, draws_curves=html is not None)
    if html is not None:
        # Only pages need the plotting library, whose import takes a second.
        from sluice_cli.output.plan_page import make_page  # noqa: PLC0415

        html.write_text(make_page(inputs, found.result, found.curves))
    if as_json:
        click.echo(json.dumps(make_plan_report(inputs, found.result), indent=2))
    else:
        make_console().print(make_plan_summary(inputs, found.result))
    if not found.result.is_met:
        raise CommandError(
            f"no plan within the bounds serves {inputs.goal.rate_rps:g} requests/s; "
            f"the best found reaches {found.result.goodput_rps.mean:.2f}"
        )
