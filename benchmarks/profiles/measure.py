"""Iterations of a real engine on a GPU against the latency profile of that model and GPU.

    .venv/bin/python -m benchmarks.profiles.measure --gpu h200-141g [--model llama-3-8b] [--json OUT] [--logs FOLDER]

``sluice up`` runs one engine with made-up weights of the model's size. Requests make batches of decodes, prefill chunks
and both together; the engine's own record has what each iteration held and how long it took. A cell's figure is the
median over its iterations, and the profile's is that of the same iterations. docs/measurements/latency-profiles.md
has what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from benchmarks.fidelity.recorded_runs import read_records
from benchmarks.hand_off.hops import draw_prompt
from benchmarks.local_cluster.client import TokenStream
from benchmarks.local_cluster.cluster import BenchmarkCluster, make_manifest, run_cluster, run_to_status
from benchmarks.local_cluster.figures import compute_percentile, describe_machine, format_table
from benchmarks.local_cluster.sized_models import make_models, use_model

from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_engine.scheduling.fidelity_recorder import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.fidelity.recorded_runs import RecordedIteration
    from benchmarks.local_cluster.client import BenchmarkClient

    from sluice_core.latency import ModelOnGpu

MS = 1e3
GIB = 1 << 30
MAX_BATCH_TOKENS = 8192
# Iterations of a cell; vLLM needs a few until its batches are full.
NUM_ITERATIONS = 40
# After the last answer its iteration may still be under way.
REST_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Iterations that are alike.

    Args:
        num_decodes: Decodes of each.
        context_tokens: Prompt of each decode.
        chunk_size_tokens: Tokens of an iteration that has a prefill; 0: it has none.
        prompt_tokens: Prompts that are prefilled.
        num_prompts: Of them.
    """

    num_decodes: int = 0
    context_tokens: int = 0
    chunk_size_tokens: int = 0
    prompt_tokens: int = 0
    num_prompts: int = 0

    def count_kv_tokens(self) -> int:
        """Tokens of KV cache that the cell needs."""
        return self.num_decodes * (self.context_tokens + self.count_output_tokens()) + 2 * self.prompt_tokens

    def count_output_tokens(self) -> int:
        """Tokens of a decode's answer: the first one goes on until the last one has come and all are measured."""
        prefills = self.num_decodes * self.context_tokens + self.num_prompts * self.prompt_tokens
        room = (self.chunk_size_tokens or MAX_BATCH_TOKENS) - self.num_decodes
        return NUM_ITERATIONS + math.ceil(prefills / max(1, room)) + self.num_decodes // 8

    def holds(self, iteration: RecordedIteration) -> bool:
        """Says whether an iteration is one of the cell's."""
        batch = iteration.batch
        if batch.num_decodes != self.num_decodes or not iteration.ended_s:
            return False
        return batch.num_decodes + batch.prefill_tokens == (self.chunk_size_tokens or self.num_decodes)


CELLS = (
    *(
        Cell(num_decodes=decodes, context_tokens=context)
        for context, most in ((128, 256), (1024, 256), (4096, 64), (16_384, 16))
        for decodes in (1, 4, 16, 64, 128, 256)
        if decodes <= most
    ),
    *(
        Cell(chunk_size_tokens=chunk, prompt_tokens=prompt, num_prompts=max(4, 4 * chunk // prompt))
        for chunk, prompt in ((256, 2048), (512, 8192), (2048, 512), (2048, 16_384), (8192, 1024), (8192, 24_576))
    ),
    *(
        Cell(num_decodes=decodes, context_tokens=context, chunk_size_tokens=chunk, prompt_tokens=8192, num_prompts=2)
        for decodes, context in ((16, 4096), (64, 1024))
        for chunk in (512, 2048)
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a cell came to.

    Args:
        cell: The cell.
        num_iterations: That were measured.
        measured_s: Their median.
        spread_s: Their 10th and 90th percentile.
        profile_s: Median of what the profile says of them.
    """

    cell: Cell
    num_iterations: int
    measured_s: float
    spread_s: tuple[float, float]
    profile_s: float

    @property
    def error(self) -> float:
        """(profile - measured) / measured."""
        return self.profile_s / self.measured_s - 1


class ProfileRun:
    """Runs the cells. Mutable: collects what it finds.

    Args:
        cluster: The cluster.
        client: Of its router.
        records: Folder of the engine's record.
        on_gpu: The profile.
        seed: Of the prompts.
    """

    def __init__(
        self, cluster: BenchmarkCluster, client: BenchmarkClient, records: Path, on_gpu: ModelOnGpu, seed: int
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._records = records
        self._on_gpu = on_gpu
        self._rng = random.Random(seed)
        self.findings: list[Finding] = []

    async def measure(self, cell: Cell) -> None:
        """Measures a cell; the engine is idle before and after."""
        chunk = cell.chunk_size_tokens or MAX_BATCH_TOKENS
        await self._cluster.edit(self._client, lambda spec: spec["chunkSizes"].update(prefillHeavy=chunk))
        begin_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            streams = [
                self._start(group, cell.context_tokens, cell.count_output_tokens()) for _ in range(cell.num_decodes)
            ]
            for stream in streams:
                await stream.wait_tokens(2)
            for _ in range(cell.num_prompts):
                self._start(group, cell.prompt_tokens, 1)
        await asyncio.sleep(REST_S)
        (record,) = read_records(self._records, self._on_gpu.profile, begin_s, time.monotonic())
        found = [iteration for iteration in record.iterations if cell.holds(iteration)]
        if len(found) < 2:
            print(f"  {cell}: only {len(found)} such iterations", flush=True)
            return
        measured = [iteration.measured_s for iteration in found]
        self.findings.append(
            Finding(
                cell=cell,
                num_iterations=len(found),
                measured_s=statistics.median(measured),
                spread_s=(compute_percentile(measured, 10), compute_percentile(measured, 90)),
                profile_s=statistics.median(iteration.duration_s for iteration in found),
            )
        )
        print(format_findings(self.findings[-1:]).splitlines()[-1], flush=True)

    def _start(self, group: asyncio.TaskGroup, prompt_tokens: int, max_tokens: int) -> TokenStream:
        stream = TokenStream()
        group.create_task(self._client.generate(stream, draw_prompt(self._rng, prompt_tokens), max_tokens))
        return stream


def format_findings(findings: Sequence[Finding]) -> str:
    """Formats the table."""
    header = (
        "decodes",
        "context",
        "chunk size",
        "prompts",
        "iterations",
        "measured ms",
        "p10",
        "p90",
        "profile ms",
        "error",
    )
    rows = [
        [
            str(found.cell.num_decodes),
            str(found.cell.context_tokens or "-"),
            str(found.cell.chunk_size_tokens or "-"),
            str(found.cell.prompt_tokens or "-"),
            str(found.num_iterations),
            *(f"{MS * value:.2f}" for value in (found.measured_s, *found.spread_s, found.profile_s)),
            f"{found.error:+.1%}",
        ]
        for found in findings
    ]
    return format_table(header, rows, num_left=0)


async def measure(cluster: BenchmarkCluster, options: argparse.Namespace, records: Path) -> list[Finding]:
    """Runs everything on a cluster that is starting."""
    on_gpu = load_model_on_gpu(options.model, options.gpu)
    async with cluster.connect(options.start_timeout) as client:
        print("the engine serves", flush=True)
        run = ProfileRun(cluster, client, records, on_gpu, options.seed)
        capacity = options.kv_gib * GIB // on_gpu.kv_bytes_per_token
        for cell in CELLS:
            if cell.count_kv_tokens() <= capacity:
                await run.measure(cell)
    return run.findings


def make_cluster_manifest(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the manifest of one engine, which may be late with everything."""
    manifest = make_manifest("profile", http_port=options.port_base, replicas=1)
    spec = manifest["spec"]
    spec["strategy"] = "Aggregated"
    spec["engine"]["maxBatchTokens"] = MAX_BATCH_TOKENS
    spec["slo"] |= {"ttftMilliseconds": 600_000, "tpotMilliseconds": 60_000}
    use_model(
        spec,
        options.model,
        kv_cache_bytes=options.kv_gib * GIB,
        memory_share=options.memory_share,
        arguments=options.engine_args.split(),
    )
    return manifest


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True, help="the GPU that is here, by its name in the profiles")
    parser.add_argument("--model", default="llama-3-8b", help="of a profile (default %(default)s)")
    parser.add_argument("--kv-gib", type=int, default=60, help="KV cache of the engine, in GiB (default %(default)s)")
    parser.add_argument("--memory-share", type=float, default=0.9, help="of the GPU's memory (default %(default)s)")
    parser.add_argument("--engine-args", default="", help="further arguments of vLLM, with spaces")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--logs", type=Path, help="run in this folder and keep it, logs and records included")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="for the engine's start, in seconds")
    parser.add_argument("--port-base", type=int, default=27300, help="first of 300 ports (default %(default)s)")
    return parser.parse_args()


def run_benchmark(options: argparse.Namespace) -> None:
    """Measures, prints, writes."""
    machine = describe_machine()
    with ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-profile-")))
        records = folder.absolute() / "records"
        # The launcher hands its environment on to the engine.
        os.environ[VARIABLE] = str(records)
        models = make_models(options.model, folder.absolute() / "models")
        ports = range(options.port_base + 1, options.port_base + 300)
        cluster = stack.enter_context(run_cluster(folder, make_cluster_manifest(options), ports=ports, models=models))
        findings = uvloop.run(measure(cluster, options, records))
    print()
    print(format_findings(findings))
    mean = statistics.fmean(abs(found.error) for found in findings)
    print(f"mean of abs(error): {mean:.1%} over {len(findings)} cells")
    if options.json:
        result = {
            "benchmark": "profiles",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": sys.argv,
            "machine": machine,
            "findings": [asdict(found) for found in findings],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {options.json}")


def main() -> int:
    """Runs the command line; returns the exit status."""
    return run_to_status(lambda: run_benchmark(parse_options()))


if __name__ == "__main__":
    sys.exit(main())
