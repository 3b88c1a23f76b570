"""Packs measured kernels into the data of ``sluice_core.latency``.

    .venv/bin/python -m benchmarks.profiles.convert SOURCES [--out DIRECTORY]

The measurements are not in the repository; the help of SOURCES says where each comes from. Nothing is fitted. Left out are
types other than bfloat16, sliding windows, batches of several prompts, contexts under 128 tokens, and decode batches of more
than 512 requests or 400k tokens of context. Times are whole nanoseconds with four significant digits. Licences:
``core/sluice_core/latency/data/NOTICE.md``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

SOURCES_HELP = """folder with the measurements; files keep their names, unless it says otherwise:
aiconfigurator/{a100_sxm,h100_sxm,h200_sxm,l40s}/
    PyPI package aiconfigurator-core 0.12.0, folder systems/data; the files of vllm/VERSION and nccl/VERSION
    carry that path in their name (vllm_0.24.0_gemm_perf.parquet); beside them systems/*.yaml of the GPU
vidur/
    github.com/microsoft/vidur, commit 7d47513, folder data/profiling, gzipped: compute/a100/OWNER/MODEL/mlp.csv is
    a100_mlp_MODEL.csv.gz; network/KIND/all_reduce.csv is all_reduce_KIND.csv.gz; blob ee3dec76 of its history
    (data/profiling/a100/attention.csv) is a100_attention_64q8kv_tp2.csv.gz
distserve/
    github.com/LLMServe/DistServe, commit 82831f1, folder simdistserve/estimators/profile_data"""
DATA = Path(__file__).parents[2] / "core" / "sluice_core" / "latency" / "data"
# Our name, folder of aiconfigurator, version of its vLLM tables and of its all-reduce table.
GPUS = (
    ("a100-80g", "a100_sxm", "vllm_0.14.0", "vllm_0.14.0"),
    ("h100-80g", "h100_sxm", "vllm_0.24.0", "vllm_0.24.0"),
    ("h200-141g", "h200_sxm", "vllm_0.24.0", "vllm_0.24.0"),
    ("l40s-48g", "l40s", "vllm_0.24.0", "vllm_0.22.0"),
)
# Our name and vidur's.
VIDUR_MODELS = (("llama-2-70b", "Llama-2-70b-hf"), ("codellama-34b", "CodeLlama-34b-Instruct-hf"))
VIDUR_TENSOR_PARALLEL = (1, 2, 4, 8)
# Two GPUs are the pair with NVLink between them, more are a DGX.
VIDUR_ALL_REDUCES = ((2, "all_reduce_a100_pairwise_nvlink"), (4, "all_reduce_a100_dgx"), (8, "all_reduce_a100_dgx"))
# The nine operators of a layer; the embedding is not one of them.
VIDUR_OPERATORS = (
    "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm", "mlp_up_proj",
    "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip
LEAST_CONTEXT_TOKENS = 128
MOST_DECODES = 512
MOST_DECODE_CONTEXT_TOKENS = 400_000
DISTSERVE_MODEL = "facebook/opt-13b"

Json = dict[str, Any]
Grid = dict[tuple[int, ...], float]


def convert(source: Path) -> dict[str, Json]:
    """Makes every file of the package's data, by name."""
    files = {
        f"{name}.json.gz": convert_gpu(source / "aiconfigurator" / folder, kernels, reduces)
        for name, folder, kernels, reduces in GPUS
    }
    files["vidur.json.gz"] = convert_vidur(source / "vidur")
    files["distserve.json.gz"] = convert_distserve(source / "distserve")
    return files


def convert_gpu(folder: Path, kernels: str, reduces: str) -> Json:
    """Packs one GPU of aiconfigurator."""
    facts = yaml.safe_load((folder / f"{folder.name}.yaml").read_text())["gpu"]
    return {
        "memory_bytes": facts["mem_capacity"],
        "memory_bytes_per_s": facts["mem_bw"],
        "gemm": convert_gemms(_read(folder / f"{kernels}_gemm_perf.parquet", gemm_dtype="bfloat16")),
        "prefill_attention": convert_prefill_attention(
            _read(folder / f"{kernels}_context_attention_perf.parquet", kv_cache_dtype="bfloat16", batch_size=1)
        ),
        "decode_attention": convert_decode_attention(
            _read(folder / f"{kernels}_generation_attention_perf.parquet", kv_cache_dtype="bfloat16")
        ),
        "all_reduce": convert_all_reduces(
            _read(folder / f"{reduces}_custom_allreduce_perf.parquet", kernel_source="vLLM_custom_graph")
        ),
    }


def convert_gemms(rows: list[Json]) -> Json:
    """Packs GEMMs as ``ns[n][k][m]``; holes of the grid are filled along n."""
    times = _average(((row["m"], row["n"], row["k"]), row["latency"]) for row in rows)
    axes = [sorted({key[axis] for key in times}) for axis in range(3)]
    tokens, outputs, inputs = axes
    curves = [
        [[_round_ns(_fill(times, token, output, k, outputs)) for token in tokens] for k in inputs] for output in outputs
    ]
    return {"tokens": tokens, "outputs": outputs, "inputs": inputs, "ns": curves}


def _fill(times: Grid, tokens: int, outputs: int, inputs: int, measured: list[int]) -> float:
    """Looks a GEMM up; where it was not measured, a straight line between neighbours in n, beyond the last proportional."""
    if (found := times.get((tokens, outputs, inputs))) is not None:
        return found
    known = [n for n in measured if (tokens, n, inputs) in times]
    for low, high in pairwise(known):
        if low < outputs < high:
            share = (outputs - low) / (high - low)
            return times[tokens, low, inputs] * (1 - share) + times[tokens, high, inputs] * share
    return times[tokens, known[-1], inputs] * outputs / known[-1]


def convert_prefill_attention(rows: list[Json]) -> Json:
    """Packs attention of one prompt without cached context, by head size, heads and KV heads."""
    kept = [row for row in rows if row["isl"] >= LEAST_CONTEXT_TOKENS and not row.get("window_size")]
    times = _average(((*_heads(row), row["isl"]), row["latency"]) for row in kept)
    tokens = sorted({key[-1] for key in times})
    heads = sorted({key[:3] for key in times})
    return {"tokens": tokens, "heads": heads, "ns": [[_find_ns(times, (*key, n)) for n in tokens] for key in heads]}


def convert_decode_attention(rows: list[Json]) -> Json:
    """Packs attention of decode batches with equal contexts, by head size, heads and KV heads."""
    kept = [
        row
        for row in rows
        if row["step"] + 1 >= LEAST_CONTEXT_TOKENS
        and row["batch_size"] <= MOST_DECODES
        and row["batch_size"] * (row["step"] + 1) <= MOST_DECODE_CONTEXT_TOKENS
        and not row.get("window_size")
    ]
    times = _average(((*_heads(row), row["batch_size"], row["step"] + 1), row["latency"]) for row in kept)
    points = sorted({key[-2:] for key in times})
    heads = sorted({key[:3] for key in times})
    return {"batches": points, "heads": heads, "ns": [[_find_ns(times, key + p) for p in points] for key in heads]}


def _heads(row: Json) -> tuple[int, int, int]:
    return row["head_dim"], row["num_heads"], row["num_key_value_heads"]


def convert_all_reduces(rows: list[Json]) -> Json:
    """Packs all-reduces by GPUs and elements."""
    times = _average(((row["num_gpus"], row["message_size"]), row["latency"]) for row in rows)
    elements = sorted({key[1] for key in times})
    gpus = sorted({key[0] for key in times})
    return {"elements": elements, "gpus": gpus, "ns": [[_round_ns(times[n, e]) for e in elements] for n in gpus]}


def convert_vidur(folder: Path) -> Json:
    """Packs vidur's A100: time of a layer's operators by model, all-reduces, attention of 64 heads and 8 KV heads on two GPUs."""
    models: Json = {}
    for name, file in VIDUR_MODELS:
        models[name] = {}
        for gpus in VIDUR_TENSOR_PARALLEL:
            rows = [
                row
                for row in _read_csv(folder / f"a100_mlp_{file}.csv.gz")
                if int(row["num_tensor_parallel_workers"]) == gpus
            ]
            sums = _average(
                ((int(row["num_tokens"]),), sum(_number(row, operator) for operator in VIDUR_OPERATORS)) for row in rows
            )
            models[name][str(gpus)] = _pack_curve({key[0]: value for key, value in sums.items()}, "tokens")
    reduces: Json = {}
    for gpus, file in VIDUR_ALL_REDUCES:
        rows = [
            row
            for row in _read_csv(folder / f"{file}.csv.gz")
            if int(row["num_workers"]) == int(row["devices_per_node"]) == gpus
        ]
        times = _average(((int(row["size"]),), float(row["time_stats.all_reduce.median"])) for row in rows)
        reduces[str(gpus)] = _pack_curve({key[0]: value for key, value in times.items()}, "bytes")
    attention = _read_csv(folder / "a100_attention_64q8kv_tp2.csv.gz")
    return {
        "layers": models,
        "all_reduce": reduces,
        "prefill_attention": [
            [int(row["prefill_chunk_size"]), int(row["kv_cache_size"]), _round_ns(_number(row, "attn_prefill"))]
            for row in attention
            if row["is_prefill"] == "True"
        ],
        "decode_attention": [
            [int(row["batch_size"]), int(row["kv_cache_size"]), _round_ns(_number(row, "attn_decode"))]
            for row in attention
            if row["is_prefill"] == "False"
        ],
    }


def _number(row: dict[str, str], operator: str) -> float:
    return float(row[f"time_stats.{operator}.median"])


def convert_distserve(folder: Path) -> Json:
    """Packs simdistserve's coefficients of OPT-13B, in milliseconds, and its KV capacity, by GPUs."""
    profile = json.loads((folder / "profiler-a100-80g.vllm.json").read_text())[DISTSERVE_MODEL]
    with (folder / "max_num_tokens.csv").open() as file:
        capacity = {
            row["tp"]: int(row["max_num_tokens"])
            for row in csv.DictReader(file)
            if row["model"] == DISTSERVE_MODEL and row["pp"] == "1"
        }
    return {gpus: coefficients | {"kv_tokens": capacity[gpus]} for gpus, coefficients in profile.items()}


def _read(path: Path, **wanted: Any) -> list[Json]:
    rows: list[Json] = pq.read_table(path).to_pylist()
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _read_csv(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        return list(csv.DictReader(file))


def _average(pairs: Any) -> Grid:
    """Averages repeated measurements."""
    found: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: statistics.fmean(values) for key, values in found.items()}


def _pack_curve(times: dict[int, float], axis: str) -> Json:
    return {axis: sorted(times), "ns": [_round_ns(times[x]) for x in sorted(times)]}


def _find_ns(times: Grid, key: tuple[int, ...]) -> int | None:
    return _round_ns(times[key]) if key in times else None


def _round_ns(milliseconds: float) -> int:
    """Whole nanoseconds with four significant digits."""
    return int(float(f"{milliseconds * 1e6:.4g}"))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sources", metavar="SOURCES", type=Path, help=SOURCES_HELP)
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args()
    for name, content in convert(options.sources).items():
        text = json.dumps(content, separators=(",", ":"))
        (options.out / name).write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"wrote {options.out / name}, {(options.out / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
