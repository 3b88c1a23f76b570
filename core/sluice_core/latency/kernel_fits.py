"""Measured kernels of one kind of GPU between their grid points, and fits of attention over them.

Straight lines inside the grids. Outside: the last interval's slope in tokens and message sizes, in proportion for
matrices and heads, whose time is that of their weights or operations.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sluice_core.latency.least_squares import Fit, fit_times
from sluice_core.latency.model_architecture import BYTES_PER_VALUE

NS = 1e-9
_MEASURED_HEAD_SIZE = 128


def load_data(name: str) -> Any:
    """Read a file of the package's data (see data/NOTICE.md)."""
    return json.loads(gzip.decompress((resources.files("sluice_core.latency") / "data" / name).read_bytes()))


def interpolate(axis: list[int], values: list[float], at: float) -> float:
    """Interpolate on a straight line between the neighbours, or on that of the last two beyond them."""
    if len(axis) == 1:
        return values[0]
    index = min(max(bisect_right(axis, at), 1), len(axis) - 1)
    low, high = axis[index - 1], axis[index]
    share = (at - low) / (high - low)
    return values[index - 1] * (1.0 - share) + values[index] * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Tables of one kind of GPU, as ``benchmarks/profiles/convert.py`` packs them; bfloat16, times in nanoseconds.

    Args:
        memory_bytes: Memory of a GPU.
        memory_bytes_per_s: Its peak bandwidth.
        gemm_tokens: Rows of the activations.
        gemm_outputs: Columns of the weights.
        gemm_inputs: Rows of the weights.
        gemm_ns: By outputs, inputs and tokens.
        prefill_tokens: Lengths of lone prompts.
        prefill_ns: By (head size, heads, KV heads) and length.
        decode_batches: Pairs of requests and their contexts.
        decode_ns: By (head size, heads, KV heads) and batch; None where it was not measured.
        reduce_sizes: Message sizes of all-reduces.
        reduce_ns: By GPUs and message size.
    """

    memory_bytes: int
    memory_bytes_per_s: float
    gemm_tokens: list[int]
    gemm_outputs: list[int]
    gemm_inputs: list[int]
    gemm_ns: list[list[list[int]]]
    prefill_tokens: list[int]
    prefill_ns: dict[tuple[int, int, int], list[float | None]]
    decode_batches: list[tuple[int, int]]
    decode_ns: dict[tuple[int, int, int], list[float | None]]
    reduce_sizes: list[int]
    reduce_ns: dict[int, list[float]]

    def make_gemm_curve(self, outputs: float, inputs: float) -> list[float]:
        """Times of a GEMM with weights of ``inputs`` x ``outputs``, in seconds, at ``gemm_tokens``."""
        inside_outputs = min(outputs, self.gemm_outputs[-1])
        inside_inputs = min(inputs, self.gemm_inputs[-1])
        row, row_share = _find_cell(self.gemm_outputs, inside_outputs)
        column, column_share = _find_cell(self.gemm_inputs, inside_inputs)
        scale = NS * (outputs / inside_outputs) * (inputs / inside_inputs)
        low, high = self.gemm_ns[row], self.gemm_ns[row + 1]
        return [
            scale
            * (
                (1.0 - row_share) * ((1.0 - column_share) * a + column_share * b)
                + row_share * ((1.0 - column_share) * c + column_share * d)
            )
            for a, b, c, d in zip(low[column], low[column + 1], high[column], high[column + 1], strict=True)
        ]

    def estimate_all_reduce_s(self, size: float, num_gpus: int) -> float:
        """Estimate an all-reduce of a size in the table's unit over as many GPUs of one node, in seconds."""
        return NS * interpolate(self.reduce_sizes, self.reduce_ns[num_gpus], size)

    def fit_prefill_attention(self, head_size: int, num_heads: float, num_kv_heads: float) -> Fit:
        """Fit ``p0 + p1 * c + p2 * c * c / 2`` to one layer's prefill attention, in seconds."""
        times = _find_heads(self.prefill_ns, head_size, num_heads, num_kv_heads)
        points = [(tokens, ns * NS) for tokens, ns in zip(self.prefill_tokens, times, strict=True) if ns is not None]
        return fit_times(
            [(1.0, tokens, tokens * tokens / 2.0) for tokens, _ in points], [time_s for _, time_s in points]
        )

    def fit_decode_attention(self, head_size: int, num_heads: float, num_kv_heads: float) -> Fit:
        """Fit ``d0 + d1 * requests + d2 * contexts`` to one layer's decode attention, in seconds.

        No batch is taken to be faster than the memory that holds its KV: the L40S has caches of 96 MB, in which a lone
        kernel finds small batches, and a model's layers do not.
        """
        times = _find_heads(self.decode_ns, head_size, num_heads, num_kv_heads)
        context_s = 2 * num_kv_heads * head_size * BYTES_PER_VALUE / self.memory_bytes_per_s
        features: list[tuple[float, float, float]] = []
        times_s: list[float] = []
        for (requests, context), ns in zip(self.decode_batches, times, strict=True):
            if ns is not None:
                features.append((1.0, requests, requests * context))
                times_s.append(max(ns * NS, requests * context * context_s))
        return fit_times(features, times_s)


def load_kernels(gpu: str) -> Kernels:
    """Load a GPU's tables from the package's data."""
    data = load_data(f"{gpu}.json.gz")
    gemm, prefill, decode, reduces = (
        data[name] for name in ("gemm", "prefill_attention", "decode_attention", "all_reduce")
    )
    return Kernels(
        memory_bytes=data["memory_bytes"],
        memory_bytes_per_s=float(data["memory_bytes_per_s"]),
        gemm_tokens=gemm["tokens"],
        gemm_outputs=gemm["outputs"],
        gemm_inputs=gemm["inputs"],
        gemm_ns=gemm["ns"],
        prefill_tokens=prefill["tokens"],
        prefill_ns=_key_by_heads(prefill),
        decode_batches=[(requests, context) for requests, context in decode["batches"]],
        decode_ns=_key_by_heads(decode),
        reduce_sizes=reduces["elements"],
        reduce_ns={gpus: [float(ns) for ns in row] for gpus, row in zip(reduces["gpus"], reduces["ns"], strict=True)},
    )


def _key_by_heads(packed: Any) -> dict[tuple[int, int, int], list[float | None]]:
    return {
        (size, heads, kv_heads): [None if ns is None else float(ns) for ns in row]
        for (size, heads, kv_heads), row in zip(packed["heads"], packed["ns"], strict=True)
    }


def _find_cell(axis: list[int], at: float) -> tuple[int, float]:
    """Index of the interval that holds a value, and the value's share of it."""
    index = min(max(bisect_right(axis, at), 1), len(axis) - 1)
    return index - 1, (at - axis[index - 1]) / (axis[index] - axis[index - 1])


def _find_heads(
    table: dict[tuple[int, int, int], list[float | None]], head_size: int, num_heads: float, num_kv_heads: float
) -> list[float | None]:
    """Times for any heads: between the measured numbers of heads, at the measured numbers of KV heads.

    A head size that was not measured counts as so many heads of 128, which read and compute as much. KV heads beyond
    the measured ones count as several groups of the largest measured number.
    """
    if all(size != head_size for size, _, _ in table):
        num_heads *= head_size / _MEASURED_HEAD_SIZE
        num_kv_heads *= head_size / _MEASURED_HEAD_SIZE
        head_size = _MEASURED_HEAD_SIZE
    kv_axis = sorted({kv for size, _, kv in table if size == head_size})
    groups = max(1.0, num_kv_heads / kv_axis[-1])
    if groups > 1.0:
        times = _find_heads(table, head_size, num_heads / groups, num_kv_heads / groups)
        return [None if time is None else time * groups for time in times]
    index, share = _find_cell(kv_axis, max(num_kv_heads, kv_axis[0]))
    low = _scale_heads(table, head_size, num_heads, kv_axis[index])
    high = _scale_heads(table, head_size, num_heads, kv_axis[index + 1])
    if share in {0.0, 1.0}:
        return high if share else low
    return [None if a is None or b is None else a * (1.0 - share) + b * share for a, b in zip(low, high, strict=True)]


def _scale_heads(
    table: dict[tuple[int, int, int], list[float | None]], head_size: int, num_heads: float, num_kv_heads: int
) -> list[float | None]:
    """Times for any heads at a measured number of KV heads; in proportion beyond the measured numbers of heads."""
    axis = sorted(heads for size, heads, kv in table if (size, kv) == (head_size, num_kv_heads))
    inside = min(max(num_heads, axis[0]), axis[-1])
    scale = max(1.0, num_heads / inside)
    if len(axis) == 1:
        low = high = table[head_size, axis[0], num_kv_heads]
        share = 0.0
    else:
        index, share = _find_cell(axis, inside)
        low, high = (table[head_size, axis[i], num_kv_heads] for i in (index, index + 1))
    return [
        # Where one neighbour was not measured the other stands for both only if the share is all its own.
        a * scale if a is not None and share == 0.0
        else b * scale if b is not None and share == 1.0
        else None if a is None or b is None
        else scale * (a * (1.0 - share) + b * share)
        for a, b in zip(low, high, strict=True)
    ]  # fmt: skip
