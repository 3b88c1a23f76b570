"""Goodput of strategy ``sluice`` beside its rivals, and of what is left of it with one idea switched off.

    PYTHONPATH=build/compiled:. .venv/bin/python benchmarks/strategies/run.py [--only CELL] [--seeds N] [--ablations]

Goodput is the highest rate at which nine tenths of the requests meet both objectives. Seeds are paired: each fixes the
requests of every system. Nobody is rejected, engines decide between iterations, and no policy sees output lengths.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice_cli.simulation.trace_cache import load_rows
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, Role, Slo
from sluice_core.sim.goodput_search import NoGoodputError, search_goodput
from sluice_core.sim.sim_setup import BLOCK_SIZE_TOKENS, MAX_BATCH_TOKENS, Cell, EngineSetup
from sluice_core.sim.workload import DrawnWorkload
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import OverloadOrder, StrategyParameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = Path(__file__).parent
TRACES = FOLDER.parent / "traces"
_ROLES = (Role.PREFILL_HEAVY, Role.DECODE_HEAVY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCell:
    """A row of ``cells.toml``; objectives and durations in seconds."""

    model: str
    gpu: str
    trace: str
    slo: tuple[float, float]
    duration_s: float
    start_rps: float
    rivals: Sequence[str]


def build_engines(cell: StrategyCell, engines: str) -> list[EngineSetup]:
    """Builds engines.

    Args:
        cell: Model and GPU.
        engines: As ``--engines`` of ``sluice simulate`` says it.
    """
    target = load_model_on_gpu(cell.model, cell.gpu, 1)
    setups = []
    for role, group in zip(_ROLES, engines.split(","), strict=False):
        count, _, tokens = group.partition("x")
        setups += [
            EngineSetup(
                engine_id=EngineId(f"{role.value[0].lower()}{number}"),
                profile=target.profile,
                role=role,
                chunk_size_tokens=MAX_BATCH_TOKENS if tokens == "max" else int(tokens),
                kv_blocks_total=target.kv_capacity_tokens // BLOCK_SIZE_TOKENS,
                kv_bytes_per_token=target.kv_bytes_per_token,
            )
            for number in range(int(count))
        ]
    return setups


def measure(cell: StrategyCell, system: str, parameters: StrategyParameters, seeds: Sequence[int]) -> list[float]:
    """Measures the goodput of each seed, in requests/s; 0 where no rate passes."""
    strategy, _, engines = system.partition(" ")
    slo = Slo(ttft_s=cell.slo[0], tpot_s=cell.slo[1])
    found = []
    for seed in seeds:
        simulated = Cell(
            engines=build_engines(cell, engines), strategy=get_strategy(strategy), parameters=parameters, seed=seed
        )
        workload = DrawnWorkload(load_rows(TRACES / f"{cell.trace}.csv.gz"), slo, seed)
        try:
            run = search_goodput(simulated, workload, duration_s=cell.duration_s, start_rps=cell.start_rps)
        except NoGoodputError:
            found.append(0.0)
        else:
            found.append(run.rate_rps)
    return found


def compare(
    cell: StrategyCell, own: str, ablations: Mapping[str, StrategyParameters], seeds: Sequence[int]
) -> dict[str, list[float]]:
    """Measures every system of a cell; returns goodputs by system."""
    rows = {own: measure(cell, own, StrategyParameters(), seeds)}
    rows |= {rival: measure(cell, rival, StrategyParameters(), seeds) for rival in cell.rivals}
    return rows | {name: measure(cell, own, parameters, seeds) for name, parameters in ablations.items()}


def compute_ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """Computes the mean ratio of paired goodputs; ``math.inf`` where the other has none."""
    return statistics.fmean(a / b if b else math.inf for a, b in zip(own, other, strict=True))


def read_parameters(values: Mapping[str, Any]) -> StrategyParameters:
    """Reads parameters as TOML has them, where an order is a word; compiled records refuse words."""
    order = OverloadOrder(values.get("overload_order", StrategyParameters().overload_order))
    return StrategyParameters(**{**values, "overload_order": order})


def main() -> None:
    """Measures the cells and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="of the cells' durations")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tables = tomllib.loads((FOLDER / "cells.toml").read_text())
    own, seeds = tables["systems"]["sluice"], range(1, arguments.seeds + 1)
    chosen = tables["ablations"] if arguments.ablations else {}
    ablations = {name: read_parameters(values) for name, values in chosen.items()}
    figures: dict[str, dict[str, list[float]]] = {}
    for name in arguments.only or tables["cells"]:
        cell = StrategyCell(**tables["cells"][name])
        scaled = StrategyCell(**{**tables["cells"][name], "duration_s": cell.duration_s * arguments.scale})
        figures[name] = compare(scaled, own, ablations, seeds)
        for system, rates in figures[name].items():
            ratio = compute_ratio(figures[name][own], rates)
            sys.stdout.write(f"{name:14} {system:32} {statistics.fmean(rates):7.2f}/s  sluice is {ratio:.2f}\n")
        sys.stdout.flush()
    best = [
        min(compute_ratio(rates[own], rates[rival]) for rival in tables["cells"][name]["rivals"])
        for name, rates in figures.items()
    ]
    mean = statistics.geometric_mean(best)
    sys.stdout.write(f"against the best rival of each cell: geometric mean {mean:.3f}, least {min(best):.3f}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cells": figures, "geometric_mean": mean, "least": min(best)}, indent=1))


if __name__ == "__main__":
    main()
