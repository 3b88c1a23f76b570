"""The same in the simulator: the cell that a manifest describes, the same arrivals, and what came of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.fidelity.records import Batch

from sluice_cli.cells import build_cell, describe_manifest
from sluice_core.records import Role
from sluice_core.sim.goodput import TARGET, bisect_rate
from sluice_core.sim.metrics import summarize
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.timeline import Timeline
from sluice_engine.settings import EmulationSettings
from sluice_operator.spec import ServingCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_core.records import Slo
    from sluice_core.sim.metrics import RunSummary
    from sluice_core.sim.setup import Arrival, Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated run.

    Args:
        ttft_s: Of each request, in order.
        tpot_s: Of each request, in order; None: one token.
        has_met: Whether each met its objectives.
        moves: By cause.
        batches: Of each engine, in order.
    """

    ttft_s: list[float]
    tpot_s: list[float | None]
    has_met: list[bool]
    moves: dict[str, int]
    batches: dict[str, list[tuple[float, Batch]]]


def make_cell(manifest: dict[str, Any], kv_blocks: int) -> tuple[Cell, Slo]:
    """Makes the cell of a manifest with emulated engines: their KV goes over the link that they emulate.

    Args:
        manifest: The manifest.
        kv_blocks: What its engines report.
    """
    spec = describe_manifest(ServingCluster.model_validate(manifest), None, None)
    defaults = EmulationSettings()
    settings = replace(
        spec.settings, link_bytes_per_s=defaults.link_bytes_per_s, link_latency_s=defaults.link_latency_s
    )
    cell = build_cell(replace(spec, settings=settings), seed=0)
    return replace(cell, engines=[replace(setup, kv_blocks_total=kv_blocks) for setup in cell.engines]), spec.slo


def simulate(cell: Cell, arrivals: Sequence[Arrival]) -> Simulated:
    """Runs it."""
    timeline = Timeline()
    simulation = Simulation(cell, arrivals, timeline)
    simulation.run()
    batches: dict[str, list[tuple[float, Batch]]] = {}
    for iteration in timeline.iterations:
        batch = Batch(
            iteration.num_decodes, iteration.decode_context_tokens, iteration.prefill_tokens, iteration.num_chunks
        )
        batches.setdefault(iteration.engine_id, []).append((iteration.start_s, batch))
    return Simulated(
        ttft_s=[request.ttft_s for request in simulation.requests],
        tpot_s=[request.tpot_s for request in simulation.requests],
        has_met=[request.has_met_slo for request in simulation.requests],
        moves={cause.value: count for cause, count in simulation.num_moves.items() if count},
        batches=batches,
    )


def replay(cell: Cell, arrivals: Sequence[Arrival]) -> list[Batch]:
    """Runs the load of one engine on an engine like it; returns its batches.

    Args:
        cell: With such an engine first.
        arrivals: See ``Record.make_arrivals``.
    """
    alone = replace(cell, engines=[replace(cell.engines[0], role=Role.DECODE_HEAVY)])
    batches = simulate(alone, arrivals).batches
    return [batch for _, batch in next(iter(batches.values()), [])]


def find_goodput_rps(cell: Cell, make_arrivals: Callable[[float], Sequence[Arrival]]) -> float:
    """Searches the goodput on the very arrivals that engines are given, faster or slower.

    Args:
        cell: The cluster.
        make_arrivals: Makes the arrivals of a rate.
    """

    def attempt(rate_rps: float) -> RunSummary | None:
        arrivals = make_arrivals(rate_rps)
        if not arrivals:
            return None
        simulation = Simulation(cell, arrivals)
        passes = simulation.run(most_missed=math.floor(len(arrivals) * (1.0 - TARGET) + 1e-9))
        return summarize(simulation) if passes else None

    return bisect_rate(attempt, float(len(cell.engines))).rate_rps
