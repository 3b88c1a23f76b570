"""``sluice status``: what runs, from the cluster's files and its routers."""

from __future__ import annotations

import asyncio
import json

import click

from sluice_cli.commands.cluster_options import cluster_option
from sluice_cli.commands.output_options import json_option
from sluice_cli.local_cluster.cluster_directory import choose_cluster
from sluice_cli.local_cluster.status_reader import read_cluster_status
from sluice_cli.output.cluster_table import print_cluster_status
from sluice_cli.output.console import make_console


@click.command()
@cluster_option
@json_option
def status(name: str | None, *, as_json: bool) -> None:
    """Shows a cluster's routers and engines."""
    found = asyncio.run(read_cluster_status(choose_cluster(name)))
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_cluster_status(make_console(), found)
