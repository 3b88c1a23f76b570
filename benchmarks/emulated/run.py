"""Sixteen emulated GPU engines behind one router: TaiChi, Aggregated and Disaggregated under the same arrivals.

    .venv/bin/python -m benchmarks.emulated.run [--json OUT] [--quick] [--trace NAME] [--rates 8,12] [--seeds 1,2]

The engines are real (vLLM's scheduler and KV manager, our plug-in and server); only the forward pass is replaced by
the clock of a latency model, in real time. Strategies follow each other on one cluster, by edits of its manifest;
arrivals and lengths are the same for each, prompts are not. How to read it: docs/measurements/emulated-engines.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from benchmarks.emulated.arrivals import Lengths, LoadArrival, load_lengths, make_arrivals
from benchmarks.emulated.load import LoadAnswer, run_load
from benchmarks.emulated.manifests import ANSWER_TIMEOUT_S, MODEL_LIMIT_TOKENS, make_cluster_manifest, read_share
from benchmarks.emulated.phases import Phase, Setting, run_phase
from benchmarks.emulated.report import compute_ratios, find_warnings, format_moves, format_phases, format_ratios
from benchmarks.local_cluster.client import StreamFailedError
from benchmarks.local_cluster.cluster import BenchmarkCluster, run_cluster, run_to_status
from benchmarks.local_cluster.figures import describe_machine

from sluice_core.records import IterationShape
from sluice_engine.emulation.emulated_gpu_profile import EmulatedGpu, load_gpu
from sluice_engine.errors import SettingsError

if TYPE_CHECKING:
    from benchmarks.local_cluster.client import BenchmarkClient

LONE_PROMPT_TOKENS, LONE_OUTPUT_TOKENS = 512, 64
# Enough iterations for the router's latency model before anything counts.
FITTING_S = 15.0
TIME_SCALE = 1.0
SHOWN_TOKENS = (8, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def make_settings(options: argparse.Namespace) -> list[Setting]:
    """Makes the strategies with the sliders of the command line."""
    share, prefill, decode = options.taichi.split(":")
    known = {
        "TaiChi": Setting(
            name="TaiChi",
            spec={
                "strategy": "TaiChi",
                "prefillHeavy": read_share(share),
                "chunkSizes": {"prefillHeavy": int(prefill), "decodeHeavy": int(decode)},
            },
        ),
        "Aggregated": Setting(
            name="Aggregated",
            spec={
                "strategy": "Aggregated",
                "prefillHeavy": read_share(share),
                "chunkSizes": {"prefillHeavy": int(options.aggregated), "decodeHeavy": int(options.aggregated)},
            },
        ),
        "Disaggregated": Setting(
            name="Disaggregated",
            spec={
                "strategy": "Disaggregated",
                "prefillHeavy": read_share(options.disaggregated),
                "chunkSizes": {"prefillHeavy": int(prefill), "decodeHeavy": 0},
            },
        ),
    }
    return [known[name] for name in options.strategies.split(",")]


class EmulatedRun:
    """One run of the benchmark. Mutable: collects the phases.

    Args:
        cluster: The cluster.
        client: Of its router.
        options: The command line.
        lengths: Of the requests.
        settings: The strategies.
    """

    def __init__(
        self,
        cluster: BenchmarkCluster,
        client: BenchmarkClient,
        options: argparse.Namespace,
        lengths: Lengths,
        settings: list[Setting],
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._options = options
        self._lengths = lengths
        self._settings = settings
        self._num_loads = 0
        self.phases: list[Phase] = []
        self.lone_ratio = float("nan")

    async def measure_all(self) -> None:
        """Warms up, checks the clock with a lone request, and runs every strategy at every rate with every seed."""
        options = self._options
        self.lone_ratio = await self._measure_lone()
        print(f"lone request: {self.lone_ratio:.3f} of the modelled time per output token", flush=True)
        await self._fit()
        turn = 0
        for rate in options.rates:
            for seed in options.seeds:
                arrivals = make_arrivals(
                    self._lengths, rate=rate, seconds=options.warmup_seconds + options.seconds, seed=seed
                )
                # The order turns, so that no strategy always comes first.
                for setting in [*self._settings[turn:], *self._settings[:turn]]:
                    await self._measure(setting, arrivals, rate, seed)
                turn = (turn + 1) % len(self._settings)

    async def _measure(self, setting: Setting, arrivals: list[LoadArrival], rate: float, seed: int) -> None:
        phase = await run_phase(
            self._cluster,
            self._client,
            setting,
            arrivals,
            rate=rate,
            seed=seed,
            prompt_seed=self._next_prompt_seed(),
            warm_up_s=self._options.warmup_seconds,
            timeout_s=ANSWER_TIMEOUT_S,
        )
        self.phases.append(phase)
        print(
            f"  {setting.name} at {rate:g}/s, seed {seed}: {len(phase.answers)} requests, attainment"
            f" {100 * phase.attainment:.1f} %, TTFT p90 {phase.compute_ttft_ms(90):.0f} ms,"
            f" TPOT p90 {phase.compute_tpot_ms(90):.1f} ms, {phase.cores.busy:.2f} cores busy",
            flush=True,
        )

    async def _measure_lone(self) -> float:
        """Time per output token of a lone request, over the modelled one: is the clock right at all?"""
        arrival = LoadArrival(number=0, at_s=0.0, prompt_tokens=LONE_PROMPT_TOKENS, output_tokens=LONE_OUTPUT_TOKENS)
        profile = find_gpu(self._options).profile
        shape = IterationShape(num_decodes=1, decode_context_tokens=LONE_PROMPT_TOKENS + LONE_OUTPUT_TOKENS // 2)
        answers = await self._load([arrival])
        if answers[0].error or answers[0].tpot_s is None:
            raise StreamFailedError(f"the lone request failed: {answers[0].error}")
        return answers[0].tpot_s / profile.estimate_shape_s(shape)

    async def _fit(self) -> None:
        """Lets the router see iterations of every size; nothing of it counts."""
        seconds = min(FITTING_S, self._options.seconds)
        arrivals = make_arrivals(self._lengths, rate=max(self._options.rates) / 2, seconds=seconds, seed=0)
        await self._load(arrivals)

    async def _load(self, arrivals: list[LoadArrival]) -> list[LoadAnswer]:
        return await run_load(
            self._options.port_base,
            arrivals,
            model=self._cluster.served_name,
            prompt_seed=self._next_prompt_seed(),
            timeout_s=ANSWER_TIMEOUT_S,
        )

    def _next_prompt_seed(self) -> int:
        self._num_loads += 1
        return self._num_loads


def find_gpu(options: argparse.Namespace) -> EmulatedGpu:
    """What the command line's GPU and model emulate."""
    return load_gpu(options.gpu, options.model)


def format_model(options: argparse.Namespace) -> str:
    """States the latency model's coefficients."""
    gpu = find_gpu(options)
    profile = gpu.profile
    linear = ", ".join(f"{tokens}: {profile.estimate_linear_s(tokens) * 1e3:.3g}" for tokens in SHOWN_TOKENS)
    return (
        f"latency model: {options.model} on {options.gpu}, time scale {TIME_SCALE:g} (real time). "
        f"Iteration of n tokens = linear(n) [ms at n: {linear}]"
        f" + per prefill chunk {profile.prefill_base_s * 1e6:.3g} us"
        f" + {profile.prefill_token_s * 1e6:.3g} us/token + {profile.prefill_work_s * 1e9:.3g} ns * c * (context + c/2)"
        f"; with decodes {profile.decode_base_s * 1e6:.3g} us + {profile.decode_request_s * 1e6:.3g} us each"
        f" + {profile.decode_context_s * 1e9:.3g} ns/context token; "
        f"{profile.host_sequence_s * 1e6:.3g} us per chunk and"
        f" decode. KV: {gpu.kv_tokens} tokens, {gpu.kv_bytes_per_token} bytes each on the link."
    )


def describe_model(options: argparse.Namespace) -> dict[str, Any]:
    """The same for the file; ``linear_s`` at a few numbers of tokens stands for the table."""
    gpu = find_gpu(options)
    linear_s = {tokens: gpu.profile.estimate_linear_s(tokens) for tokens in SHOWN_TOKENS}
    return {
        "gpu": options.gpu,
        "model": options.model,
        **asdict(gpu),
        "profile": asdict(gpu.profile) | {"linear_s": linear_s},
    }


async def measure(
    cluster: BenchmarkCluster, options: argparse.Namespace, lengths: Lengths, settings: list[Setting]
) -> tuple[list[Phase], float]:
    """Runs everything on a cluster that is starting; returns the phases and the lone request's ratio."""
    started_s = time.monotonic()
    async with cluster.connect(options.start_timeout) as client:
        print(f"{options.engines} engines serve after {time.monotonic() - started_s:.0f} s", flush=True)
        run = EmulatedRun(cluster, client, options, lengths, settings)
        await run.measure_all()
    return run.phases, run.lone_ratio


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run of under a minute; its figures mean little")
    parser.add_argument("--engines", type=int, default=16, help="default %(default)s")
    parser.add_argument("--trace", default="arxiv_4k", help="of benchmarks/traces (default %(default)s)")
    parser.add_argument("--rates", default="16", help="requests per second, with commas (default %(default)s)")
    parser.add_argument("--seeds", default="1", help="of the arrivals, with commas (default %(default)s)")
    parser.add_argument(
        "--max-output-tokens",
        type=int,
        default=1024,
        help="rows with longer outputs are left out: they would only prolong the emptying (default %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="arrivals that count (default %(default)s)")
    parser.add_argument("--warmup-seconds", type=float, default=15.0, help="arrivals before them (default %(default)s)")
    parser.add_argument("--strategies", default="TaiChi,Aggregated,Disaggregated", help="default %(default)s")
    parser.add_argument("--taichi", default="50%:1024:256", metavar="R:SP:SD", help="its sliders (default %(default)s)")
    parser.add_argument("--aggregated", type=int, default=512, metavar="S", help="its chunk size (default %(default)s)")
    parser.add_argument("--disaggregated", default="50%", metavar="R", help="its P-heavy share (default %(default)s)")
    parser.add_argument("--ttft-ms", type=int, default=4000, help="TTFT objective (default %(default)s)")
    parser.add_argument("--tpot-ms", type=int, default=70, help="TPOT objective (default %(default)s)")
    parser.add_argument("--gpu", default="a100", help="of a profile (default %(default)s)")
    parser.add_argument("--model", default="Qwen2.5-14B", help="of a profile (default %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="for the cluster's start, in seconds")
    parser.add_argument("--port-base", type=int, default=28500, help="first of 500 ports (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="run in this folder and keep it, logs included")
    options = parser.parse_args()
    if options.quick:
        options.engines, options.seconds, options.warmup_seconds = 4, 6.0, 1.0
        options.rates, options.seeds, options.max_output_tokens = "3", "1", 64
    options.rates = [float(rate) for rate in options.rates.split(",")]
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    try:
        find_gpu(options)
    except SettingsError as error:
        parser.error(str(error))
    if unknown := set(options.strategies.split(",")) - {"TaiChi", "Aggregated", "Disaggregated"}:
        parser.error(f"--strategies: unknown {sorted(unknown)}")
    return options


def print_result(options: argparse.Namespace, phases: list[Phase], notes: list[str]) -> None:
    """Prints the tables and what is needed to read them."""
    slos = {"ttft_slo_s": options.ttft_ms / 1e3, "tpot_slo_s": options.tpot_ms / 1e3}
    print(f"\n{format_phases(phases, **slos)}\n")
    print(format_moves(phases))
    ratios = compute_ratios(phases)
    if ratios:
        print(f"\n{format_ratios(ratios)}\n(above 1: a latency is longer than TaiChi's; attainment is higher)\n")
    print("\n".join(notes))
    for warning in find_warnings(phases, len(os.sched_getaffinity(0))):
        print(f"WARNING: {warning}")


def make_notes(options: argparse.Namespace, lengths: Lengths, settings: list[Setting], lone_ratio: float) -> list[str]:
    """Says under which conditions the figures were taken."""
    left_out = f", {lengths.num_left_out} longer rows left out" if lengths.num_left_out else ""
    load = (
        f"{options.engines} engines, 1 router and the load generator on {len(os.sched_getaffinity(0))} cores; Poisson"
        f" arrivals for {options.warmup_seconds:g} + {options.seconds:g} s (the first part does not count), lengths of"
        f" {lengths.source}{left_out}; objectives {options.ttft_ms} ms, {options.tpot_ms} ms."
    )
    lone = (
        f"A lone request took {lone_ratio:.3f} of the modelled time per output token. Columns engines, router, load,"
        " machine: cores used while requests arrived."
    )
    return [load, *(setting.describe() for setting in settings), format_model(options), lone]


def main() -> int:
    """Runs the command line; returns the exit status."""
    return run_to_status(lambda: run_benchmark(parse_options()))


def run_benchmark(options: argparse.Namespace) -> None:
    """Measures, prints, writes."""
    machine = describe_machine()
    lengths = load_lengths(
        options.trace, limit_tokens=MODEL_LIMIT_TOKENS, limit_output_tokens=options.max_output_tokens
    )
    settings = make_settings(options)
    print(f"lengths: {lengths.source}, {len(lengths.rows)} rows", flush=True)
    with contextlib.ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-emulated-")))
        ports = range(options.port_base + 1, options.port_base + 500)
        manifest = make_cluster_manifest("emulated", options, settings[0])
        cluster = stack.enter_context(run_cluster(folder, manifest, ports=ports))
        phases, lone_ratio = uvloop.run(measure(cluster, options, lengths, settings))
    notes = make_notes(options, lengths, settings, lone_ratio)
    print_result(options, phases, [*notes, "machine: " + ", ".join(f"{key} {value}" for key, value in machine.items())])
    if options.json:
        result = {
            "benchmark": "emulated",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": sys.argv,
            "is_quick": options.quick,
            "machine": machine,
            "lengths": lengths.source,
            "notes": notes,
            "objectives": {"ttft_ms": options.ttft_ms, "tpot_ms": options.tpot_ms},
            "settings": [asdict(setting) for setting in settings],
            "latency_model": describe_model(options),
            "time_scale": TIME_SCALE,
            "lone_request_ratio": lone_ratio,
            "phases": [phase.as_json() for phase in phases],
            "ratios": compute_ratios(phases),
            "warnings": find_warnings(phases, len(os.sched_getaffinity(0))),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {options.json}")


if __name__ == "__main__":
    sys.exit(main())
