"""How much KV a token takes, and how many tokens fit into the GPUs' memory beside a model's weights."""

from __future__ import annotations

from sluice_core.latency.interface import ModelTooLargeError
from sluice_core.latency.model_architecture import BYTES_PER_VALUE, Architecture

# Share of a GPU's memory that vLLM may fill, and what its activations take of it.
MEMORY_SHARE = 0.9
ACTIVATION_BYTES = 3_000_000_000


def compute_kv_bytes_per_token(shape: Architecture, tensor_parallel: int = 1) -> int:
    """Compute the KV cache of a token over all GPUs; more GPUs than KV heads hold copies (vLLM)."""
    num_kv_heads = max(shape.num_kv_heads, tensor_parallel)
    return 2 * num_kv_heads * shape.head_size * BYTES_PER_VALUE * shape.num_layers


def compute_kv_capacity_tokens(
    shape: Architecture, memory_bytes: int, tensor_parallel: int, pipeline_parallel: int = 1
) -> int:
    """Compute the tokens that an engine's KV cache holds.

    Raises:
        ModelTooLargeError: The weights do not fit.

    Source: as vLLM sizes its cache: the share of the memory that it may fill, less weights and activations.
    """
    num_gpus = tensor_parallel * pipeline_parallel
    free_bytes = compute_free_bytes(memory_bytes, num_gpus)
    room_bytes = free_bytes - shape.compute_weight_bytes()
    if room_bytes <= 0:
        raise ModelTooLargeError(
            f"weights of {shape.compute_weight_bytes() / 1e9:.1f} GB do not fit into the {free_bytes / 1e9:.1f} GB of "
            f"{num_gpus} GPU(s)"
        )
    return int(room_bytes / compute_kv_bytes_per_token(shape, tensor_parallel))


def compute_free_bytes(memory_bytes: int, num_gpus: int) -> float:
    """Compute what GPUs have for weights and KV."""
    return (MEMORY_SHARE * memory_bytes - ACTIVATION_BYTES) * num_gpus
