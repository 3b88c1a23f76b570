"""The GPUs that are known by name; to add one, add it to ``GPUS``, and its measured kernels to ``data/``."""

from __future__ import annotations

import re

from sluice_core.latency.interface import UnknownModelError

GPUS = ("a100-80g", "h100-80g", "h200-141g", "l40s-48g")
_GPUS = re.compile(r"(?P<gpu>.+?)(?:x(?P<number>[1-9]\d*))?")


def parse_gpus(text: str) -> tuple[str, int]:
    """Read the GPUs of an engine: ``a100-80g``, or ``a100-80gx2`` for two that share it; returns name and number."""
    match = _GPUS.fullmatch(text)
    return (match["gpu"], int(match["number"] or 1)) if match else (text, 1)


def find_gpu(gpu: str) -> str:
    """Find a GPU's name, in any case, with or without its memory (``a100`` is ``a100-80g``).

    Raises:
        UnknownModelError: Lists the known names.
    """
    found = [name for name in GPUS if gpu.lower() in {name, name.partition("-")[0]}]
    if not found:
        raise UnknownModelError(f"GPU {gpu!r} is unknown; known are {', '.join(GPUS)}")
    return found[0]
