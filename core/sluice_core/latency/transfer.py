"""How long a KV transfer takes."""

from __future__ import annotations

import math

TRANSFER_LATENCY_S = 0.002  # simulation.md section 1: per transfer, whatever its size
DEFAULT_TRANSFER_BYTES_PER_S = 10e9  # until an engine has measured a pull: a 100 Gb/s link, less overhead


def estimate_transfer_s(num_tokens: int, kv_bytes_per_token: int, bytes_per_s: float) -> float:
    """Estimate the time to move the KV cache of a request between engines.

    Args:
        num_tokens: Tokens in the cache.
        kv_bytes_per_token: Bytes of KV cache per token.
        bytes_per_s: Measured rate; 0 when none was measured.

    Returns:
        Seconds.

    Source: simulation.md section 1, KV transfer.
    """
    rate = bytes_per_s if bytes_per_s > 0 and math.isfinite(bytes_per_s) else DEFAULT_TRANSFER_BYTES_PER_S
    return TRANSFER_LATENCY_S + num_tokens * kv_bytes_per_token / rate
