"""``sluice down``: stops clusters."""

from __future__ import annotations

import click

from sluice_cli.commands.cluster_options import cluster_option
from sluice_cli.local_cluster.cluster_directory import choose_cluster, find_clusters
from sluice_cli.local_cluster.shutdown import stop_cluster


@click.command()
@cluster_option
@click.option("--all", "is_all", is_flag=True, help="Stop every cluster that was started in this directory.")
@click.option("--now", is_flag=True, help="Do not wait for streams to end.")
def down(name: str | None, *, is_all: bool, now: bool) -> None:
    """Stops a cluster."""
    running = [cluster for cluster in find_clusters() if cluster.is_running()]
    if name is None and not running:
        click.echo("nothing runs")
        return
    for cluster in running if is_all else [choose_cluster(name)]:
        stop_cluster(cluster, is_hurried=now, report=click.echo)
