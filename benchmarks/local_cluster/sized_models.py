"""Models for engines on a GPU, none of which is downloaded.

One of a known model's size has made-up weights: what an engine computes takes as long. The medium one has weights that
make every token depend on its context, as the tiny one's do, and heads that kernels of GPUs know.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from benchmarks.local_cluster.cluster import MODELS
from examples import tiny_model

from sluice_core.latency.known_models import find_architecture

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TINY, MEDIUM = "tiny", "medium"
# 250 million weights.
MEDIUM_RECIPE = tiny_model.Recipe(hidden=1024, intermediate=4096, layers=16, heads=16, kv_heads=8, max_tokens=32_768)
# Prompt and output together, of models that are not tiny.
LIMIT_TOKENS = 32_768


def find_limit_tokens(name: str) -> int:
    """Finds how many tokens a prompt and its output may have together."""
    return tiny_model.RECIPE.max_tokens if name == TINY else LIMIT_TOKENS


def make_models(name: str, folder: Path) -> Path:
    """Makes a model, and returns the folder of models that it is in.

    Args:
        name: Tiny, medium, or one of a profile.
        folder: Where it goes, unless it is the tiny one.

    Raises:
        UnknownModelError: There is no such model.
    """
    tiny_model.make_tiny_model(MODELS / TINY)
    if name == TINY:
        return MODELS
    if name == MEDIUM:
        tiny_model.make_tiny_model(folder / MEDIUM, MEDIUM_RECIPE)
    else:
        _make_sized_model(folder / name, name)
    return folder


def _make_sized_model(folder: Path, name: str) -> None:
    """Makes a folder with a known model's sizes and the tiny one's tokenizer; its projections get no bias."""
    shape = find_architecture(name)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (MODELS / TINY).iterdir():
        if path.name not in {"config.json", "model.safetensors"}:
            shutil.copy(path, folder / path.name)
    config: dict[str, Any] = json.loads((MODELS / TINY / "config.json").read_text())
    config |= {
        "vocab_size": shape.vocabulary_tokens,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": LIMIT_TOKENS,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def use_model(
    spec: dict[str, Any], name: str, *, kv_cache_bytes: int, memory_share: float, arguments: Sequence[str] = ()
) -> None:
    """Changes a manifest's spec to a model that is not tiny.

    Args:
        spec: The spec.
        name: The model.
        kv_cache_bytes: KV cache of each engine.
        memory_share: Share of the GPU's memory that each engine may use: several may have one GPU.
        arguments: Further ones of vLLM.
    """
    spec["model"] |= {"name": name, "servedName": name}
    spec["model"]["source"]["persistentVolumeClaim"]["path"] = name
    spec["engine"]["extraArgs"] = [
        # vLLM makes the weights up.
        *(() if name == MEDIUM else ("--load-format", "dummy")),
        *("--kv-cache-memory-bytes", str(kv_cache_bytes)),
        *("--gpu-memory-utilization", f"{memory_share:.3f}"),
        *arguments,
    ]
