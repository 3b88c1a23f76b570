"""Registers model classes with vLLM, so that it need not start a process to inspect them.

Before it loads anything, vLLM inspects a model's class in a process of its own, to keep CUDA untouched before a fork.
On the CPU that is half of an engine's start (10 of 20 s of a core), and the class is imported later anyway.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from vllm.model_executor.models.registry import ModelRegistry

logger = logging.getLogger(__name__)


def register_classes(model: str) -> list[str]:
    """Registers the classes that a model's configuration names; for processes that need not stay away from CUDA.

    Args:
        model: Directory of the model; what is still on a hub is left to vLLM.

    Returns:
        The architectures that are registered now; vLLM finds out by itself about all others, or refuses them.
    """
    registered = []
    for architecture in read_architectures(model):
        known = ModelRegistry.models.get(architecture)
        if known is None:
            continue
        try:
            ModelRegistry.register_model(architecture, known.load_model_cls())
        except ImportError as error:
            logger.info("%s is left to vLLM: %s", architecture, error)
            continue
        registered.append(architecture)
    return registered


def read_architectures(model: str) -> list[str]:
    """Reads the architectures that a model's directory names; none when it names none."""
    try:
        named = json.loads(Path(model, "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError):
        return []
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
