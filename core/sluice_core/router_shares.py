"""Which router tries an engine first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def choose_owner(engine_id: str, router_ids: Iterable[str]) -> str:
    """Choose the router in whose share an engine is, by rendezvous hashing; empty without routers.

    Routers divide the engines among themselves without knowing one another. A router places on its own share first, and
    on other engines only when its own are busier. One that comes or goes changes the shares of its own engines alone.

    Args:
        engine_id: The engine.
        router_ids: The routers that are attached to it.
    """

    def weigh(router_id: str) -> bytes:
        return hashlib.sha256(f"{router_id}/{engine_id}".encode()).digest()

    return max(router_ids, key=weigh, default="")
