"""Hand-off pause on real or emulated engines: last token from the source to first token from the target.

    .venv/bin/python -m benchmarks.hand_off.run [--emulated] [--json OUT] [--quick] [--contexts 64,...] [--trips N]

`sluice up` runs real engines and a router; moves are asked for on the router's control port; token times are the
client's. First contact comes first, while all engines are new to each other; then one pair of engines is measured by
context length, idle, with running decodes and with a prefill queue. docs/measurements/hand-off.md explains the
figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.hand_off.background import CONDITIONS, Background, BackgroundError, BackgroundLoad
from benchmarks.hand_off.cells import HopGroup, format_cells
from benchmarks.hand_off.hops import draw_prompt, walk
from benchmarks.local_cluster.client import TokenStream, sum_growth
from benchmarks.local_cluster.cluster import BenchmarkCluster, make_manifest, run_cluster, run_to_status
from benchmarks.local_cluster.figures import describe_machine
from benchmarks.local_cluster.sized_models import MEDIUM, TINY, find_limit_tokens, make_models, use_model

from sluice_core.latency.known_models import MODELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.local_cluster.client import BenchmarkClient

CONTEXTS_TOKENS = (64, 256, 1024, 2048, 3500)
# What a moved request puts out, at least.
LEAST_OUTPUT_TOKENS = 96
CHUNK_TOKENS = 512
# Iterations of a decode take 22 ms there.
EMULATED_GPU = "a100-80g"
EMULATED_MODEL = "qwen2.5-14b"
FIRST_CONTACT_PROMPT_TOKENS = 256
# On a circle of a prime number of engines, steps of each length up to half of it meet every pair exactly once.
CIRCLE_SIZES = (3, 5, 7, 11)
IDLE = CONDITIONS[0]
WARM_UP_TRIPS = 2


def make_circuit(engine_ids: Sequence[str], start: str, *, is_reversed: bool) -> list[str]:
    """Makes a route from an engine over every pair of engines, in one direction, back to it.

    Args:
        engine_ids: Engines, a prime number of them.
        start: Where the route begins.
        is_reversed: Every pair in the other direction.
    """
    count, place = len(engine_ids), engine_ids.index(start)
    route = []
    for step in range(1, count // 2 + 1):
        for _ in range(count):
            place = (place + (-step if is_reversed else step)) % count
            route.append(engine_ids[place])
    return route


class HandOffRun:
    """One run of the benchmark. Mutable: collects the cells.

    Args:
        cluster: The cluster.
        client: Of its router.
        options: The command line.
    """

    def __init__(self, cluster: BenchmarkCluster, client: BenchmarkClient, options: argparse.Namespace) -> None:
        self._cluster = cluster
        self._client = client
        self._options = options
        self._rng = random.Random(options.seed)
        self._limit_tokens = find_limit_tokens(options.model)
        self.cells: list[HopGroup] = []
        self.affinity = cluster.find_affinity()

    async def measure_first_contact(self) -> None:
        """Moves requests over every pair of engines that have never met, then again."""
        engine_ids = await self._list_engines()
        for name, is_reversed in (("first contact", False), ("other direction", True), ("known pair", False)):
            cell = HopGroup(
                condition=name, kv_moved="mixed", context_tokens=FIRST_CONTACT_PROMPT_TOKENS, num_recomputed=0
            )
            self.cells.append(cell)
            recomputed = await self._count_recomputed()
            prompt = draw_prompt(self._rng, FIRST_CONTACT_PROMPT_TOKENS)

            def choose(start: str, *, is_reversed: bool = is_reversed) -> list[str]:
                return make_circuit(engine_ids, start, is_reversed=is_reversed)

            found = await walk(self._client, prompt, self._limit_tokens, choose)
            for hop in found.hops:
                cell.add(hop, None)
            cell.add_rest(found)
            cell.num_recomputed = await self._count_recomputed() - recomputed
            self._show(cell)

    async def reduce_to_pair(self) -> None:
        """Leaves two engines, by an edit of the manifest."""
        await self._cluster.edit(self._client, lambda spec: spec.update(replicas=2))

    async def measure_pair(self, condition: BackgroundLoad) -> None:
        """Measures trips there and back between the two engines, for each context length."""
        engine_ids = await self._list_engines()
        background = Background(self._client, condition, engine_ids, self._rng)
        async with background.run():
            await self._warm_up(engine_ids)
            for context_tokens in self._options.contexts:
                there = HopGroup(condition=condition.name, kv_moved="all", context_tokens=context_tokens)
                back = HopGroup(condition=condition.name, kv_moved="new", context_tokens=context_tokens)
                self.cells += [there, back]
                recomputed = await self._count_recomputed()
                for _ in range(self._options.trips):
                    await self._make_trip(engine_ids, context_tokens, there, back, background)
                # One counter for both directions: it stands with the first.
                there.num_recomputed = await self._count_recomputed() - recomputed
                self._show(there)
                self._show(back)

    async def _warm_up(self, engine_ids: list[str]) -> None:
        cell = HopGroup(condition="warm-up", kv_moved="all", context_tokens=64)
        for _ in range(WARM_UP_TRIPS):
            await self._make_trip(engine_ids, 64, cell, cell, None)

    async def _make_trip(
        self, engine_ids: list[str], context_tokens: int, there: HopGroup, back: HopGroup, background: Background | None
    ) -> None:
        """Moves one request to the other engine and back."""

        def choose(start: str) -> list[str]:
            return [next(engine_id for engine_id in engine_ids if engine_id != start), start]

        prompt = draw_prompt(self._rng, context_tokens)
        is_checked = there.condition == IDLE.name and self._options.check_tokens
        unmoved = await self._answer_unmoved(prompt) if is_checked else []
        found = await walk(self._client, prompt, self._limit_tokens, choose)
        there.add_rest(found)
        if is_checked:
            is_wrong = any(token != other for token, other in zip(found.token_ids, unmoved, strict=False))
            there.num_wrong = (there.num_wrong or 0) + is_wrong
        back.plain_gaps_s.extend(found.plain_gaps_s)
        for hop, cell in zip(found.hops, (there, back), strict=False):
            cell.add(hop, background.count_iterations(hop) if background else None)

    async def _answer_unmoved(self, prompt: list[int]) -> list[int]:
        """Answers a prompt that is cached, on one engine; the moved request will find it cached too.

        Rounding depends on how many tokens of a prompt are computed at once.
        """
        await self._client.generate(TokenStream(), prompt, LEAST_OUTPUT_TOKENS)
        stream = TokenStream()
        await self._client.generate(stream, prompt, LEAST_OUTPUT_TOKENS)
        return stream.token_ids

    async def _list_engines(self) -> list[str]:
        status = await self._client.read_status()
        return sorted(engine.engine_id for engine in status.engines)

    async def _count_recomputed(self) -> int:
        """Sums the engines' counters of pulls that failed or came too late."""
        total = 0.0
        for record in self._cluster.read_processes("engine").values():
            metrics = await self._client.read_metrics(record["ports"]["metrics"])
            total += sum(sum_growth({}, metrics, "sluice_engine_recomputed_pulls_total", ()).values())
        return int(total)

    def _show(self, cell: HopGroup) -> None:
        figures = cell.summarize()
        print(
            f"  {cell.condition}, {cell.context_tokens} tokens, KV moved {cell.kv_moved}: {len(cell.hops)} hops, pause"
            f" p50 {figures['pause_p50_ms']:.1f} ms, p99 {figures['pause_p99_ms']:.1f} ms;"
            f" plain gap {figures['plain_gap_mean_ms']:.1f} ms",
            flush=True,
        )


async def measure(cluster: BenchmarkCluster, options: argparse.Namespace) -> HandOffRun:
    """Runs everything on a cluster that is starting; returns the run with its cells."""
    async with cluster.connect(options.start_timeout) as client:
        run = HandOffRun(cluster, client, options)
        print(f"{options.engines} engines serve", flush=True)
        await run.measure_first_contact()
        await run.reduce_to_pair()
        for condition in options.conditions:
            await run.measure_pair(condition)
    return run


def make_cluster_manifest(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the manifest: Aggregated, so that nothing moves unless it is asked to."""
    manifest = make_manifest("hand-off", http_port=options.port_base, replicas=options.engines)
    spec = manifest["spec"]
    spec["strategy"] = "Aggregated"
    spec["chunkSizes"]["prefillHeavy"] = CHUNK_TOKENS
    if options.emulated:
        spec["engine"]["emulation"] = {"gpu": EMULATED_GPU, "model": EMULATED_MODEL}
    if options.model != TINY:
        use_model(
            spec,
            options.model,
            kv_cache_bytes=options.kv_gib << 30,
            memory_share=0.9 / options.engines,
            arguments=options.engine_args.split(),
        )
    # No objective is at stake here, and a queue of prefills is wanted.
    spec["slo"] |= {"ttftMilliseconds": 60_000, "tpotMilliseconds": 10_000}
    return manifest


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures, with every hop, to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run of under a minute; its figures mean little")
    parser.add_argument("--emulated", action="store_true", help="emulated engines, which schedule ahead as GPUs do")
    parser.add_argument(
        "--model", default=TINY, choices=(TINY, MEDIUM, *MODELS), help="others than the tiny one need a GPU"
    )
    parser.add_argument("--kv-gib", type=int, default=8, help="KV cache of each engine on a GPU (default %(default)s)")
    parser.add_argument("--engine-args", default="", help="further arguments of vLLM on a GPU, with spaces")
    parser.add_argument("--check-tokens", action="store_true", help="compare idle engines' answers with unmoved ones")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS_TOKENS)), help="prompt lengths, in tokens")
    parser.add_argument("--trips", type=int, default=25, help="trips there and back per cell (default %(default)s)")
    parser.add_argument(
        "--conditions",
        default=",".join(condition.name for condition in CONDITIONS),
        help="backgrounds, with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--engines", type=int, choices=CIRCLE_SIZES, default=7, help="engines for first contact (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="for the cluster's start, in seconds")
    parser.add_argument("--port-base", type=int, default=28000, help="first of 500 ports (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="run in this folder and keep it, logs included")
    options = parser.parse_args()
    if options.quick:
        options.engines, options.trips, options.contexts = 3, 3, "64,1024"
    options.contexts = [int(length) for length in options.contexts.split(",")]
    longest_tokens = find_limit_tokens(options.model) - LEAST_OUTPUT_TOKENS
    if not all(1 <= length <= longest_tokens for length in options.contexts):
        parser.error(f"--contexts are from 1 to {longest_tokens} tokens")
    known = {condition.name: condition for condition in CONDITIONS}
    names = options.conditions.split(",")
    if unknown := set(names) - known.keys():
        parser.error(f"--conditions: unknown {sorted(unknown)}; known are {', '.join(known)}")
    options.conditions = [known[name] for name in names]
    return options


def find_warnings(run: HandOffRun) -> list[str]:
    """Finds what makes the figures doubtful."""
    warnings = []
    used = {core for cores in run.affinity.values() for core in cores}
    if len(used) < min(len(run.affinity), len(os.sched_getaffinity(0))):
        warnings.append(
            f"all engines are pinned to cores {sorted(used)}: they wait for one another, not for the hand-off"
        )
    missing = sum(cell.num_missing for cell in run.cells)
    if missing:
        warnings.append(f"{missing} moves did not come to a hop; the router's log says why (--logs)")
    recomputed = sum(cell.num_recomputed or 0 for cell in run.cells)
    if recomputed:
        warnings.append(f"{recomputed} pulls failed or came too late: their pauses contain a prefill")
    return warnings


def print_result(run: HandOffRun, machine: dict[str, str]) -> None:
    """Prints the table and what is needed to read it."""
    print(f"\n{format_cells(run.cells)}\n")
    print(
        "pause: last token from the source to first from the target, at the client.\n"
        "ratio: pause over the mean plain gap of the same requests.\n"
        "iterations: tokens that a decode on the target had during the pause.\n"
        "router: grant asked to first token, while the request still runs on the source for part of it.\n"
        "KV moved 'all': the target has none of it;\n"
        "'new': back to an engine whose prefix cache still holds the older blocks."
    )
    print("machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    for warning in find_warnings(run):
        print(f"WARNING: {warning}")


def main() -> int:
    """Runs the command line; returns the exit status."""
    return run_to_status(lambda: run_benchmark(parse_options()), BackgroundError)


def run_benchmark(options: argparse.Namespace) -> None:
    """Measures, prints, writes."""
    machine = describe_machine()
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-hand-off-")))
        ports = range(options.port_base + 1, options.port_base + 500)
        models = make_models(options.model, folder.absolute() / "models")
        cluster = stack.enter_context(run_cluster(folder, make_cluster_manifest(options), ports=ports, models=models))
        run = asyncio.run(measure(cluster, options))
    print_result(run, machine)
    if options.json:
        result = {
            "benchmark": "hand_off",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": sys.argv,
            "is_quick": options.quick,
            "chunk_size_tokens": CHUNK_TOKENS,
            "duration_s": round(time.monotonic() - started_s, 1),
            "machine": machine,
            "engine_cores": run.affinity,
            "warnings": find_warnings(run),
            "cells": [cell.as_json() for cell in run.cells],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {options.json}")


if __name__ == "__main__":
    sys.exit(main())
