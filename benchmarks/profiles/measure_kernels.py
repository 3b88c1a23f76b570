"""Kernels on the GPU that is here against the measurements that its profile is made of.

    python -m benchmarks.profiles.measure_kernels --gpu h200-141g [--json OUT]

GEMMs are PyTorch's, attention is vLLM's FlashAttention 3 over a paged KV cache. Every launch finds weights and KV that
no launch shortly before it used, as in a model's layers. A CUDA graph holds many launches, so that none waits for the
host. Needs PyTorch and vLLM's build for GPUs, and nothing of a cluster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from benchmarks.local_cluster.figures import describe_machine, format_table

from sluice_core.latency import compute_attention_work
from sluice_core.latency.kernel_fits import interpolate, load_kernels
from sluice_core.latency.known_models import MODELS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_core.latency.kernel_fits import Kernels

US = 1e6
MODEL_NAMES = ("llama-3-8b", "qwen2.5-14b")
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Prefill chunks: their tokens, and the context before them.
CHUNKS = ((256, 0), (1024, 0), (4096, 0), (8192, 0), (512, 4096), (512, 16_384), (2048, 16_384))
# Decodes and their context.
BATCHES = ((1, 1024), (1, 16_384), (16, 1024), (16, 16_384), (64, 1024), (64, 4096), (256, 128), (256, 1024))
BLOCK_TOKENS = 16
# More than the L2 caches of any of the GPUs.
COLD_BYTES = 512 << 20
NUM_LAUNCHES = 24
NUM_REPLAYS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """A kernel here and in the profile.

    Args:
        kernel: What it is.
        measured_s: Median of the replays, of one launch.
        profile_s: What the profile says.
    """

    kernel: str
    measured_s: float
    profile_s: float

    @property
    def error(self) -> float:
        """(profile - measured) / measured."""
        return self.profile_s / self.measured_s - 1


def time_launches(launches: Sequence[Callable[[], object]]) -> float:
    """Times kernels that are launched one after the other, as a CUDA graph; seconds of one, the median of replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[:3]:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(NUM_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(launches))
    return float(statistics.median(times))


def measure_gemms(kernels: Kernels) -> list[KernelTime]:
    """Measures the four GEMMs of a layer of each model."""
    found = []
    for model in MODEL_NAMES:
        shape = MODELS[model]
        hidden, inner = shape.hidden_size, shape.intermediate_size
        keys, queries = shape.num_kv_heads * shape.head_size, shape.num_heads * shape.head_size
        gemms = ((queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
        for outputs, inputs in gemms:
            copies = max(2, min(NUM_LAUNCHES, COLD_BYTES // (2 * outputs * inputs) + 1))
            weights = [draw(outputs, inputs) for _ in range(copies)]
            curve = kernels.make_gemm_curve(outputs, inputs)
            for tokens in TOKENS:
                inputs_of_all = draw(tokens, inputs)
                launches = [
                    partial(torch.nn.functional.linear, inputs_of_all, weights[index % copies])
                    for index in range(NUM_LAUNCHES)
                ]
                found.append(
                    KernelTime(
                        kernel=f"GEMM {inputs} x {outputs}, {tokens} tokens",
                        measured_s=time_launches(launches),
                        profile_s=interpolate(kernels.gemm_tokens, curve, tokens),
                    )
                )
    return found


def measure_attention(kernels: Kernels) -> list[KernelTime]:
    """Measures attention of prefill chunks and of decodes, with each model's heads."""
    found = []
    for model in MODEL_NAMES:
        shape = MODELS[model]
        heads = shape.num_heads, shape.num_kv_heads, shape.head_size
        prefill = kernels.fit_prefill_attention(heads[2], heads[0], heads[1]).coefficients
        decode = kernels.fit_decode_attention(heads[2], heads[0], heads[1]).coefficients
        cache = PagedCache(heads[1], heads[2])
        for chunk, context in CHUNKS:
            work = compute_attention_work(chunk, context)
            found.append(
                KernelTime(
                    kernel=f"attention of {heads[0]}/{heads[1]} heads, chunk of {chunk} after {context}",
                    measured_s=time_launches(cache.make_launches(heads[0], [chunk], [context + chunk])),
                    profile_s=prefill[0] + prefill[1] * chunk + prefill[2] * work,
                )
            )
        for decodes, context in BATCHES:
            found.append(
                KernelTime(
                    kernel=f"attention of {heads[0]}/{heads[1]} heads, {decodes} decodes after {context}",
                    measured_s=time_launches(cache.make_launches(heads[0], [1] * decodes, [context] * decodes)),
                    profile_s=decode[0] + decode[1] * decodes + decode[2] * decodes * context,
                )
            )
    return found


class PagedCache:
    """KV of one layer in blocks, as vLLM keeps it.

    Args:
        kv_heads: Key and value heads.
        head_size: Values of each.
    """

    def __init__(self, kv_heads: int, head_size: int) -> None:
        self._num_blocks = (4 << 30) // (2 * 2 * kv_heads * head_size * BLOCK_TOKENS)
        self._keys, self._values = (draw(self._num_blocks, BLOCK_TOKENS, kv_heads, head_size) for _ in range(2))
        self._head_size = head_size

    def make_launches(self, num_heads: int, queries: list[int], contexts: list[int]) -> list[Callable[[], object]]:
        """Makes launches of one batch, each of which reads other blocks.

        Args:
            num_heads: Query heads.
            queries: New tokens of each request.
            contexts: All tokens of each, the new ones included.
        """
        # Installed with vLLM's build for GPUs alone.
        from vllm.vllm_flash_attn import flash_attn_varlen_func  # noqa: PLC0415

        device = "cuda"
        starts = torch.tensor([*accumulate(queries, initial=0)], dtype=torch.int32, device=device)
        used = torch.tensor(contexts, dtype=torch.int32, device=device)
        query = draw(sum(queries), num_heads, self._head_size)
        out = torch.empty_like(query)
        per_request = -(-max(contexts) // BLOCK_TOKENS)
        order = torch.randperm(self._num_blocks, dtype=torch.int32)
        tables = []
        for index in range(NUM_LAUNCHES):
            at = index * per_request * len(queries) % max(1, self._num_blocks - per_request * len(queries))
            part = order[at : at + per_request * len(queries)]
            tables.append(part.view(len(queries), per_request).to(device))

        def launch(table: torch.Tensor) -> object:
            return flash_attn_varlen_func(
                q=query,
                k=self._keys,
                v=self._values,
                out=out,
                max_seqlen_q=max(queries),
                cu_seqlens_q=starts,
                max_seqlen_k=max(contexts),
                seqused_k=used,
                causal=True,
                block_table=table,
                fa_version=3,
            )

        return [partial(launch, table) for table in tables]


def draw(*shape: int) -> torch.Tensor:
    """Draws a matrix: zeros would be computed faster than real values are."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def format_times(found: Sequence[KernelTime]) -> str:
    """Formats the table."""
    rows = [
        [row.kernel, f"{US * row.measured_s:.1f}", f"{US * row.profile_s:.1f}", f"{row.error:+.1%}"] for row in found
    ]
    return format_table(("kernel", "measured us", "profile us", "error"), rows)


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True, help="the GPU that is here, by its name in the profiles")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    kernels = load_kernels(options.gpu)
    groups = {"GEMMs": measure_gemms(kernels), "attention": measure_attention(kernels)}
    for name, found in groups.items():
        print(format_times(found))
        print(f"{name}: mean of abs(error) {statistics.fmean(abs(row.error) for row in found):.1%}\n", flush=True)
    if options.json:
        result = {
            "benchmark": "profile kernels",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "machine": describe_machine(),
            "kernels": {name: [asdict(row) for row in found] for name, found in groups.items()},
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
