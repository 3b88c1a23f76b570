"""What an engine tells each of its routers so that several of them place like one.

Routers do not know one another; each engine knows all that are attached to it. So the engine is where they meet:

- *Shares.* Each engine is in the share of one of its routers, by rendezvous hashing: the router looks at it first, the others
  only when their own engines are busier. A router that comes or goes changes the shares of its own engines alone, and one
  whose peers are gone has them all.
- *News.* A submit shows in the load that the other routers are told at once, and not after the iteration under way, which a
  long prefill makes hundreds of milliseconds late. The router that sent it counts it itself until a report includes it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sluice.v1 import engine_pb2 as wire
    from sluice_engine.server.router_session import RouterSession


def choose_owner(engine_id: str, router_ids: Iterable[str]) -> str:
    """The router in whose share an engine is; empty without routers."""
    return max(
        router_ids, key=lambda router_id: hashlib.sha256(f"{router_id}/{engine_id}".encode()).digest(), default=""
    )


def describe_for(
    session: RouterSession, sessions: Iterable[RouterSession], owner: str, report: wire.LoadReport
) -> None:
    """Makes the engine's load report one for a router.

    Args:
        session: The router's.
        sessions: All.
        owner: Router in whose share the engine is.
        report: What the EngineCore told; changed in place.
    """
    report.is_of_others = owner not in {session.router_id, ""}
    for other in sessions:
        if other is not session:
            for _, num_tokens in other.unreported:
                report.queued_prefill_tokens += num_tokens
                report.queued_requests += 1
                report.queued_attention_work += num_tokens * num_tokens / 2
