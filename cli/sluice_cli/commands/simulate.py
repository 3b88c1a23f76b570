"""``sluice simulate``: a cluster on a trace, at a rate or at its goodput, over some seeds."""

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
    parse_seeds,
    tpot_option,
    trace_option,
    ttft_option,
)
from sluice_cli.errors import as_command_error
from sluice_cli.output.console import make_console
from sluice_cli.output.simulation_table import make_results_table
from sluice_cli.simulation.cluster_spec import ClusterFlags, choose_cluster_spec
from sluice_cli.simulation.seed_runs import SeedRun, make_simulation_report, simulate_seeds
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT
from sluice_core.strategies import DEFAULT_STRATEGY, STRATEGIES
from sluice_operator.api.manifest import parse_manifest, read_manifest_text


@click.command()
@manifest_argument
@model_option
@gpu_option
@click.option("--tensor-parallel", type=click.IntRange(1, 64), help="GPUs per engine.  [default: 1]")
@click.option("--strategy", help=f"{', '.join(STRATEGIES)}.  [default: {DEFAULT_STRATEGY.name}]")
@click.option("--engines", metavar="NxCHUNK[,NxCHUNK]", help="P-heavy engines, then D-heavy ones: 2x1024,2x256.")
@trace_option
@ttft_option
@tpot_option
@click.option("--rate", "rate_rps", type=POSITIVE, help="Requests per second.")
@click.option("--goodput", "is_goodput", is_flag=True, help="Search the highest rate at the target; starts at --rate.")
@click.option(
    "--target",
    default=DEFAULT_ATTAINMENT,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Attainment of goodput.",
)
@click.option("--duration-s", default=600.0, show_default=True, type=POSITIVE, help="Simulated seconds of a run.")
@click.option("--seeds", default="1,2,3", show_default=True, callback=parse_seeds, help="One run for each.")
@click.option("--trace-times", is_flag=True, help="Arrivals of the trace, stretched to --rate, instead of drawn ones.")
@click.option(
    "--prefix-reuse/--no-prefix-reuse",
    default=None,
    help="Reuse KV of prompts that begin alike, by the trace's hash_ids; --no-...: the same requests without that.",
)
@click.option(
    "--set", "changes", multiple=True, metavar="NAME=VALUE", help="A parameter; see docs/reference/simulator.md."
)
@jobs_option
@click.option("--timeline", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for ui.perfetto.dev.")
@json_option
def simulate(
    manifest: Path | None,
    *,
    trace: Path,
    rate_rps: float | None,
    is_goodput: bool,
    target: float,
    duration_s: float,
    seeds: tuple[int, ...],
    trace_times: bool,
    jobs: int,
    timeline: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Simulates a cluster on a trace: of MANIFEST, of flags, or of a manifest that flags change."""
    if not is_goodput and rate_rps is None and not trace_times:
        raise click.UsageError("--rate or --goodput is needed")
    if is_goodput and (trace_times or timeline):
        raise click.UsageError("--goodput searches with drawn arrivals; --trace-times and --timeline need --rate")
    with as_command_error(ValueError):  # a ManifestError is one
        given = ClusterFlags(**flags)
        cluster = None if manifest is None else parse_manifest(read_manifest_text(manifest))
        spec = choose_cluster_spec(cluster, given, {"--engines": given.engines})
        if trace_times and spec.settings.burstiness != 1.0:
            raise ValueError("--set burstiness is for drawn arrivals; with --trace-times they are those of the trace")
        run = SeedRun(
            spec=spec,
            trace=trace,
            seed=seeds[0],
            duration_s=duration_s,
            rate_rps=rate_rps,
            target=target if is_goodput else None,
            has_trace_times=trace_times,
            timeline=timeline,
        )
        report = make_simulation_report(*simulate_seeds(run, seeds, jobs))
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        make_console().print(make_results_table(report))
