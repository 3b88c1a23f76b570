"""The models that are known by name; to add one, add its sizes to ``MODELS``."""

from __future__ import annotations

import json
from pathlib import Path

from sluice_core.latency.interface import UnknownModelError
from sluice_core.latency.model_architecture import Architecture, read_architecture

# Sizes: the models' config.json.
MODELS: dict[str, Architecture] = {
    "llama-3-8b": Architecture(
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        hidden_size=4096,
        intermediate_size=14336,
        vocabulary_tokens=128256,
    ),
    "qwen2.5-14b": Architecture(
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_size=128,
        hidden_size=5120,
        intermediate_size=13824,
        vocabulary_tokens=152064,
    ),
    "qwen2.5-32b": Architecture(
        num_layers=64,
        num_heads=40,
        num_kv_heads=8,
        head_size=128,
        hidden_size=5120,
        intermediate_size=27648,
        vocabulary_tokens=152064,
    ),
    "codellama-34b": Architecture(
        num_layers=48,
        num_heads=64,
        num_kv_heads=8,
        head_size=128,
        hidden_size=8192,
        intermediate_size=22016,
        vocabulary_tokens=32000,
    ),
    "llama-2-70b": Architecture(
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_size=128,
        hidden_size=8192,
        intermediate_size=28672,
        vocabulary_tokens=32000,
    ),
    "opt-13b": Architecture(
        num_layers=40,
        num_heads=40,
        num_kv_heads=40,
        head_size=128,
        hidden_size=5120,
        intermediate_size=20480,
        vocabulary_tokens=50272,
        has_gated_mlp=False,
        has_tied_embeddings=True,
        num_positions=2048,
    ),
}


def find_architecture(name: str) -> Architecture:
    """Look a model up by name, in any case.

    Raises:
        UnknownModelError: Lists the known ones.
    """
    found = MODELS.get(name.lower())
    if found is None:
        raise UnknownModelError(
            f"model {name!r} is unknown; known are {', '.join(MODELS)}, or the path of a config.json"
        )
    return found


def find_model(model: str) -> tuple[str, Architecture]:
    """Find a model by name or by the path of its config.json; returns its name and shape.

    Raises:
        UnknownModelError: Lists the known names.
    """
    path = Path(model)
    if model.lower() not in MODELS and (path.suffix == ".json" or path.is_dir()):
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UnknownModelError(f"{file} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise UnknownModelError(f"{file} is no model's config.json")
        return file.parent.name, read_architecture(config)
    return model.lower(), find_architecture(model)
