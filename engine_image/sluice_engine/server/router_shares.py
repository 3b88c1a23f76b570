"""Shares: the routers of a cluster divide the engines among themselves without knowing one another.

Each engine is in the share of one of its routers, by rendezvous hashing. A router places on its own share first, and on
other engines only when its own are busier. A router that comes or goes changes the shares of its own engines alone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def choose_owner(engine_id: str, router_ids: Iterable[str]) -> str:
    """The router in whose share an engine is; empty without routers."""
    return max(
        router_ids, key=lambda router_id: hashlib.sha256(f"{router_id}/{engine_id}".encode()).digest(), default=""
    )
