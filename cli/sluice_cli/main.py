"""The ``sluice`` command: a table of commands, each imported only when it is used."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from sluice_cli.errors import as_click_error

# Command NAME is the function NAME of commands/NAME.py. Its summary stands here too, so that `sluice --help` imports
# none of them: gRPC and the manifest's models alone take half a second.
COMMANDS = {
    "up": "Runs the ServingCluster of MANIFEST as local processes, and follows its edits.",
    "status": "Shows a cluster's routers and engines.",
    "explain": "Shows why a request (its x-request-id) ran where it ran.",
    "down": "Stops a cluster.",
    "demo": "Shows in a minute what Sluice does: placement, moves, a live slider, a killed engine.",
    "plan": "Plans sliders for the requests of a trace: of MANIFEST within its bounds, or of flags.",
    "parallelism": "Finds tensor and pipeline parallelism for prefills and for decodes.",
    "bench": "Compares strategies in the simulator, on your requests or on pinned ones.",
    "simulate": "Simulates a cluster on a trace: of MANIFEST, of flags, or of a manifest that flags change.",
}


class CommandGroup(click.Group):
    """Imports a command when it is used, and prints errors that the user can set right."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command; None: there is no such command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"sluice_cli.commands.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands in the help text; click's own list would import all of them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command.

        Raises:
            click.ClickException: The command failed in a way that the user can set right.
        """
        with as_click_error():
            return super().invoke(ctx)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice-serve", prog_name="sluice")
def cli() -> None:
    """Serves large language models under latency objectives."""


def main() -> None:
    """Runs the command line."""
    sys.exit(cli())


if __name__ == "__main__":
    main()
