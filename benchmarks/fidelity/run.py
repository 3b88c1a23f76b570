"""Emulated engines against the simulator: the same manifest and the same arrivals in both.

    .venv/bin/python -m benchmarks.fidelity.run [--json OUT] [--engines 4] [--shares 0.5,0.85] [--strategies TaiChi,...]
    .venv/bin/python -m benchmarks.fidelity.run --batches [--rate 1.0]

The first runs ``sluice up`` with emulated engines (vLLM's own scheduler, our router, in real time) at shares of the
goodput that the simulator finds on these arrivals, then simulates the arrivals that the router saw. Where nothing
moves (Aggregated, EcoServe), each engine's load is replayed, and iterations are compared one by one. ``--batches`` does
that with one engine alone. See docs/measurements/fidelity.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from benchmarks.emulated.arrivals import load_lengths, make_arrivals
from benchmarks.emulated.manifests import (
    ANSWER_TIMEOUT_S,
    MAX_BATCH_TOKENS,
    MODEL_LIMIT_TOKENS,
    make_cluster_manifest,
    read_share,
)
from benchmarks.emulated.phases import Setting, run_phase
from benchmarks.fidelity.compare import Comparison, compare_batches, compare_runs, format_comparisons
from benchmarks.fidelity.events import read_engine_events
from benchmarks.fidelity.recorded_runs import read_records
from benchmarks.fidelity.simulated import find_goodput_rps, make_cell, replay, simulate
from benchmarks.local_cluster.cluster import POLL_S, BenchmarkCluster, run_cluster, run_to_status
from benchmarks.local_cluster.figures import describe_machine

from sluice_core.sim.sim_setup import Arrival as SimulatedArrival
from sluice_core.strategies import STRATEGIES
from sluice_engine.scheduling.fidelity_recorder import VARIABLE

if TYPE_CHECKING:
    from benchmarks.emulated.arrivals import Lengths, LoadArrival
    from benchmarks.emulated.phases import Phase
    from benchmarks.local_cluster.client import BenchmarkClient

    from sluice_core.records import Slo

# Strategies under which requests stay on their engine: each engine's load is replayed, and batches are compared.
STAYS = frozenset({"Aggregated", "EcoServe"})
# Strategies that serve requests of several TTFT objectives, and how many requests there are for each urgent one.
HAS_URGENT = frozenset({"FlowPrefill"})
URGENT_EVERY = 4


def make_settings(options: argparse.Namespace) -> list[Setting]:
    """Makes the strategies with the sliders of the command line."""
    sliders = {
        "Aggregated": f"0:{options.aggregated}:{options.aggregated}",
        "Disaggregated": f"{options.disaggregated}:{MAX_BATCH_TOKENS}:0",
        "FlowPrefill": options.flowprefill,
    }
    known = [strategy.title for strategy in STRATEGIES.values()]
    if unknown := set(options.strategies) - set(known):
        raise SystemExit(f"--strategies: unknown {sorted(unknown)}, known are {', '.join(known)}")

    def make_setting(name: str) -> Setting:
        share, prefill, decode = sliders.get(name, options.taichi).split(":")  # those without roles use no slider
        chunk_sizes = {"prefillHeavy": int(prefill), "decodeHeavy": int(decode)}
        return Setting(name=name, spec={"strategy": name, "prefillHeavy": read_share(share), "chunkSizes": chunk_sizes})

    return [make_setting(name) for name in options.strategies]


class FidelityRun:
    """One run of the benchmark. Mutable: collects what it finds.

    Args:
        cluster: The cluster.
        client: Of its router.
        options: The command line.
        lengths: Of the requests.
        records: Folder of the engines' records.
        kv_blocks: Of each engine.
    """

    def __init__(
        self,
        cluster: BenchmarkCluster,
        client: BenchmarkClient,
        options: argparse.Namespace,
        lengths: Lengths,
        *,
        records: Path,
        kv_blocks: int,
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._options = options
        self._lengths = lengths
        self._records = records
        self._kv_blocks = kv_blocks
        self._num_loads = 0
        self.comparisons: list[Comparison] = []

    async def measure(self, setting: Setting) -> None:
        """Compares a strategy at every rate; the cluster takes its manifest first."""
        manifest = {**self._cluster.manifest, "spec": {**self._cluster.manifest["spec"], **setting.spec}}
        options = self._options
        cell, slo = make_cell(manifest, self._kv_blocks)
        goodput_rps = None
        rates = [options.rate]

        def make_arrivals(rate: float) -> list[LoadArrival]:
            arrivals = self._make_arrivals(rate)
            return make_urgent(arrivals, options.urgent_ttft_ms) if setting.name in HAS_URGENT else arrivals

        if options.rate is None:
            goodput_rps = find_goodput_rps(
                cell, lambda rate: [to_simulated(arrival, arrival.at_s, slo) for arrival in make_arrivals(rate)]
            )
            print(f"{setting.name}: simulated goodput on these arrivals {goodput_rps:.2f}/s", flush=True)
            rates = [share * goodput_rps for share in options.shares]
        for rate in rates:
            begin_s, before = time.monotonic(), await read_engine_events(self._cluster, self._client)
            phase = await self._load(setting, make_arrivals(rate), rate)
            end_s, after = time.monotonic(), await read_engine_events(self._cluster, self._client)
            seen = [to_simulated(answer.arrival, answer.arrival.at_s + answer.lag_s, slo) for answer in phase.answers]
            records = read_records(self._records, cell.engines[0].profile, begin_s, end_s)
            simulated = simulate(cell, seen, options.simulations)
            comparison = compare_runs(phase, after - before, simulated, records)
            comparison.goodput_rps = goodput_rps
            if setting.name in STAYS:  # an engine's load is its own
                comparison.batches = [compare_batches(record, replay(cell, record.requests)) for record in records]
            self.comparisons.append(comparison)
            print(format_comparisons([comparison]), flush=True)

    def _make_arrivals(self, rate: float) -> list[LoadArrival]:
        return make_arrivals(self._lengths, rate=rate, seconds=self._options.seconds, seed=self._options.seed)

    async def _load(self, setting: Setting, arrivals: list[LoadArrival], rate: float) -> Phase:
        self._num_loads += 1
        return await run_phase(
            self._cluster,
            self._client,
            setting,
            arrivals,
            rate=rate,
            seed=self._options.seed,
            prompt_seed=self._num_loads,
            warm_up_s=0.0,
            timeout_s=ANSWER_TIMEOUT_S,
        )


def make_urgent(arrivals: list[LoadArrival], ttft_slo_ms: int) -> list[LoadArrival]:
    """Gives every ``URGENT_EVERY``-th request this objective."""
    return [
        replace(arrival, ttft_slo_ms=ttft_slo_ms if arrival.number % URGENT_EVERY == 0 else None)
        for arrival in arrivals
    ]


def to_simulated(arrival: LoadArrival, at_s: float, slo: Slo) -> SimulatedArrival:
    """The same request for the simulator."""
    ttft_s = slo.ttft_s if arrival.ttft_slo_ms is None else arrival.ttft_slo_ms / 1e3
    return SimulatedArrival(
        at_s=at_s,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=arrival.output_tokens,
        slo=replace(slo, ttft_s=ttft_s),
        max_output_tokens=arrival.output_tokens,  # as the load says it
    )


async def count_blocks(client: BenchmarkClient) -> int:
    """Waits until all engines have reported how many KV blocks they have; they have equally many."""
    while True:
        blocks = {engine.kv_blocks_total for engine in (await client.read_status()).engines}
        if len(blocks) == 1 and 0 not in blocks:
            return blocks.pop()
        await asyncio.sleep(POLL_S)


async def measure(
    cluster: BenchmarkCluster, options: argparse.Namespace, lengths: Lengths, settings: list[Setting], records: Path
) -> list[Comparison]:
    """Runs everything on a cluster that is starting."""
    async with cluster.connect(options.start_timeout) as client:
        blocks = await count_blocks(client)
        print(f"{options.engines} engines serve, of {blocks} KV blocks", flush=True)
        run = FidelityRun(cluster, client, options, lengths, records=records, kv_blocks=blocks)
        for setting in settings:
            await run.measure(setting)
    return run.comparisons


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--batches", action="store_true", help="one engine alone, iteration by iteration")
    parser.add_argument("--engines", type=int, default=4, help="default %(default)s")
    parser.add_argument("--trace", default="arxiv_4k", help="of benchmarks/traces (default %(default)s)")
    parser.add_argument("--rate", type=float, help="requests per second, instead of shares of the goodput")
    parser.add_argument("--shares", default="0.5,0.85", help="of the simulated goodput (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default %(default)s)")
    parser.add_argument("--simulations", type=int, default=9, help="of each load (default %(default)s)")
    parser.add_argument("--max-output-tokens", type=int, default=1024, help="longer ones are left out (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals (default %(default)s)")
    parser.add_argument("--strategies", default="TaiChi,Aggregated,Disaggregated", help="default %(default)s")
    parser.add_argument("--taichi", default="50%:1024:256", metavar="R:SP:SD", help="its sliders (default %(default)s)")
    parser.add_argument("--aggregated", type=int, default=512, metavar="S", help="its chunk size (default %(default)s)")
    parser.add_argument("--disaggregated", default="50%", metavar="R", help="its P-heavy share (default %(default)s)")
    parser.add_argument(
        "--flowprefill", default="50%:1024:0", metavar="R:SP:SD", help="its sliders (default %(default)s)"
    )
    parser.add_argument(
        "--urgent-ttft-ms",
        type=int,
        default=1000,
        help=f"TTFT objective of one request in {URGENT_EVERY} under "
        "FlowPrefill, which preempts prefills of the others for them (default %(default)s)",
    )
    parser.add_argument("--ttft-ms", type=int, default=4000, help="TTFT objective (default %(default)s)")
    parser.add_argument("--tpot-ms", type=int, default=70, help="TPOT objective (default %(default)s)")
    parser.add_argument("--gpu", default="a100-80g", help="of a profile (default %(default)s)")
    parser.add_argument("--model", default="qwen2.5-14b", help="of a profile (default %(default)s)")
    parser.add_argument(
        "--kv-mib", type=int, help="KV cache of each engine, of the served model; without: the profile's"
    )
    parser.add_argument("--start-timeout", type=float, default=240.0, help="for the cluster's start, in seconds")
    parser.add_argument("--port-base", type=int, default=29300, help="first of 300 ports (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="run in this folder and keep it, logs and records included")
    options = parser.parse_args()
    options.shares = [float(share) for share in options.shares.split(",")]
    options.strategies = options.strategies.split(",")
    if options.batches:
        options.engines, options.strategies = 1, ["Aggregated"]
        options.rate = options.rate or 1.0
    return options


def run_benchmark(options: argparse.Namespace) -> None:
    """Measures, prints, writes."""
    machine = describe_machine()
    lengths = load_lengths(
        options.trace, limit_tokens=MODEL_LIMIT_TOKENS, limit_output_tokens=options.max_output_tokens
    )
    settings = make_settings(options)
    with contextlib.ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-fidelity-")))
        records = folder.absolute() / "records"
        # The launcher hands its environment on to the engines.
        os.environ[VARIABLE] = str(records)
        ports = range(options.port_base + 1, options.port_base + 300)
        manifest = make_cluster_manifest("fidelity", options, settings[0])
        if options.kv_mib:
            manifest["spec"]["engine"]["extraArgs"] = ["--kv-cache-memory-bytes", str(options.kv_mib << 20)]
        cluster = stack.enter_context(run_cluster(folder, manifest, ports=ports))
        comparisons = uvloop.run(measure(cluster, options, lengths, settings, records))
    print()
    print(format_comparisons(comparisons))
    print("machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    if options.json:
        result = {
            "benchmark": "fidelity",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": sys.argv,
            "machine": machine,
            "lengths": lengths.source,
            "settings": [asdict(setting) for setting in settings],
            "comparisons": [comparison.as_json() for comparison in comparisons],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {options.json}")


def main() -> int:
    """Runs the command line; returns the exit status."""
    return run_to_status(lambda: run_benchmark(parse_options()))


if __name__ == "__main__":
    sys.exit(main())
