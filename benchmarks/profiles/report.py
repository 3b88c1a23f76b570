"""States how well the latency profiles fit their measurements, as the tables of docs/measurements/latency-profiles.md.

.venv/bin/python -m benchmarks.profiles.report
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from sluice_core.latency.kernel_fits import Kernels, load_kernels
from sluice_core.latency.known_gpus import GPUS
from sluice_core.latency.known_models import MODELS
from sluice_core.latency.measured_profiles import ProfileKind, load_model_on_gpu

if TYPE_CHECKING:
    from sluice_core.latency.least_squares import Fit
    from sluice_core.latency.model_architecture import Architecture

# GPUs per engine that hold the model on the smallest of the GPUs.
SHOWN = (
    ("llama-3-8b", 1),
    ("qwen2.5-14b", 1),
    ("qwen2.5-14b", 2),
    ("qwen2.5-32b", 2),
    ("codellama-34b", 2),
    ("llama-2-70b", 4),
)
SHOWN_TOKENS = (8, 256, 2048, 8192)
# GEMMs of a model's size; smaller ones are launch time.
LEAST_SIDE = 1024
PERCENT = 100.0


def compute_gemm_errors(kernels: Kernels) -> tuple[float, float]:
    """Leaves each inner number of columns out and interpolates it; mean and 90th percentile of the relative error."""
    outputs = kernels.gemm_outputs
    errors = []
    for index in range(1, len(outputs) - 1):
        low, at, high = outputs[index - 1 : index + 2]
        share = (at - low) / (high - low)
        if at < LEAST_SIDE:
            continue
        for column, inputs in enumerate(kernels.gemm_inputs):
            if inputs < LEAST_SIDE:
                continue
            rows = (kernels.gemm_ns[index + step][column] for step in (-1, 0, 1))
            errors += [abs((a * (1 - share) + c * share) / b - 1) for a, b, c in zip(*rows, strict=True)]
    return statistics.fmean(errors), statistics.quantiles(errors, n=10)[-1]


def fit_attention(kernels: Kernels, shape: Architecture, gpus: int) -> tuple[Fit, Fit]:
    """Fits of a model's prefill and decode attention."""
    heads = shape.head_size, shape.num_heads / gpus, max(1.0, shape.num_kv_heads / gpus)
    return kernels.fit_prefill_attention(*heads), kernels.fit_decode_attention(*heads)


def format_gemm_table() -> list[str]:
    """Interpolation error of the GEMM grids, per GPU."""
    lines = ["| GPU | GEMMs left out: mean error | 90th percentile |", "|---|---|---|"]
    for gpu in GPUS:
        mean, high = compute_gemm_errors(load_kernels(gpu))
        lines.append(f"| {gpu} | {mean * PERCENT:.1f} % | {high * PERCENT:.1f} % |")
    return lines


def format_fit_table() -> list[str]:
    """Fit error of attention, and linear(n), per GPU and model."""
    tokens = " / ".join(map(str, SHOWN_TOKENS))
    lines = [
        f"| model | GPU | prefill attention | decode attention | linear(n) in ms at {tokens} tokens | KV tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name, gpus in SHOWN:
        for gpu in GPUS:
            prefill, decode = fit_attention(load_kernels(gpu), MODELS[name], gpus)
            try:
                found = load_model_on_gpu(name, gpu, gpus)
            except ValueError:
                continue  # its weights do not fit
            times = " / ".join(f"{found.profile.estimate_linear_s(n) * 1e3:.1f}" for n in SHOWN_TOKENS)
            lines.append(
                f"| {name} | {gpu} x{gpus} | {prefill.relative_error * PERCENT:.1f} % |"
                f" {decode.relative_error * PERCENT:.1f} % |"
                f" {times} | {found.kv_capacity_tokens} |"
            )
    for name, gpus in (("llama-2-70b", 4), ("codellama-34b", 2)):
        found = load_model_on_gpu(name, "a100-80g", gpus, kind=ProfileKind.VIDUR)
        times = " / ".join(f"{found.profile.estimate_linear_s(n) * 1e3:.1f}" for n in SHOWN_TOKENS)
        error = f"{found.profile.relative_error * PERCENT:.1f} %"
        lines.append(
            f"| {name} (vidur) | a100-80g x{gpus} | {error} (both) | {error} (both) |"
            f" {times} | {found.kv_capacity_tokens} |"
        )
    return lines


def main() -> None:
    """Prints the tables."""
    print("\n".join([*format_gemm_table(), "", *format_fit_table()]))


if __name__ == "__main__":
    main()
