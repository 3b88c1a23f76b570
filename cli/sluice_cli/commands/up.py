"""``sluice up``: runs a manifest's cluster as local processes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from sluice_cli.commands.cluster_options import parse_directories, ports_option
from sluice_cli.errors import as_command_error
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
from sluice_cli.local_cluster.detached_start import start_detached
from sluice_cli.local_cluster.launcher import UpOptions, read_manifest, run_launcher
from sluice_cli.output.cluster_display import ClusterDisplay
from sluice_cli.output.console import make_console
from sluice_operator.api.manifest import ManifestError


@click.command()
@click.argument("manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-d", "--detach", is_flag=True, help="Return once the cluster serves, or never will.")
@click.option(
    "--http-port", type=click.IntRange(1024, 65535), help="Port of the first router instead of the manifest's."
)
@click.option(
    "--volume", "volumes", multiple=True, callback=parse_directories, metavar="NAME=DIR", help="Directory of a claim."
)
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    callback=parse_directories,
    metavar="NAME=DIR",
    help="Directory of a Secret's entries.",
)
@ports_option
def up(
    manifest: Path,
    *,
    detach: bool,
    http_port: int | None,
    volumes: dict[str, Path],
    secrets: dict[str, Path],
    ports: range,
) -> None:
    """Runs the ServingCluster of MANIFEST as local processes, and follows its edits."""
    options = UpOptions(manifest=manifest, http_port=http_port, volumes=volumes, secrets=secrets, ports=ports)
    with as_command_error(ManifestError):
        if detach:
            directory = ClusterDirectory(read_manifest(options).metadata.name)
            sys.exit(start_detached(directory, options.as_arguments(), click.echo))
        display = ClusterDisplay(make_console())
        asyncio.run(run_launcher(options, display.report, display.show))
