"""The same in the simulator: the cell that a manifest describes, the same arrivals, and what came of them."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from benchmarks.fidelity.events import count_simulated
from benchmarks.fidelity.recorded_runs import RecordedBatch

from sluice_cli.simulation.cluster_builder import build_cluster
from sluice_cli.simulation.cluster_spec import read_manifest_spec
from sluice_core.records import Role, Slo
from sluice_core.scheduling.engine_policy import RequestKind
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.engine.gap_histogram import GapHistogram
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.goodput_search import bisect_rate
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.run_summary import summarize
from sluice_core.sim.sim_setup import Arrival
from sluice_core.sim.simulation import Simulation
from sluice_core.slo_attainment import DEFAULT_ATTAINMENT
from sluice_engine.settings import EmulationSettings
from sluice_operator.api.serving_cluster import ServingCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.fidelity.recorded_runs import RecordedRequest

    from sluice_core.sim.chrome_trace import IterationSpan
    from sluice_core.sim.run_summary import RunSummary
    from sluice_core.sim.sim_setup import Cell

NO_OBJECTIVE = Slo(ttft_s=1e9, tpot_s=1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Simulated runs of the same arrivals.

    Args:
        num_runs: Runs.
        ttft_s: Of each request that was not refused, of all runs.
        tpot_s: Likewise; None: one token.
        has_met: Whether each met its objectives.
        events: See ``events``; of a run in the mean.
    """

    num_runs: int
    ttft_s: list[float]
    tpot_s: list[float | None]
    has_met: list[bool]
    events: dict[str, int]


def make_cell(manifest: dict[str, Any], kv_blocks: int) -> tuple[Cell, Slo]:
    """Makes the cell of a manifest with emulated engines: KV goes over their link, and they learn what iterations take.

    Args:
        manifest: The manifest.
        kv_blocks: What its engines report.
    """
    spec = read_manifest_spec(ServingCluster.model_validate(manifest), None, None)
    defaults = EmulationSettings()
    settings = replace(
        spec.settings, link_bytes_per_s=defaults.link_bytes_per_s, link_latency_s=defaults.link_latency_s
    )
    cell = build_cluster(replace(spec, settings=settings), seed=0)
    engines = [replace(setup, kv_blocks_total=kv_blocks, learns_latency=True) for setup in cell.engines]
    return replace(cell, engines=engines), spec.slo


def simulate(cell: Cell, arrivals: Sequence[Arrival], num_runs: int) -> Simulated:
    """Runs it several times: who waits is chance, and turns on the milliseconds in which routers read requests.

    Args:
        cell: The cluster.
        arrivals: What the router saw.
        num_runs: In each, each request comes later by a time drawn anew.
    """
    finished: list[SimRequest] = []
    has_met: list[bool] = []
    events: Counter[str] = Counter()
    for seed in range(num_runs):
        rng = random.Random(seed)
        late = [replace(one, at_s=one.at_s + rng.uniform(0.0, 2.0 * cell.options.message_s)) for one in arrivals]
        simulation = Simulation(cell, sorted(late, key=lambda arrival: arrival.at_s))
        simulation.run()
        finished += [request for request in simulation.requests if request.state is RequestState.FINISHED]
        has_met += [request.has_met_slo for request in simulation.requests]
        events.update(count_simulated(simulation))
    return Simulated(
        num_runs=num_runs,
        ttft_s=[request.ttft_s for request in finished],
        tpot_s=[request.tpot_s for request in finished],
        has_met=has_met,
        events={name: round(count / num_runs) for name, count in events.items()},
    )


def replay(cell: Cell, requests: Sequence[RecordedRequest]) -> list[RecordedBatch]:
    """Runs what came to one engine on an engine like it, without a router; returns its batches.

    Args:
        cell: With such an engine first.
        requests: As the engine's record has them, on the modelled clock.
    """
    timeline = Timeline()
    engine = SimEngine(
        replace(cell.engines[0], role=Role.DECODE_HEAVY),
        cell.strategy.make_engine(cell.parameters, counts_decodes=cell.options.counts_decodes),
        GapHistogram(),
        [],
        schedules_ahead=cell.options.schedules_ahead,
        hash_block_tokens=cell.options.hash_block_tokens,
    )

    def start(now: float) -> None:
        if engine.start(now) >= 0.0:
            timeline.note_iteration(engine, now)

    def advance(until_s: float) -> None:
        while engine.is_running and engine.ends_at_s <= until_s:
            engine.end(engine.ends_at_s)
            start(engine.ends_at_s)

    for at_s, together in groupby(enumerate(requests), key=lambda numbered: numbered[1].modelled_at_s):
        advance(at_s)
        for number, request in together:
            engine.submit(_to_simulated(number, request), RequestKind[request.kind])
        if not engine.is_running:
            start(at_s)
    advance(math.inf)
    engine.check_idle()
    return [_describe(iteration) for iteration in timeline.iterations]


def _describe(iteration: IterationSpan) -> RecordedBatch:
    return RecordedBatch(
        iteration.num_decodes, iteration.decode_context_tokens, iteration.prefill_tokens, iteration.num_chunks
    )


def _to_simulated(number: int, request: RecordedRequest) -> SimRequest:
    arrival = Arrival(
        at_s=request.arrival_s, prompt_tokens=request.num_tokens, output_tokens=request.max_tokens, slo=NO_OBJECTIVE
    )
    return SimRequest(number, arrival)


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
        passes = simulation.run(most_missed=math.floor(len(arrivals) * (1.0 - DEFAULT_ATTAINMENT) + 1e-9))
        return summarize(simulation) if passes else None

    return bisect_rate(attempt, float(len(cell.engines))).rate_rps
