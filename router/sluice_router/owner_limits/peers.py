"""The other routers, as far as this one has heard of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice_router.owner_limits.usage_window import OwnerUsage

# A peer that is silent for so long is not heard of, in seconds.
SILENCE_S = 3.0


@dataclass(slots=True, kw_only=True)
class Peer:
    """What another router has used.

    Args:
        heard_s: When it was last heard of.
        offset: This router's count of seconds less the peer's.
        number: Of its last report.
        owners: Its usage.
    """

    heard_s: float
    offset: int = 0
    number: int = 0
    owners: dict[str, OwnerUsage] = field(default_factory=dict)

    def is_heard(self, now: float) -> bool:
        """Whether its news comes in time."""
        return now - self.heard_s <= SILENCE_S
