"""``sluice parallelism``: from a trace and two objectives to the parallelism of prefills and of decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sluice_cli.commands.output_options import json_option
from sluice_cli.commands.simulation_options import (
    POSITIVE,
    jobs_option,
    parse_seeds,
    parse_tensor_parallels,
    target_option,
    trace_option,
)
from sluice_cli.errors import CommandError, as_command_error
from sluice_cli.output.console import make_console
from sluice_cli.output.parallelism_table import make_parallelism_report, make_parallelism_table
from sluice_cli.output.progress import show_progress
from sluice_cli.simulation.goodput_pool import GoodputPool
from sluice_cli.simulation.parallelism_inputs import ParallelismFlags, make_parallelism_inputs, make_trace_means
from sluice_cli.simulation.trace_cache import read_trace
from sluice_core.planning.parallelism.placement_search import NodeAffinity, place_phases
from sluice_core.planning.workload_shift import find_shifts


@click.command()
@trace_option
@click.option("--model", required=True, help="Model by name, or the path of its config.json.")
@click.option("--gpu", required=True, help="GPU by name.")
@click.option("--nodes", "num_nodes", required=True, type=click.IntRange(1, 1024), help="Nodes of the cluster.")
@click.option("--gpus-per-node", required=True, type=click.IntRange(1, 64), help="GPUs of each node.")
@click.option(
    "--node-affinity",
    type=click.Choice([each.value for each in NodeAffinity]),
    default=NodeAffinity.HIGH.value,
    show_default=True,
    help="high: KV crosses between nodes (Algorithm 1). low: it stays within nodes (Algorithm 2).",
)
@click.option("--ttft-ms", required=True, type=POSITIVE, help="TTFT objective.")
@click.option("--tpot-ms", required=True, type=POSITIVE, help="TPOT objective.")
@target_option
@click.option("--rate", "rate_rps", type=POSITIVE, help="Requests per second to serve.  [default: the trace's own]")
@click.option(
    "--tensor-parallel",
    "tensor_parallels",
    callback=parse_tensor_parallels,
    metavar="N[,N]",
    help="GPUs per layer to choose from.  [default: all measured ones]",
)
@click.option(
    "--pipeline-parallel",
    "pipeline_parallels",
    callback=parse_tensor_parallels,
    metavar="N[,N]",
    help="Stages to choose from.  [default: all that share the layers equally]",
)
@click.option("--duration-s", type=POSITIVE, help="Length of runs.  [default: as the rate asks for, 60 to 600]")
@click.option("--seeds", default="1,2", show_default=True, callback=parse_seeds, help="Of runs.")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="A parameter, as for simulate.")
@click.option(
    "--planned-for",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Requests that the placement in force was made for: search only if the workload has shifted since.",
)
@jobs_option
@click.option("--skip-unanswered", is_flag=True, help="Leave out requests of the trace that got no token.")
@json_option
def parallelism(
    *,
    trace: Path,
    node_affinity: str,
    planned_for: Path | None,
    jobs: int,
    skip_unanswered: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Finds tensor and pipeline parallelism for prefills and for decodes.

    It also says how many instances of each serve a rate. These are DistServe's placement algorithms. The result is not
    deployable yet: all engines of a ServingCluster have one tensor parallelism.
    """
    affinity = NodeAffinity(node_affinity)
    with as_command_error(ValueError):
        given = ParallelismFlags(**flags)
        rows = read_trace(trace, skips_unanswered=skip_unanswered)
        if planned_for is not None:
            planned = make_trace_means(read_trace(planned_for, skips_unanswered=skip_unanswered))
            shifts = find_shifts(planned, make_trace_means(rows, given.rate_rps))
            if not shifts:
                click.echo(json.dumps({"shifts": []}) if as_json else "the workload has not shifted: nothing to do")
                return
            click.echo(f"the workload has shifted: {', '.join(shifts)}", err=True)
        inputs = make_parallelism_inputs(given, rows)
        with show_progress("simulating") as report, GoodputPool(inputs.problem.workload, jobs, report) as pool:
            placement = place_phases(inputs.problem, affinity, pool.run)
    if as_json:
        click.echo(json.dumps(make_parallelism_report(inputs, affinity, placement), indent=2))
    else:
        make_console().print(make_parallelism_table(inputs, placement))
    nodes = inputs.problem.nodes
    if placement.num_nodes > nodes.num_nodes:
        raise CommandError(
            f"{placement.num_nodes} nodes of {nodes.gpus_per_node} GPUs are needed; there are {nodes.num_nodes}"
        )
