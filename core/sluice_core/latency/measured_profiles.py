"""The profile of a model on a GPU, from the measurements in ``data/`` (data/NOTICE.md).

Three kinds. ``kernels`` adds up measured kernels (aiconfigurator) for any dense model on any of four GPUs. ``vidur``
has whole layers of two models on the A100, as the paper's own simulator measured them. ``distserve`` has the closed
forms that DistServe fitted to OPT-13B, for iterations that hold prefills or decodes and never both.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from sluice_core.latency.interface import UnknownModelError
from sluice_core.latency.iteration_time import (
    TABLE_STEP_TOKENS,
    DecodeCoefficients,
    IterationProfile,
    ModelOnGpu,
)
from sluice_core.latency.kernel_fits import NS, Kernels, interpolate, load_data, load_kernels
from sluice_core.latency.known_gpus import find_gpu
from sluice_core.latency.known_models import find_architecture, find_model
from sluice_core.latency.kv_capacity import (
    compute_free_bytes,
    compute_kv_bytes_per_token,
    compute_kv_capacity_tokens,
)
from sluice_core.latency.least_squares import fit_times
from sluice_core.latency.model_architecture import BYTES_PER_VALUE, Architecture, check_tensor_parallel
from sluice_core.latency.pipeline_stages import check_pipeline_parallel, make_stage_profile

TABLE_TOKENS = 16_384


class ProfileKind(StrEnum):
    """Where a profile comes from."""

    KERNELS = "kernels"
    VIDUR = "vidur"
    DISTSERVE = "distserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no kernel measurement says.

    Args:
        host_iteration_s: The host's work per iteration, where kernels do not hide it (assumed for vLLM v1).
        host_sequence_s: Its work per chunk and per decode.
        layer_s: Launch gaps of a layer's element-wise kernels.
        memory_efficiency: Share of the peak bandwidth that element-wise kernels and the lm_head reach.
        lm_head_s: The lm_head beyond reading its weights.
        reduce_element_bytes: Unit in which message sizes of the all-reduce table are read: 1 by default. The
            table's source counts elements, which is 2; then all-reduces take about half.
    """

    host_iteration_s: float = 0.003
    host_sequence_s: float = 10e-6
    layer_s: float = 12e-6
    memory_efficiency: float = 0.8
    lm_head_s: float = 0.1e-3
    reduce_element_bytes: int = 1


DEFAULT_ASSUMPTIONS = Assumptions()

# Per layer and all-reduce, vidur's own launch overhead.
_VIDUR_REDUCE_S = 0.02e-3
_VIDUR_NOISE_TOKENS = 150  # below it all-reduces are noise around their median
_VIDUR_SMOOTHING = 9  # neighbouring message sizes whose median counts
_VIDUR_GPUS_OF_ATTENTION = 2
_VIDUR_DECODE_OVERHEAD = 1.1  # its batching overhead of grouped-query decodes
_DISTSERVE_GPU = "a100-80g"
_MS = 1e-3


def load_model_on_gpu(
    model: str,
    gpu: str,
    tensor_parallel: int = 1,
    *,
    pipeline_parallel: int = 1,
    kind: ProfileKind | None = None,
    assumptions: Assumptions = DEFAULT_ASSUMPTIONS,
) -> ModelOnGpu:
    """Build what the simulator, the planner and emulated engines need of a model on a GPU.

    Args:
        model: A name of ``MODELS``, or the path of a config.json or of the folder that holds it.
        gpu: A name of ``GPUS``.
        tensor_parallel: GPUs that share each layer.
        pipeline_parallel: Stages of equal layers, each on GPUs of its own.
        kind: Where the profile comes from; ``distserve`` for OPT-13B and ``kernels`` for all others when absent.
        assumptions: What is not measured.

    Raises:
        UnknownModelError: There is no such profile; lists the known names.
        ModelTooLargeError: The weights do not fit into the GPUs.
    """
    gpu = find_gpu(gpu)
    name, shape = find_model(model)
    check_tensor_parallel(name, shape, tensor_parallel)
    check_pipeline_parallel(name, shape.num_layers, pipeline_parallel)
    kind = kind or (ProfileKind.KERNELS if shape.has_gated_mlp else ProfileKind.DISTSERVE)
    kernels = _load_kernels(gpu)
    kv_bytes_per_token = compute_kv_bytes_per_token(shape, tensor_parallel)
    kv_capacity_tokens = compute_kv_capacity_tokens(shape, kernels.memory_bytes, tensor_parallel, pipeline_parallel)
    if kind is ProfileKind.KERNELS:
        profile = build_kernel_profile(shape, kernels, tensor_parallel, assumptions)
    elif kind is ProfileKind.VIDUR:
        profile = build_vidur_profile(name, gpu, tensor_parallel)
    else:
        profile, kv_capacity_tokens = build_distserve_profile(name, gpu, tensor_parallel)
        more_bytes = compute_free_bytes(kernels.memory_bytes, (pipeline_parallel - 1) * tensor_parallel)
        kv_capacity_tokens += int(more_bytes / kv_bytes_per_token)
    host_iteration_s = assumptions.host_iteration_s if kind is ProfileKind.KERNELS else 0.0
    return ModelOnGpu(
        model=name,
        gpu=gpu,
        tensor_parallel=tensor_parallel,
        weight_bytes=shape.compute_weight_bytes(),
        kv_bytes_per_token=kv_bytes_per_token,
        kv_capacity_tokens=kv_capacity_tokens,
        profile=make_stage_profile(profile, pipeline_parallel, host_iteration_s),
        pipeline_parallel=pipeline_parallel,
    )


@cache
def _load_kernels(gpu: str) -> Kernels:
    return load_kernels(gpu)


def build_kernel_profile(
    shape: Architecture, kernels: Kernels, tensor_parallel: int, assumptions: Assumptions = DEFAULT_ASSUMPTIONS
) -> IterationProfile:
    """Add up a model's kernels.

    Raises:
        UnknownModelError: The model's MLP is not gated, or all-reduces over so many GPUs were not measured.
    """
    if not shape.has_gated_mlp:
        raise UnknownModelError("the kernels are those of a gated MLP, which this model has not")
    if tensor_parallel > 1 and tensor_parallel not in kernels.reduce_ns:
        measured = ", ".join(str(gpus) for gpus in sorted(kernels.reduce_ns))
        raise UnknownModelError(f"all-reduces over {tensor_parallel} GPUs were not measured, only over 1, {measured}")
    kv_heads = max(1.0, shape.num_kv_heads / tensor_parallel)
    heads = shape.num_heads / tensor_parallel
    prefill = kernels.fit_prefill_attention(shape.head_size, heads, kv_heads)
    decode = kernels.fit_decode_attention(shape.head_size, heads, kv_heads)
    layer = _LayerTimes.of(shape, kernels, tensor_parallel, assumptions)
    lm_head_bytes = BYTES_PER_VALUE * shape.vocabulary_tokens * shape.hidden_size / tensor_parallel
    constant_s = (
        assumptions.host_iteration_s
        + assumptions.lm_head_s
        + lm_head_bytes / (assumptions.memory_efficiency * kernels.memory_bytes_per_s)
    )
    layers = shape.num_layers
    linear_s, slope_s = _make_monotone(
        [
            constant_s + layers * layer.estimate_s(n)
            for n in range(TABLE_STEP_TOKENS, TABLE_TOKENS + 1, TABLE_STEP_TOKENS)
        ]
    )
    p0, p1, p2 = (layers * x for x in prefill.coefficients)
    d0, d1, d2 = (layers * x for x in decode.coefficients)
    return IterationProfile(
        linear_s=linear_s,
        slope_s=slope_s,
        prefill_base_s=p0,
        prefill_token_s=p1,
        prefill_work_s=p2,
        decode_base_s=d0,
        decode_request_s=d1,
        decode_context_s=d2,
        host_sequence_s=assumptions.host_sequence_s,
        num_observations=len(kernels.gemm_tokens) * 4 + prefill.num_points + decode.num_points,
        relative_error=_join_errors(
            (prefill.num_points, prefill.relative_error), (decode.num_points, decode.relative_error)
        ),
    )


@dataclass(frozen=True, slots=True)
class _LayerTimes:
    """Time of a layer without attention, by tokens."""

    kernels: Kernels
    gemm_s: list[float]  # all four, at the kernels' tokens
    token_s: float  # element-wise work
    constant_s: float
    reduce_size: float  # per token, in the table's unit; 0 on one GPU
    tensor_parallel: int

    @staticmethod
    def of(shape: Architecture, kernels: Kernels, tensor_parallel: int, assumptions: Assumptions) -> _LayerTimes:
        """Cut a layer into its kernels."""
        hidden, inner = shape.hidden_size, shape.intermediate_size / tensor_parallel
        queries = shape.num_heads * shape.head_size / tensor_parallel
        keys = max(1.0, shape.num_kv_heads / tensor_parallel) * shape.head_size
        gemms = ((queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
        curves = [kernels.make_gemm_curve(outputs, inputs) for outputs, inputs in gemms]
        # Two norms read and write activations and residual; the activation reads two parts and writes one; rotation
        # reads and writes queries and keys; keys and values go to the cache.
        values = 8 * hidden + 3 * inner + 2 * (queries + keys) + 4 * keys
        bytes_per_s = assumptions.memory_efficiency * kernels.memory_bytes_per_s
        return _LayerTimes(
            kernels,
            [sum(times) for times in zip(*curves, strict=True)],
            BYTES_PER_VALUE * values / bytes_per_s,
            assumptions.layer_s,
            hidden * BYTES_PER_VALUE / assumptions.reduce_element_bytes if tensor_parallel > 1 else 0.0,
            tensor_parallel,
        )

    def estimate_s(self, tokens: int) -> float:
        """Estimate the layer, in seconds."""
        time_s = interpolate(self.kernels.gemm_tokens, self.gemm_s, tokens) + self.token_s * tokens + self.constant_s
        if self.reduce_size:
            time_s += 2 * self.kernels.estimate_all_reduce_s(self.reduce_size * tokens, self.tensor_parallel)
        return time_s


def _make_monotone(times: list[float]) -> tuple[tuple[float, ...], float]:
    """Make a table that never falls, from times at 8, 16, ... tokens; returns it and its slope at the end."""
    table = [0.0]
    for time_s in times:
        table.append(max(table[-1], time_s))
    # Over the last quarter: a single row is noise.
    rows = max(1, len(times) // 4)
    return tuple(table), (table[-1] - table[-1 - rows]) / (rows * TABLE_STEP_TOKENS)


def _join_errors(*errors: tuple[int, float]) -> float:
    return sum(points * error for points, error in errors) / sum(points for points, _ in errors)


def build_vidur_profile(model: str, gpu: str, tensor_parallel: int) -> IterationProfile:
    """Put together vidur's layers, all-reduces and attention.

    Raises:
        UnknownModelError: vidur has no such profile.
    """
    data = load_data("vidur.json.gz")
    if gpu != "a100-80g" or model not in data["layers"] or str(tensor_parallel) not in data["layers"][model]:
        known = ", ".join(data["layers"])
        raise UnknownModelError(f"vidur has {known} on 1, 2, 4 or 8 a100-80g, not {model} on {tensor_parallel} {gpu}")
    shape = find_architecture(model)
    layer = data["layers"][model][str(tensor_parallel)]
    # Beyond the measured tokens a layer's time is proportional.
    tokens = [*layer["tokens"], TABLE_TOKENS]
    layer_ns = [*layer["ns"], layer["ns"][-1] * TABLE_TOKENS / layer["tokens"][-1]]
    reduce_s = _smooth_reduces(data["all_reduce"], shape, tensor_parallel, tokens)
    times = [ns * NS + reduces for ns, reduces in zip(layer_ns, reduce_s, strict=True)]
    linear_s, slope_s = _make_monotone(
        [
            shape.num_layers * interpolate(tokens, times, n)
            for n in range(TABLE_STEP_TOKENS, TABLE_TOKENS + 1, TABLE_STEP_TOKENS)
        ]
    )
    # Its attention is that of 64 heads and 8 KV heads on two GPUs, as both models have; work goes with the GPUs.
    share = _VIDUR_GPUS_OF_ATTENTION / tensor_parallel
    prefill = fit_times(
        [(1.0, chunk, chunk * (context + chunk / 2)) for chunk, context, _ in data["prefill_attention"]],
        [ns * NS for _, _, ns in data["prefill_attention"]],
    )
    decode = fit_times(
        [(1.0, requests, requests * context) for requests, context, _ in data["decode_attention"]],
        [ns * NS for _, _, ns in data["decode_attention"]],
    )
    p0, p1, p2 = (shape.num_layers * x for x in prefill.coefficients)
    d0, d1, d2 = (shape.num_layers * _VIDUR_DECODE_OVERHEAD * x for x in decode.coefficients)
    return IterationProfile(
        linear_s=linear_s,
        slope_s=slope_s,
        prefill_base_s=p0,
        prefill_token_s=p1 * share,
        prefill_work_s=p2 * share,
        decode_base_s=d0,
        decode_request_s=d1 * share,
        decode_context_s=d2 * share,
        num_observations=len(layer["tokens"]) + prefill.num_points + decode.num_points,
        relative_error=_join_errors(
            (prefill.num_points, prefill.relative_error), (decode.num_points, decode.relative_error)
        ),
    )


def _smooth_reduces(
    packed: dict[str, dict[str, list[int]]], shape: Architecture, tensor_parallel: int, tokens: list[int]
) -> list[float]:
    """Both all-reduces of a layer at as many tokens, in seconds; zeros on one GPU."""
    if tensor_parallel == 1:
        return [0.0] * len(tokens)
    sizes, ns = packed[str(tensor_parallel)]["bytes"], packed[str(tensor_parallel)]["ns"]
    token_bytes = BYTES_PER_VALUE * shape.hidden_size
    small_ns = statistics.median(
        time for size, time in zip(sizes, ns, strict=True) if size <= _VIDUR_NOISE_TOKENS * token_bytes
    )
    reach = _VIDUR_SMOOTHING // 2
    smooth: list[float] = []
    for index, size in enumerate(sizes):
        near_ns = statistics.median(ns[max(0, index - reach) : index + reach + 1])
        floor_ns = smooth[-1] if smooth else 0.0
        smooth.append(float(small_ns) if size <= _VIDUR_NOISE_TOKENS * token_bytes else max(floor_ns, near_ns))
    # Beyond the measured sizes the slope of the upper half: a single interval is noise.
    half = len(sizes) // 2
    slope_ns = (smooth[-1] - smooth[half]) / (sizes[-1] - sizes[half])
    most = tokens[-1] * token_bytes
    sizes, smooth = [*sizes, most], [*smooth, smooth[-1] + slope_ns * (most - sizes[-1])]
    return [2 * (NS * interpolate(sizes, smooth, n * token_bytes) + _VIDUR_REDUCE_S) for n in tokens]


def build_distserve_profile(model: str, gpu: str, tensor_parallel: int) -> tuple[IterationProfile, int]:
    """Write DistServe's closed forms as a profile; returns it and the KV capacity in tokens.

    A prefill takes ``a + b * tokens + c * sum of squares``, an iteration of decodes ``a + b * contexts + c * decodes``,
    with other coefficients for large batches.

    Raises:
        UnknownModelError: DistServe has no such profile.
    """
    data = load_data("distserve.json.gz")
    if model != "opt-13b" or gpu != _DISTSERVE_GPU or str(tensor_parallel) not in data:
        raise UnknownModelError(
            f"DistServe has opt-13b on {', '.join(data)} {_DISTSERVE_GPU}, not {model} on {tensor_parallel} {gpu}"
        )
    found = data[str(tensor_parallel)]
    (a, b, c), small, large = (found[name] for name in ("prefill", "decoding_smallbs", "decoding_largebs"))
    profile = IterationProfile(
        linear_s=(0.0, a * _MS),
        prefill_token_s=b * _MS,
        prefill_work_s=2 * c * _MS,  # the attention work of a whole prompt is half its square
        decode_base_s=(small[0] - a) * _MS,
        decode_request_s=small[2] * _MS,
        decode_context_s=small[1] * _MS,
        large_batch=DecodeCoefficients(
            found["decoding_large_small_bs_threshold"], (large[0] - a) * _MS, large[2] * _MS, large[1] * _MS
        ),
    )
    return profile, int(found["kv_tokens"])
