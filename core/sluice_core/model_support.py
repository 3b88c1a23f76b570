"""Which models engines can serve, as far as a config.json tells: full attention in every layer, and no encoder.

A request moves with the KV of its prompt. A window, a recurrent state or an encoder's output would not be in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

SUPPORTED = "models with full attention in every layer are supported"
# What families of models call a layer with full attention in ``layer_types``.
FULL_ATTENTION = frozenset({"attention", "full_attention"})
# Fields that models with other layers have, whatever their layers are called: Whisper, BART; Llama 4.
FOREIGN_FIELDS = {
    "is_encoder_decoder": "it has an encoder",
    "attention_chunk_size": "its attention is local to chunks",
}
# Fields of families whose config.json may not list its layers. Where it does, the list counts: a Granite 4 without
# state-space layers keeps their fields.
FAMILY_FIELDS = {
    "mamba_d_state": "it has state-space layers",  # Jamba, Bamba, Falcon-H1, Granite 4, Zamba 2
    "ssm_state_size": "it has state-space layers",  # Nemotron-H
    "state_size": "it has state-space layers",  # Mamba, Mamba 2, Falcon-Mamba
    "ssm_cfg": "it has state-space layers",  # the first Mambas
    "hybrid_override_pattern": "it has state-space layers",  # Nemotron-H
    "linear_num_value_heads": "it has linear attention",  # Qwen3-Next
    "linear_attn_config": "it has linear attention",  # Kimi Linear
    "attn_type_list": "it has linear attention",  # MiniMax-Text
    "conv_L_cache": "it has convolutions",  # LFM2
}
# Arguments of vLLM that change what config.json says of attention.
OVERRIDES = ("--disable-sliding-window", "--hf-overrides")


def find_refusal(model: Path, vllm_arguments: Sequence[str]) -> str:
    """Find why engines cannot serve a model, by its config.json.

    Args:
        model: Its directory; what has no config.json that can be read is left to vLLM.
        vllm_arguments: Arguments of vLLM, which may change what config.json says.

    Returns:
        The file, and what is wrong with it; empty: nothing.
    """
    path = model / "config.json"
    if any(argument.replace("_", "-").startswith(OVERRIDES) for argument in vllm_arguments) or not path.is_file():
        return ""
    try:
        config = json.loads(path.read_text())
    except OSError:
        return ""
    except ValueError as error:
        return f"{path} is not JSON ({error}); fetch the model again"
    if not isinstance(config, dict):
        return f"{path} is no model's configuration; fetch the model again"
    reason = find_unsupported_attention(config)
    return f"{path}: {reason}; {SUPPORTED}" if reason else ""


def find_unsupported_attention(config: Mapping[str, object]) -> str:
    """Find what a config.json says of layers that engines do not support.

    Args:
        config: Its content. Models that also see or hear have the language model's under ``text_config``.

    Returns:
        The field, its value, and what it means; empty: nothing.
    """
    nested = config.get("text_config")
    text: Mapping[str, object] = nested if isinstance(nested, Mapping) and nested else config
    layers = text.get("layer_types")
    layer_types = layers if isinstance(layers, list) else []
    fields = FOREIGN_FIELDS if layer_types else {**FOREIGN_FIELDS, **FAMILY_FIELDS}
    for field, meaning in fields.items():
        value = text.get(field) or config.get(field)
        if value:
            said = "" if isinstance(value, (Mapping, list)) else f" is {value}"
            return f"{field}{said}, so {meaning}"
    others = sorted({str(kind) for kind in layer_types} - FULL_ATTENTION)
    if others:
        return f"layer_types has {', '.join(others)}"
    window = text.get("sliding_window")
    if window and not layer_types and text.get("use_sliding_window", True):
        return f"sliding_window is {window}"
    return ""
