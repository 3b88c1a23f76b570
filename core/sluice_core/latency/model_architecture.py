"""The shape of a dense model of the Llama and Qwen kind, and how it is read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice_core.latency.interface import UnknownModelError

BYTES_PER_VALUE = 2  # bfloat16 and float16: what the kernels were measured with
DTYPES = ("bfloat16", "float16")
# Keys of configurations whose layers are not the ones that were measured.
_FOREIGN_KEYS = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "quantization_config": "quantized",
    "vision_config": "multimodal",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shape of a dense decoder.

    Args:
        num_layers: Layers.
        num_heads: Attention heads of queries.
        num_kv_heads: Attention heads of keys and values.
        head_size: Values per head.
        hidden_size: Values per token between layers.
        intermediate_size: Values per token inside the MLP.
        vocabulary_tokens: Size of the vocabulary.
        has_gated_mlp: Three matrices per MLP (Llama), or two (OPT).
        has_tied_embeddings: The output layer is the embedding.
        num_positions: Learned position embeddings (OPT); 0 for rotary ones.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocabulary_tokens: int
    has_gated_mlp: bool = True
    has_tied_embeddings: bool = False
    num_positions: int = 0

    def count_parameters(self) -> int:
        """Count the weights, biases left out."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_size * self.hidden_size
        mlp = (3 if self.has_gated_mlp else 2) * self.intermediate_size * self.hidden_size
        norms = 2 * self.hidden_size
        embeddings = (1 if self.has_tied_embeddings else 2) * self.vocabulary_tokens + self.num_positions
        return self.num_layers * (attention + mlp + norms) + (embeddings + 1) * self.hidden_size

    def compute_weight_bytes(self) -> int:
        """Compute the size of the weights."""
        return BYTES_PER_VALUE * self.count_parameters()


def read_architecture(config: Mapping[str, object]) -> Architecture:
    """Read the content of a model's config.json.

    Raises:
        UnknownModelError: A size is missing, or the layers are not those of a dense model in 16 bits.
    """
    for key, kind in _FOREIGN_KEYS.items():
        if config.get(key):
            raise UnknownModelError(f"the model is {kind} ({key}); profiles are of dense models in {_join(DTYPES)}")
    dtype = config.get("dtype") or config.get("torch_dtype") or DTYPES[0]
    if dtype not in DTYPES:
        raise UnknownModelError(f"the model's dtype is {dtype}; profiles are of {_join(DTYPES)}")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise UnknownModelError("the model has a sliding window; profiles are of full attention")
    num_heads, hidden_size = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    return Architecture(
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", num_heads),
        head_size=_size(config, "head_dim", hidden_size // num_heads),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        vocabulary_tokens=_size(config, "vocab_size"),
        has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def check_tensor_parallel(name: str, shape: Architecture, tensor_parallel: int) -> None:
    """Check that GPUs can share a model's heads.

    Args:
        name: The model's, for the message.
        shape: The model.
        tensor_parallel: GPUs of an engine.

    Raises:
        UnknownModelError: They cannot.
    """
    divides = tensor_parallel >= 1 and shape.num_heads % tensor_parallel == 0
    if not divides or max(shape.num_kv_heads, tensor_parallel) % min(shape.num_kv_heads, tensor_parallel):
        raise UnknownModelError(
            f"{name} has {shape.num_heads} heads and {shape.num_kv_heads} KV heads, "
            f"which {tensor_parallel} GPUs cannot share"
        )


def _join(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def _size(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnknownModelError(f"config.json: {key} is {value!r}, not a positive number")
    return value
