"""Manifests of emulated engines, for the benchmarks that run them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.local_cluster.cluster import make_manifest

if TYPE_CHECKING:
    import argparse

    from benchmarks.emulated.phases import Setting

# Of the tiny model: prompt and output together.
MODEL_LIMIT_TOKENS = 4096
MAX_BATCH_TOKENS = 8192
ANSWER_TIMEOUT_S = 300.0


def read_share(text: str) -> int | str:
    """Reads a slider R_PD: a share or a count."""
    return text if text.endswith("%") else int(text)


def make_cluster_manifest(name: str, options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Makes the manifest of emulated engines that start with a strategy.

    Args:
        name: Of the cluster.
        options: A command line with ``port_base``, ``engines``, ``gpu``, ``model``, ``ttft_ms`` and ``tpot_ms``.
        setting: The strategy.
    """
    manifest = make_manifest(name, http_port=options.port_base, replicas=options.engines)
    spec = manifest["spec"]
    spec["engine"] |= {
        "maxBatchTokens": MAX_BATCH_TOKENS,
        "emulation": {"gpu": options.gpu, "model": options.model},
    }
    spec["slo"] |= {"ttftMilliseconds": options.ttft_ms, "tpotMilliseconds": options.tpot_ms}
    spec.update(setting.spec)
    return manifest
