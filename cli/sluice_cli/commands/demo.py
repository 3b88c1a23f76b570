"""``sluice demo``: shows on a cluster of its own what Sluice does."""

from __future__ import annotations

from pathlib import Path

import click

from sluice_cli.commands.cluster_options import ports_option
from sluice_cli.demo.demo_cluster import run_demo
from sluice_cli.errors import as_command_error
from sluice_cli.output.console import make_console
from sluice_operator.api.manifest import ManifestError


@click.command()
@click.option(
    "--manifest",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path("examples/tiny-cpu.yaml"),
    show_default=True,
    help="ServingCluster to show; the demo edits a copy.",
)
@click.option("--keep", is_flag=True, help="Leave the cluster running.")
@ports_option
def demo(manifest: Path, *, keep: bool, ports: range) -> None:
    """Shows in a minute what Sluice does: placement, moves, a live slider, a killed engine."""
    with as_command_error(ManifestError):
        run_demo(manifest, ports, make_console(), click.echo, is_kept=keep)
