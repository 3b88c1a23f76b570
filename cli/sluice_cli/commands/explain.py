"""``sluice explain``: why a request ran where it ran."""

from __future__ import annotations

import asyncio
import json

import click

from sluice_cli.commands.cluster_options import cluster_option
from sluice_cli.commands.output_options import json_option
from sluice_cli.local_cluster.cluster_directory import choose_cluster
from sluice_cli.local_cluster.decision_log_client import fetch_decision_log
from sluice_cli.local_cluster.status_reader import read_cluster_status
from sluice_cli.output.console import make_console
from sluice_cli.output.explain_view import render_decision_log


@click.command()
@click.argument("request_id")
@cluster_option
@click.option("--api-key", envvar="SLUICE_API_KEY", default="", help="Key of a cluster that asks for one.")
@json_option
def explain(request_id: str, name: str | None, *, api_key: str, as_json: bool) -> None:
    """Shows why a request (its x-request-id) ran where it ran."""
    status = asyncio.run(read_cluster_status(choose_cluster(name)))
    log = asyncio.run(fetch_decision_log(status.routers, request_id, api_key))
    if as_json:
        click.echo(json.dumps(log, indent=2))
    else:
        make_console().print(render_decision_log(log))
