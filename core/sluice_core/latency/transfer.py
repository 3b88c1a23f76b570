"""How long a KV transfer takes.

Transfers that share a link go one after the other: a model of them keeps the time from which the link is free
(``LinkSpeed.schedule``). Without it slow networks look far too good, because transfers in flight do not share the
bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from sluice_core.latency.interface import UnknownModelError

TRANSFER_LATENCY_S: Final = 0.002  # per transfer, whatever its size
DEFAULT_TRANSFER_BYTES_PER_S: Final = 10e9  # until an engine has measured a pull: a 100 Gb/s link, less overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """What a kind of link does for KV transfers.

    Args:
        bytes_per_s: Bandwidth that transfers reach.
        latency_s: Per transfer, beside its share of the bandwidth.
    """

    bytes_per_s: float
    latency_s: float = TRANSFER_LATENCY_S

    def schedule(self, now: float, free_at: float, num_bytes: float) -> tuple[float, float]:
        """Queue a transfer behind those under way.

        Args:
            now: When it is ready to start.
            free_at: From when on the link is free.
            num_bytes: Its size.

        Returns:
            From when on the link is free then, and when the transfer arrives.
        """
        free_at = max(now, free_at) + num_bytes / self.bytes_per_s
        return free_at, free_at + self.latency_s


# NVLink: a quarter of the 600 GB/s that papers name, assumed; 100 and 25 GbE: 96 % of the wire. Assumed: InfiniBand is
# HDR, 200 Gb/s, with the same share; PCIe 4.0 x16 reaches 25 of 32 GB/s; TCP is one stream of the kernel's on a 10 Gb/s
# network.
LINKS = {
    "nvlink": LinkSpeed(bytes_per_s=150e9),
    "pcie": LinkSpeed(bytes_per_s=25e9),
    "infiniband": LinkSpeed(bytes_per_s=24e9),
    "100gbe": LinkSpeed(bytes_per_s=12e9),
    "25gbe": LinkSpeed(bytes_per_s=3e9),
    "tcp": LinkSpeed(bytes_per_s=1.2e9),
}


def find_link(name: str) -> LinkSpeed:
    """Look a kind of link up by name, in any case.

    Raises:
        UnknownModelError: Lists the known ones.
    """
    found = LINKS.get(name.lower())
    if found is None:
        raise UnknownModelError(f"link {name!r} is unknown; known are {', '.join(LINKS)}")
    return found


def estimate_transfer_s(num_tokens: int, kv_bytes_per_token: int, bytes_per_s: float) -> float:
    """Estimate the time to move the KV cache of a request between engines.

    Args:
        num_tokens: Tokens in the cache.
        kv_bytes_per_token: Bytes of KV cache per token.
        bytes_per_s: Measured rate; 0 when none was measured.

    Returns:
        Seconds.

    Source: TaiChi, section 3.4: size / bandwidth, plus a fixed latency.
    """
    rate = bytes_per_s if bytes_per_s > 0 and math.isfinite(bytes_per_s) else DEFAULT_TRANSFER_BYTES_PER_S
    return TRANSFER_LATENCY_S + num_tokens * kv_bytes_per_token / rate
