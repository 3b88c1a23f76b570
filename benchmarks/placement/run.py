"""What a decision costs: placements of TaiChi and of Sluice, and flow (Algorithm 1), CPU time of one core.

    .venv/bin/python benchmarks/placement/run.py [--strategy NAME] [--json OUT] [--decisions N] [--repeats N]

Placement: one ``assign`` of one request with its bookkeeping and decision record, the submit number noted. The report
of an engine that includes the placement is timed apart. Load cases: ``idle`` (all queues empty, so all engines tie),
``steady`` (queues of every length, some engines feasible), ``nothing`` (no engine is feasible, so every engine is
checked), ``cached`` (as steady; every engine has 20 KV blocks of the prompt, and one in eight has more; the match of
8000 tokens is part of the decision).

Flow: ``advance`` and ``propose`` of one engine that has ``n`` decodes, with no move, and with 8 moves, per iteration.
O(moved) shows as times that do not grow with ``n``; a plain scan of all decodes stands beside them.

Macro instances (EcoServe): one decision, which finds an engine more or less than the one before it, so that a macro
instance splits or two merge.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_core.kv_blocks import KvBlocks
from sluice_core.records import EngineId, IterationShape, Place, PrefillRequest, RequestId, Role, Slo
from sluice_core.scheduling.decode_flow import FlowPolicy
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import PROVEN_OBSERVATIONS, EngineConfig, EngineTable
from sluice_core.scheduling.prefix_index import PrefixIndex
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ENGINES = (8, 64, 256, 1024)
DECODES = (64, 256, 1024)
STRATEGIES = ("taichi", "sluice")
LOAD_CASES = ("idle", "steady", "nothing", "cached")
MOVES_PER_ITERATION = 8
TARGET_P99_US = {64: 20.0, 1024: 200.0}  # by number of engines
_SPEC = EngineConfig(block_size_tokens=16, kv_bytes_per_token=196_608, max_num_seqs=256, max_batch_tokens=8192)
_NS_PER_US = 1000.0


def make_load(rng: random.Random, case: str, last_submit_number: int) -> EngineLoad:
    """Make a load report of one engine.

    Args:
        rng: Draws the queue and the decodes.
        case: Load case.
        last_submit_number: Last submit that it includes.
    """
    queued = 0 if case == "idle" else rng.randrange(500, 20_000)
    num_decodes = rng.randrange(10, 60)
    return EngineLoad(
        last_submit_number=last_submit_number,
        queued_prefill_tokens=queued,
        queued_requests=-(-queued // 2000),
        queued_attention_work=queued * 1000.0,
        running_decodes=num_decodes,
        decode_context_tokens=num_decodes * 1500,
        kv_blocks_total=14_000,
        kv_blocks_used=num_decodes * 95,
        iteration_remaining_s=rng.random() * 0.02,
    )


def make_table(rng: random.Random, num_engines: int, case: str, *, has_roles: bool) -> EngineTable:
    """Make a table of half P-heavy, half D-heavy engines, or of equal ones, with fitted models and one report each."""
    table = EngineTable()
    for number in range(num_engines):
        engine_id = EngineId(f"engine-{number}")
        is_prefill_heavy = number % 2 == 0
        role = Role.PREFILL_HEAVY if is_prefill_heavy else Role.DECODE_HEAVY
        chunk_size_tokens = 2048 if is_prefill_heavy or not has_roles else 256
        table.add(engine_id, _SPEC, role=role, chunk_size_tokens=chunk_size_tokens)
        for _ in range(PROVEN_OBSERVATIONS):
            table.observe_iteration(engine_id, IterationShape(prefill_tokens=512, num_chunks=1, num_decodes=32), 0.06)
        table.report(engine_id, make_load(rng, case, 0), 0.0)
    return table


def make_index(num_engines: int, hashes: Sequence[int]) -> PrefixIndex:
    """Make an index in which all engines have the beginning of a prompt, and some have more."""
    index = PrefixIndex()
    for number in range(num_engines):
        depth = 20 if number % 8 else 20 + number % 480
        index.update(EngineId(f"engine-{number}"), hashes[:depth], ())
    return index


def match(index: PrefixIndex, hashes: Sequence[int]) -> tuple[dict[EngineId, int], int]:
    """Match a prompt; returns the cached tokens of engines, and the nanoseconds that it took."""
    if not hashes:
        return {}, 0
    start = time.thread_time_ns()
    cached = index.match(hashes, 16)
    return cached, time.thread_time_ns() - start


def measure_placement(strategy: str, num_engines: int, case: str, num_decisions: int) -> dict[str, object]:
    """Time decisions and the reports that follow them."""
    rng = random.Random(num_engines)
    table = make_table(rng, num_engines, case, has_roles=get_strategy(strategy).sliders.has_roles)
    policy = get_strategy(strategy).make_router(StrategyParameters(), random.Random(1))
    slo = Slo(ttft_s=1e-3 if case == "nothing" else 4.0, tpot_s=0.07)
    submit_numbers = dict.fromkeys((state.engine_id for state in table), 0)
    hashes = [rng.getrandbits(64) for _ in range(500)] if case == "cached" else []
    index = make_index(num_engines, hashes)
    decision_ns: list[int] = []
    report_ns: list[int] = []
    for number in range(num_decisions):
        now = number * 1e-3
        request_id, prompt_tokens = RequestId(f"request-{number}"), 8001 if hashes else rng.randrange(16, 4000)
        cached, match_ns = match(index, hashes)
        request = PrefillRequest(
            request_id=request_id, arrival_s=now, prompt_tokens=prompt_tokens, slo=slo, cached_tokens=cached
        )
        start = time.thread_time_ns()
        decision = policy.assign(now, (request,), table)[0]
        if isinstance(decision, Place):
            submit_number = submit_numbers[decision.engine_id] + 1
            submit_numbers[decision.engine_id] = submit_number
            table.mark_submitted(decision.engine_id, decision.request_id, submit_number)
        end = time.thread_time_ns()
        decision_ns.append(match_ns + end - start)
        reporter = decision.engine_id if isinstance(decision, Place) else next(iter(submit_numbers))
        load = make_load(rng, case, submit_numbers[reporter])
        start = time.thread_time_ns()
        table.report(reporter, load, now)
        report_ns.append(time.thread_time_ns() - start)
    return {
        "strategy": strategy,
        "engines": num_engines,
        "case": case,
        "decision_us": summarize(decision_ns),
        "report_us": summarize(report_ns),
    }


def measure_macro_instances(num_engines: int, num_decisions: int) -> dict[str, object]:
    """Time decisions between which an engine comes or goes; full macro instances split and merge by it."""
    rng = random.Random(num_engines)
    table = make_table(rng, num_engines, "idle", has_roles=False)
    # All are full, and the next one splits the youngest.
    policy = get_strategy("ecoserve").make_router(
        StrategyParameters(macro_instance_least=4, macro_instance_most=8), random.Random(1)
    )
    slo = Slo(ttft_s=4.0, tpot_s=0.07)
    samples: list[int] = []
    events: Counter[str] = Counter()
    for number in range(num_decisions):
        engine_id, now = EngineId("one more"), number * 1e-3
        if number % 2:
            table.add(engine_id, _SPEC, role=Role.PREFILL_HEAVY, chunk_size_tokens=2048)
            table.report(engine_id, make_load(rng, "idle", 0), now)
        elif number:
            table.remove(engine_id)
        request = PrefillRequest(request_id=RequestId(f"request-{number}"), arrival_s=now, prompt_tokens=500, slo=slo)
        start = time.thread_time_ns()
        policy.assign(now, (request,), table)
        samples.append(time.thread_time_ns() - start)
        events.update(policy.take_events())
    return {"engines": num_engines, **events, "decision_us": summarize(samples)}


def make_decodes(num_decodes: int, role: Role) -> DecodeSet:
    """Make an engine's decodes, all within their objective."""
    decodes = DecodeSet(block_size_tokens=16, max_num_seqs=2 * num_decodes)
    decodes.role = role
    decodes.observe_kv(KvBlocks(total=num_decodes * 64, used=num_decodes * 32))
    rng = random.Random(num_decodes)
    for number in range(num_decodes):
        join(decodes, f"decode-{number}", 0.0, rng.randrange(1, 400))
    return decodes


def join(decodes: DecodeSet, request_id: str, now: float, output_tokens: int) -> None:
    """Add a decode that is well within its TPOT objective."""
    decodes.join(
        RequestId(request_id),
        prompt_tokens=1000,
        output_tokens=output_tokens,
        output_tokens_since_reset=output_tokens,
        first_token_s=now - output_tokens * 0.03,
        tpot_slo_s=0.07,
        is_moved_in=False,
    )


def measure_flow(num_decodes: int, num_moves: int, num_iterations: int) -> dict[str, object]:
    """Time ``advance`` + ``propose`` of a D-heavy engine that degrades ``num_moves`` decodes per iteration."""
    decodes = make_decodes(num_decodes, Role.DECODE_HEAVY)
    policy = FlowPolicy(StrategyParameters(watermark=0.9), random.Random(1))
    samples: list[int] = []
    num_proposed = 0
    blocks_each = 64
    for iteration in range(num_iterations):
        now = iteration * 0.03
        released = num_moves * blocks_each
        total = num_decodes * blocks_each
        used = int(0.9 * total) + (released if num_moves else 0)
        decodes.observe_kv(KvBlocks(total=max(total, used), used=used))
        start = time.thread_time_ns()
        decodes.advance()
        proposals = policy.propose(now, decodes)
        samples.append(time.thread_time_ns() - start)
        num_proposed += len(proposals)
        for number, proposal in enumerate(proposals):
            decodes.leave(proposal.request_id)
            join(decodes, f"new-{iteration}-{number}", now, 1)
    summary = summarize(samples)
    return {
        "decodes": num_decodes,
        "moves_per_iteration": round(num_proposed / num_iterations, 2),
        "iteration_us": summary,
        "scan_us": measure_scan(num_decodes),
    }


def measure_scan(num_decodes: int) -> float:
    """Time the plain scan of Algorithm 1, lines 1 to 3, over all decodes; median in microseconds."""
    firsts = [(0.01 * number, number) for number in range(num_decodes)]

    def scan() -> int:
        return sum(1 for first_s, tokens in firsts if 20.0 - first_s > 0.0672 * (700 + tokens))

    return statistics.median(time_calls(scan, 200)) / _NS_PER_US


def time_calls(call: Callable[[], object], num_calls: int) -> list[int]:
    """Time calls one by one, in nanoseconds."""
    samples = []
    for _ in range(num_calls):
        start = time.thread_time_ns()
        call()
        samples.append(time.thread_time_ns() - start)
    return samples


def summarize(samples_ns: Sequence[int]) -> dict[str, float]:
    """Compute p50 and p99 in microseconds."""
    ordered = sorted(samples_ns)
    return {
        "p50": round(ordered[len(ordered) // 2] / _NS_PER_US, 2),
        "p99": round(ordered[int(len(ordered) * 0.99)] / _NS_PER_US, 2),
    }


def repeat(measure: Callable[[], dict[str, object]], key: str, num_repeats: int) -> dict[str, object]:
    """Measure several times and keep the least disturbed run: others share the machine, and can only add time.

    Args:
        measure: Makes one row.
        key: Its field with the p99 to compare.
        num_repeats: Runs.
    """

    def get_p99(row: dict[str, object]) -> float:
        summary = row[key]
        assert isinstance(summary, dict)
        return float(summary["p99"])

    return min((measure() for _ in range(num_repeats)), key=get_p99)


def print_tables(
    placements: list[dict[str, object]], macro_instances: list[dict[str, object]], flows: list[dict[str, object]]
) -> None:
    """Print what was measured."""
    print("placement, us per decision (assign + bookkeeping + record), and per load report")
    print(f"{'strategy':>8} {'engines':>8} {'case':>8} {'p50':>8} {'p99':>8} {'report p50':>11} {'report p99':>11}")
    for row in placements:
        decision, report = row["decision_us"], row["report_us"]
        assert isinstance(decision, dict)
        assert isinstance(report, dict)
        print(
            f"{row['strategy']:>8} {row['engines']:>8} {row['case']:>8} {decision['p50']:>8} {decision['p99']:>8} "
            f"{report['p50']:>11} {report['p99']:>11}"
        )
    print("\nmacro instances, us per decision that finds an engine more or less")
    print(f"{'engines':>8} {'splits':>8} {'merges':>8} {'p50':>8} {'p99':>8}")
    for row in macro_instances:
        decision = row["decision_us"]
        assert isinstance(decision, dict)
        print(
            f"{row['engines']:>8} {row['macro_instance_split']:>8} {row['macro_instance_merge']:>8} "
            f"{decision['p50']:>8} {decision['p99']:>8}"
        )
    print("\nflow, us per iteration of one engine (advance + propose)")
    print(f"{'decodes':>8} {'moves':>8} {'p50':>8} {'p99':>8} {'plain scan':>11}")
    for row in flows:
        iteration = row["iteration_us"]
        assert isinstance(iteration, dict)
        print(
            f"{row['decodes']:>8} {row['moves_per_iteration']:>8} {iteration['p50']:>8} {iteration['p99']:>8} "
            f"{row['scan_us']:>11.2f}"
        )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, help="placements of this one alone")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--decisions", type=int, default=5000, help="decisions and iterations per row")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row; the one with the lowest p99 counts")
    arguments = parser.parse_args()
    # As the router runs: collections are rare, and what exists at the start is left out of them.
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    repeats, num = arguments.repeats, arguments.decisions
    placements = [
        repeat(partial(measure_placement, strategy, engines, case, num), "decision_us", repeats)
        for strategy in ([arguments.strategy] if arguments.strategy else STRATEGIES)
        for engines in ENGINES
        for case in LOAD_CASES
    ]
    macro_instances = [
        repeat(partial(measure_macro_instances, engines, min(num, 500)), "decision_us", repeats) for engines in ENGINES
    ]
    flows = [
        repeat(partial(measure_flow, decodes, moves, num), "iteration_us", repeats)
        for decodes in DECODES
        for moves in (0, MOVES_PER_ITERATION)
    ]
    print_tables(placements, macro_instances, flows)
    if arguments.json:
        result = {
            "benchmark": "placement",
            "python": sys.version.split()[0],
            "machine": platform.processor() or platform.machine(),
            "load_average": os.getloadavg(),
            "target_p99_us": TARGET_P99_US,
            "placement": placements,
            "macro_instances": macro_instances,
            "flow": flows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
