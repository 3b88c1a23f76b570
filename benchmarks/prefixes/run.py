"""What it is worth that a router knows the prefix caches of its engines, in the simulator.

    .venv/bin/python benchmarks/prefixes/run.py [--json OUT] [--trace T] [--rate R] [--goodput] [--kv-scale S] ...
        [--host-gib G --host-gb-per-s B [--knows-host-kv]]

Prompts are Mooncake's (``conversation``, ``synthetic``) or chats with many turns (``chats``, see ``make_chats``).

Four engines of llama-3-8b on H200. Each row places otherwise: by Algorithm 2 without knowledge (``unaware``), each
conversation on one engine by a hash of its beginning (``affinity``), by Algorithm 2 with knowledge that is
``--report-s`` old (``aware``), and with the same knowledge by the scorings that llm-d and SGLang publish (``llm-d``,
``sglang``). Those know of no objective and hold nothing back. With ``--host-gib`` engines keep KV in hosts' memory
too, as vLLM does with ``--kv-offloading-size``. ``load`` is the busiest engine's tokens over the mean, computed and
generated.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, Hold, Place, Role, Slo
from sluice_core.scheduling.prefill_placement import PlacementPolicy
from sluice_core.sim.goodput_search import search_goodput
from sluice_core.sim.run_summary import RunSummary, compute_percentile, summarize
from sluice_core.sim.sim_setup import (
    BLOCK_SIZE_TOKENS,
    HOST_BYTES_PER_S,
    Cell,
    EngineSetup,
    SimOptions,
    count_host_blocks,
)
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.traces import HASH_BLOCK_TOKENS, TraceRow, parse_trace
from sluice_core.sim.workload import DrawnWorkload
from sluice_core.strategies import get_strategy
from sluice_core.strategies.placements import PLACEMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from sluice_core.records import Decision, PrefillRequest
    from sluice_core.scheduling.engine_state import EngineState
    from sluice_core.scheduling.engine_table import EngineTable
    from sluice_core.sim.sim_setup import Arrival
    from sluice_core.strategy_parameters import StrategyParameters

TRACES = Path(__file__).parents[1] / "traces"
CHUNKS = {"aggregated": (1024, 1024), "taichi": (2048, 512)}
CHAT_BLOCK_TOKENS = BLOCK_SIZE_TOKENS  # that a hash names
# Of a user who reads an answer and types the next turn, in seconds. Assumed: the trace has no times.
THINK_S, SECONDS_PER_TOKEN = 60.0, 0.03
SESSION_HASHES = 2  # of a prompt's beginning: the first one is often a system prompt that conversations share
# llm-d's weights for inference scheduling: of prefix-cache-scorer, queue-scorer and kv-cache-utilization-scorer.
PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0
# SGLang's defaults of its policy cache_aware: a match that counts, and from which loads on it balances instead.
CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


class ChosenPlacement(PlacementPolicy):
    """Places each prompt at once, on an engine that has reported.

    Args:
        parameters: Not used.
        rng: Breaks ties.
        num_records: Not used.
    """

    reason = ""

    def __init__(self, parameters: StrategyParameters, rng: random.Random, num_records: int = 0) -> None:
        del parameters, num_records
        self._rng = rng

    def assign(self, now: float, waiting: Iterable[PrefillRequest], engines: EngineTable) -> list[Decision]:
        """See ``PlacementPolicy.assign``."""
        return [self._place(now, request, engines) for request in waiting]

    def choose(self, request: PrefillRequest, engines: Collection[EngineState]) -> EngineState:
        """Chooses the engine of a prompt."""
        raise NotImplementedError

    def _place(self, now: float, request: PrefillRequest, engines: EngineTable) -> Decision:
        takers = [state for state in engines.list_loads() if state.reported_at_s is not None]
        if not takers:
            return Hold(request_id=request.request_id, reason="no_engine")
        chosen = self.choose(request, takers)
        tokens = request.prompt_tokens
        engines.record_placement(
            chosen.engine_id,
            request.request_id,
            now,
            tokens=max(1, tokens - request.cached_tokens.get(chosen.engine_id, 0)),
            kv_tokens=tokens,
            execute_s=0.0,
            is_recovery=False,
        )
        return Place(
            request_id=request.request_id,
            engine_id=chosen.engine_id,
            predicted_ttft_s=math.inf,
            reason=self.reason,
            is_feasible=True,
        )


class SessionAffinity(ChosenPlacement):
    """Each conversation on one engine, by rendezvous hashing of its beginning: what a router can do without reports."""

    reason = "affinity"
    sessions: dict[str, tuple[int, ...]] = {}  # noqa: RUF012 - of the run under way, by request

    def choose(self, request: PrefillRequest, engines: Collection[EngineState]) -> EngineState:
        """See ``ChosenPlacement.choose``."""
        session = self.sessions[request.request_id]
        return max(engines, key=lambda state: hashlib.sha256(f"{session}/{state.engine_id}".encode()).digest())


class ScoredPlacement(ChosenPlacement):
    """Takes the engine with the highest score."""

    reason = "score"

    def score(self, request: PrefillRequest, engines: Collection[EngineState]) -> list[float]:
        """Scores each engine; the highest is taken."""
        raise NotImplementedError

    def choose(self, request: PrefillRequest, engines: Collection[EngineState]) -> EngineState:
        """See ``ChosenPlacement.choose``."""
        scores = self.score(request, engines)
        return self._rng.choice([state for state, score in zip(engines, scores, strict=True) if score == max(scores)])


class LlmdPlacement(ScoredPlacement):
    """llm-d's: the weighted sum of what is cached, how short the queue is beside others, and how much KV is free."""

    def score(self, request: PrefillRequest, engines: Collection[EngineState]) -> list[float]:
        """See ``ScoredPlacement.score``."""
        queues = [state.load.queued_requests + len(state.in_flight) for state in engines]
        shortest, longest = min(queues), max(queues)
        scores = []
        for state, queue in zip(engines, queues, strict=True):
            cached = request.cached_tokens.get(state.engine_id, 0) / request.prompt_tokens
            is_short = 1.0 if longest == shortest else (longest - queue) / (longest - shortest)
            is_free = 1 - state.load.kv_blocks_used / max(1, state.load.kv_blocks_total)
            scores.append(PREFIX_WEIGHT * cached + QUEUE_WEIGHT * is_short + KV_WEIGHT * is_free)
        return scores


class SglangPlacement(ScoredPlacement):
    """SGLang's: the longest match while loads are alike, the fewest requests otherwise.

    Without a match that counts it takes the engine with the smallest tree; here that is the one with the least KV used.
    """

    def score(self, request: PrefillRequest, engines: Collection[EngineState]) -> list[float]:
        """See ``ScoredPlacement.score``."""
        loads = [state.load.running_decodes + state.load.queued_requests + len(state.in_flight) for state in engines]
        if max(loads) - min(loads) > BALANCE_ABS_THRESHOLD and max(loads) > BALANCE_REL_THRESHOLD * min(loads):
            return [-load for load in loads]
        cached = [float(request.cached_tokens.get(state.engine_id, 0)) for state in engines]
        if max(cached) > CACHE_THRESHOLD * request.prompt_tokens:
            return cached
        return [-float(state.load.kv_blocks_used) for state in engines]


SCORINGS: dict[str, Callable[[StrategyParameters, random.Random, int], PlacementPolicy]] = {
    "llm-d": LlmdPlacement,
    "sglang": SglangPlacement,
}
# Placements by the names of rows; those of the product are ``unaware`` and ``aware``.
PLACEMENT_KINDS = ("unaware", "affinity", "aware", *SCORINGS)


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
    host_blocks = None
    if arguments.host_gib is not None:
        host_blocks = count_host_blocks(arguments.host_gib, target.kv_bytes_per_token, BLOCK_SIZE_TOKENS)
    setup = EngineSetup(
        engine_id=EngineId("e0"),
        profile=target.profile,
        role=Role.PREFILL_HEAVY,
        chunk_size_tokens=prefill_chunk,
        kv_blocks_total=int(target.kv_capacity_tokens * arguments.kv_scale) // BLOCK_SIZE_TOKENS,
        kv_bytes_per_token=target.kv_bytes_per_token,
        host_kv_blocks=host_blocks,
        host_bytes_per_s=arguments.host_gb_per_s * 1e9,
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
        strategy=strategy if row.kind in ("unaware", "aware") else strategy.vary(placement=row.kind),
        options=SimOptions(
            hash_block_tokens=CHAT_BLOCK_TOKENS if arguments.trace == "chats" else HASH_BLOCK_TOKENS,
            prefix_report_s=None if row.kind in ("unaware", "affinity") else arguments.report_s,
            knows_host_kv=arguments.knows_host_kv,
        ),
        seed=seed,
    )


def make_chats(rows: Sequence[TraceRow], rate_rps: float, seed: int) -> list[TraceRow]:
    """Makes conversations of a trace whose inputs are histories.

    A row goes on with the conversation of the row before if all of that one's prompt and answer fit into its prompt.
    Conversations begin evenly over the time that the trace takes at a rate. A next turn comes after the answer's tokens
    at ``SECONDS_PER_TOKEN`` and an exponential time of mean ``THINK_S``.

    Args:
        rows: ``sharegpt_8k``, in its order.
        rate_rps: Mean requests per second.
        seed: Of all that is drawn.

    Returns:
        Turns in the order of their times, with hashes of prompts and answers. A conversation is one hash, since a
        block's name has its position, too.
    """
    rng = random.Random(seed)
    turns: list[tuple[float, TraceRow]] = []
    conversation, history, at_s = 0, math.inf, 0.0
    for row in rows:
        if row.prompt_tokens <= history:
            conversation += 1
            at_s = rng.uniform(0.0, len(rows) / rate_rps)
        history = row.prompt_tokens + row.output_tokens
        hashes = (conversation,) * -(-history // CHAT_BLOCK_TOKENS)
        turns.append((at_s, replace(row, block_hashes=hashes)))
        at_s += row.output_tokens * SECONDS_PER_TOKEN + rng.expovariate(1.0 / THINK_S)
    return [row for _, row in sorted(turns, key=lambda turn: turn[0])]


@cache
def read_rows(trace: str, rate_rps: float, seed: int) -> list[TraceRow]:
    """Reads the prompts of a run."""
    name = "sharegpt_8k.csv.gz" if trace == "chats" else f"mooncake_{trace}_hash.jsonl.gz"
    with gzip.open(TRACES / name, "rt") as file:
        rows = parse_trace(file, reads_hashes=trace != "chats")
    return make_chats(rows, rate_rps, seed) if trace == "chats" else rows


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
        "host_hit_rate": round(summary.num_host_hit_tokens / summary.num_queried_tokens, 4),
        "attainment": round(summary.attainment, 4),
        "ttft_p50_s": round(compute_percentile(ttfts_s, 0.5) or 0.0, 3),
        "ttft_p90_s": round(compute_percentile(ttfts_s, 0.9) or 0.0, 3),
        "load": round(max(tokens) * len(tokens) / sum(tokens), 3),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--trace", choices=("conversation", "synthetic", "chats"), default="conversation")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second; where --goodput begins")
    parser.add_argument("--duration-s", type=float, default=600.0, help="simulated seconds of a run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row")
    parser.add_argument("--report-s", type=float, default=0.05, help="age of what the router knows of caches")
    parser.add_argument("--kv-scale", type=float, default=1.0, help="scales the engines' KV")
    parser.add_argument("--host-gib", type=float, help="host memory of each engine for KV; without: none")
    parser.add_argument(
        "--host-gb-per-s", type=float, default=HOST_BYTES_PER_S / 1e9, help="between host and GPU, each direction"
    )
    parser.add_argument("--knows-host-kv", action="store_true", help="routers count it as cached")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENT_KINDS, default=PLACEMENT_KINDS)
    parser.add_argument("--strategies", nargs="+", choices=tuple(CHUNKS), default=tuple(CHUNKS))
    parser.add_argument("--ttft-s", type=float, default=10.0, help="TTFT objective")
    parser.add_argument("--tpot-s", type=float, default=0.1, help="TPOT objective")
    parser.add_argument("--goodput", action="store_true", help="search the highest rate at 90 %% attainment")
    arguments = parser.parse_args()
    PLACEMENTS.update({"affinity": SessionAffinity, **SCORINGS})
    results = []
    for row in [Row(strategy, kind) for strategy in arguments.strategies for kind in arguments.placements]:
        for seed in range(1, arguments.seeds + 1):
            rows = read_rows(arguments.trace, arguments.rate, seed)
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
