"""Options of the commands that start local clusters or read from them."""

from __future__ import annotations

from pathlib import Path

import click


def parse_directories(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """Reads ``NAME=DIR`` of ``--volume`` and ``--secret``."""
    directories = {}
    for value in values:
        name, separator, directory = value.partition("=")
        if not separator or not name or not directory:
            raise click.BadParameter(f"{value!r} is not NAME=DIR")
        directories[name] = Path(directory)
    return directories


def parse_ports(_context: click.Context, _parameter: click.Parameter, value: str) -> range:
    """Reads ``LOW-HIGH`` of ``--port-range``."""
    low, separator, high = value.partition("-")
    if not separator or not low.isdigit() or not high.isdigit() or not 1024 <= int(low) < int(high) <= 32767:
        raise click.BadParameter(f"{value!r} is not LOW-HIGH with 1024 <= LOW < HIGH <= 32767")
    return range(int(low), int(high) + 1)


cluster_option = click.option("--cluster", "name", help="Name of the cluster; the only running one when absent.")

ports_option = click.option(
    "--port-range",
    "ports",
    default="20000-32767",
    show_default=True,
    envvar="SLUICE_PORT_RANGE",
    callback=parse_ports,
    help="Ports to choose from.",
)
