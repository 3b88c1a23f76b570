"""Options of the commands that simulate."""

from __future__ import annotations

import os
from pathlib import Path

import click

from sluice_cli.simulation.plan_inputs import parse_range
from sluice_core.planning.slider_candidates import PrefillHeavyBounds
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT
from sluice_core.strategies import get_strategy

POSITIVE = click.FloatRange(min=0, min_open=True)

manifest_argument = click.argument(
    "manifest", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
trace_option = click.option(
    "--trace",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Requests: CSV, or JSON lines.",
)
model_option = click.option("--model", help="Model by name, or the path of its config.json.")
gpu_option = click.option("--gpu", help="GPU by name.")
target_option = click.option(
    "--target",
    type=click.FloatRange(0.01, 1),
    help=f"Attainment.  [default: the manifest's, or {DEFAULT_ATTAINMENT}]",
)
ttft_option = click.option("--ttft-ms", type=POSITIVE, help="TTFT objective.")
tpot_option = click.option("--tpot-ms", type=POSITIVE, help="TPOT objective.")
jobs_option = click.option(
    "--jobs", default=os.cpu_count() or 1, type=click.IntRange(min=1), help="Processes.  [default: all cores]"
)


def parse_seeds(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Reads ``--seeds``."""
    try:
        seeds = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 1,2,3") from None
    if len(set(seeds)) != len(seeds):
        raise click.BadParameter(f"{value!r} has a seed twice")
    return seeds


def parse_bounds(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Reads ``N`` or ``LOW-HIGH``."""
    bounds = parse_share(_context, _parameter, value)
    if bounds is None:
        return None
    if bounds.is_percent:
        raise click.BadParameter(f"{value!r} is in percent; numbers are needed")
    return bounds.low, bounds.high


def parse_share(_context: click.Context, _parameter: click.Parameter, value: str | None) -> PrefillHeavyBounds | None:
    """Reads ``N`` or ``LOW-HIGH``, also in percent."""
    if value is None:
        return None
    try:
        low, high, is_percent = parse_range(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return PrefillHeavyBounds(low=low, high=high, is_percent=is_percent)


def parse_strategies(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Reads ``NAME[,NAME]``."""
    if value is None:
        return None
    try:
        return tuple(dict.fromkeys(get_strategy(name.strip()).name for name in value.split(",")))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_tensor_parallels(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Reads ``N[,N]``."""
    if value is None:
        return None
    parts = value.split(",")
    if not all(part.isdigit() and 1 <= int(part) <= 64 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of numbers of GPUs (1 to 64) such as 1,2")
    return tuple(dict.fromkeys(int(part) for part in parts))
