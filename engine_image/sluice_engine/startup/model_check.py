"""Refuses a model that cannot be served, by its config.json, before vLLM loads for minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice_engine.errors import ModelRefusedError

if TYPE_CHECKING:
    from sluice_engine.settings import EngineSettings

FULL_ATTENTION = "full_attention"
# Arguments of vLLM that change what config.json says of attention.
OVERRIDES = ("--disable-sliding-window", "--hf-overrides")


def check_model(settings: EngineSettings) -> None:
    """Refuses a model whose layers do not all have full attention.

    Raises:
        ModelRefusedError: Names the field of config.json and its value.
    """
    path = Path(settings.model) / "config.json"
    has_overrides = any(item.replace("_", "-").startswith(OVERRIDES) for item in settings.vllm_args)
    if has_overrides or not path.is_file():
        return
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ModelRefusedError(f"{path} is not JSON ({error}); fetch the model again") from error
    reason = find_unsupported_attention(config)
    if reason:
        raise ModelRefusedError(f"{path}: {reason}; models with full attention in every layer are supported")


def find_unsupported_attention(config: dict[str, Any]) -> str:
    """Finds what a config.json says of attention that is not full; empty: nothing."""
    text: dict[str, Any] = config.get("text_config") or config
    kinds = sorted(set(text.get("layer_types") or ()) - {FULL_ATTENTION})
    if kinds:
        return f"layer_types has {', '.join(map(str, kinds))}"
    window = text.get("sliding_window")
    if window and not text.get("layer_types") and text.get("use_sliding_window", True):
        return f"sliding_window is {window}"
    return ""
