"""What it is worth that a router knows the prefix caches of its engines, on Mooncake's conversations in the simulator.

    .venv/bin/python benchmarks/prefixes/run.py [--json OUT] [--rate R] [--goodput] [--kv-scale S] ...

Four engines of llama-3-8b on H200. Each row places otherwise: by Algorithm 2 without knowledge (``unaware``), each
conversation on one engine by a hash of its beginning (``affinity``), and by Algorithm 2 with knowledge that is
``--report-s`` old (``aware``). ``load`` is the busiest engine's tokens over the mean, computed and generated.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, Hold, Place, Role, Slo
from sluice_core.scheduling.prefill_placement import PlacementPolicy
from sluice_core.sim.goodput_search import search_goodput
from sluice_core.sim.run_summary import RunSummary, compute_percentile, summarize
from sluice_core.sim.sim_setup import Cell, EngineSetup, SimOptions
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.traces import HASH_BLOCK_TOKENS, parse_trace
from sluice_core.sim.workload import DrawnWorkload
from sluice_core.strategies import get_strategy
from sluice_core.strategies.placements import PLACEMENTS

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from sluice_core.records import Decision, PrefillRequest
    from sluice_core.scheduling.engine_table import EngineTable
    from sluice_core.sim.sim_setup import Arrival
    from sluice_core.strategy_parameters import StrategyParameters

TRACE = Path(__file__).parents[1] / "traces" / "mooncake_conversation_hash.jsonl.gz"
CHUNKS = {"aggregated": (1024, 1024), "taichi": (2048, 512)}
PLACEMENT_KINDS = ("unaware", "affinity", "aware")
SESSION_HASHES = 2  # of a prompt's beginning: the first one is often a system prompt that conversations share


class SessionAffinity(PlacementPolicy):
    """Each conversation on one engine, by rendezvous hashing of its beginning: what a router can do without reports.

    Args:
        parameters: Not used.
        rng: Not used.
        num_records: Not used.
    """

    sessions: dict[str, tuple[int, ...]] = {}  # noqa: RUF012 - of the run under way, by request

    def __init__(self, parameters: StrategyParameters, rng: random.Random, num_records: int = 0) -> None:
        del parameters, rng, num_records

    def assign(self, now: float, waiting: Iterable[PrefillRequest], engines: EngineTable) -> list[Decision]:
        """See ``PlacementPolicy.assign``."""
        return [self._place(now, request, engines) for request in waiting]

    def _place(self, now: float, request: PrefillRequest, engines: EngineTable) -> Decision:
        session = self.sessions[request.request_id]
        takers = [state for state in engines.list_loads() if state.reported_at_s is not None]
        if not takers:
            return Hold(request_id=request.request_id, reason="no_engine")
        chosen = max(takers, key=lambda state: hashlib.sha256(f"{session}/{state.engine_id}".encode()).digest())
        tokens = request.prompt_tokens
        engines.record_placement(
            chosen.engine_id, request.request_id, now, tokens=tokens, kv_tokens=tokens, execute_s=0.0, is_recovery=False
        )
        return Place(
            request_id=request.request_id,
            engine_id=chosen.engine_id,
            predicted_ttft_s=math.inf,
            reason="affinity",
            is_feasible=True,
        )


class SessionWorkload(DrawnWorkload):
    """Tells ``SessionAffinity`` which conversation a request belongs to; the simulator numbers requests."""

    def make_arrivals(self, rate_rps: float, duration_s: float) -> list[Arrival]:
        """See ``DrawnWorkload.make_arrivals``."""
        arrivals = super().make_arrivals(rate_rps, duration_s)
        SessionAffinity.sessions = {
            str(index): arrival.block_hashes[:SESSION_HASHES] for index, arrival in enumerate(arrivals)
        }
        return arrivals


@dataclass(frozen=True, slots=True)
class Row:
    """What is compared: a strategy, and how it places."""

    strategy: str
    kind: str


def make_cell(row: Row, arguments: argparse.Namespace, seed: int) -> Cell:
    """Makes the cluster of a row."""
    target = load_model_on_gpu("llama-3-8b", "h200-141g", 1)
    prefill_chunk, decode_chunk = CHUNKS[row.strategy]
    setup = EngineSetup(
        engine_id=EngineId("e0"),
        profile=target.profile,
        role=Role.PREFILL_HEAVY,
        chunk_size_tokens=prefill_chunk,
        kv_blocks_total=int(target.kv_capacity_tokens * arguments.kv_scale) // 16,
        kv_bytes_per_token=target.kv_bytes_per_token,
    )
    decode_heavy = replace(setup, role=Role.DECODE_HEAVY, chunk_size_tokens=decode_chunk)
    strategy = get_strategy(row.strategy)
    return Cell(
        engines=[
            replace(
                setup if number < 2 or row.strategy == "aggregated" else decode_heavy, engine_id=EngineId(f"e{number}")
            )
            for number in range(4)
        ],
        strategy=strategy.vary(placement="affinity") if row.kind == "affinity" else strategy,
        options=SimOptions(
            hash_block_tokens=HASH_BLOCK_TOKENS,
            prefix_report_s=arguments.report_s if row.kind == "aware" else None,
        ),
        seed=seed,
    )


def describe(row: Row, seed: int, rate_rps: float, summary: RunSummary) -> dict[str, object]:
    """Makes the figures of a run."""
    tokens = [use.num_prefill_tokens + use.num_output_tokens for use in summary.engines]
    ttfts_s = sorted(summary.ttfts_s)
    return {
        "strategy": row.strategy,
        "placement": row.kind,
        "seed": seed,
        "rate_rps": round(rate_rps, 3),
        "hit_rate": round(summary.num_hit_tokens / summary.num_queried_tokens, 4),
        "attainment": round(summary.attainment, 4),
        "ttft_p50_s": round(compute_percentile(ttfts_s, 0.5) or 0.0, 3),
        "ttft_p90_s": round(compute_percentile(ttfts_s, 0.9) or 0.0, 3),
        "load": round(max(tokens) * len(tokens) / sum(tokens), 3),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second; where --goodput begins")
    parser.add_argument("--duration-s", type=float, default=600.0, help="simulated seconds of a run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row")
    parser.add_argument("--report-s", type=float, default=0.05, help="age of what the router knows of caches")
    parser.add_argument("--kv-scale", type=float, default=1.0, help="scales the engines' KV")
    parser.add_argument("--ttft-s", type=float, default=10.0, help="TTFT objective")
    parser.add_argument("--tpot-s", type=float, default=0.1, help="TPOT objective")
    parser.add_argument("--goodput", action="store_true", help="search the highest rate at 90 %% attainment")
    arguments = parser.parse_args()
    PLACEMENTS["affinity"] = SessionAffinity
    with gzip.open(TRACE, "rt") as file:
        rows = parse_trace(file, reads_hashes=True)
    results = []
    for row in [Row(strategy, kind) for strategy in CHUNKS for kind in PLACEMENT_KINDS]:
        for seed in range(1, arguments.seeds + 1):
            workload = SessionWorkload(rows, Slo(ttft_s=arguments.ttft_s, tpot_s=arguments.tpot_s), seed)
            cell, rate_rps, duration_s = make_cell(row, arguments, seed), arguments.rate, arguments.duration_s
            if arguments.goodput:
                found = search_goodput(cell, workload, duration_s=duration_s, start_rps=rate_rps)
                rate_rps, summary = found.rate_rps, found.summary
            else:
                simulation = Simulation(cell, workload.make_arrivals(rate_rps, duration_s))
                simulation.run()
                summary = summarize(simulation)
            results.append(describe(row, seed, rate_rps, summary))
            print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"benchmark": "prefixes", "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
