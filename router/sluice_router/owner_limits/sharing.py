"""What routers tell each other of their owners' use, by way of engines, and when.

Reports go to two engines, so that one that dies takes no news along. A report says how seconds stand and not what was
added, so that it does no harm twice, or from two engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from sluice.v1 import engine_pb2
from sluice_router.owner_limits.limiter import LocalUsage, OwnerLimiter
from sluice_router.owner_limits.peers import Peer
from sluice_router.owner_limits.usage_window import NUM_BUCKETS, OwnerUsage

Relay = TypeVar("Relay")

# Shortest time between two reports; with the router's tick and the way it stays below limiter.NEWS_DELAY_S.
REPORT_INTERVAL_S = 0.1
# Longest silence, well below peers.SILENCE_S.
HEARTBEAT_S = 1.0
NUM_RELAYS = 2


class UsageSharing:
    """Reports this router's use, and takes the others'.

    Args:
        limiter: Knows both.
    """

    def __init__(self, limiter: OwnerLimiter) -> None:
        self._limiter = limiter
        self._relays: list[object] = []
        self._reported_s = -math.inf
        self._number = 0

    def report(self, relays: Sequence[Relay], now: float) -> list[tuple[Relay, engine_pb2.RouterUsage]]:
        """Reports what changed, if it is time to.

        Args:
            relays: Streams to engines, in an order that changes seldom; one that is new gets everything.
            now: The router's clock.

        Returns:
            What to send on which of the streams.
        """
        limiter, relays = self._limiter, relays[:NUM_RELAYS]
        due_s = REPORT_INTERVAL_S if limiter.changed else HEARTBEAT_S
        is_new = any(relay not in self._relays for relay in relays)
        if not limiter.has_limits or not (is_new or now - self._reported_s >= due_s):
            return []
        self._number += 1
        news = engine_pb2.RouterUsage(second=math.floor(now), number=self._number)
        whole = engine_pb2.RouterUsage(second=math.floor(now), number=self._number)
        for owner in sorted(limiter.changed):
            changed = limiter.local.get(owner)
            if changed is None:
                # It was forgotten here, and so it shall be elsewhere: nothing of it runs.
                news.owners.add(owner=owner)
            else:
                _add_owner(news, owner, changed, changed.dirty)
                changed.dirty = set()
        if is_new:
            for owner, usage in limiter.local.items():
                _add_owner(whole, owner, usage, usage.buckets)
        reports = [(relay, news if relay in self._relays else whole) for relay in relays]
        limiter.changed.clear()
        self._relays, self._reported_s = list(relays), now
        return reports

    def take(self, usage: engine_pb2.RouterUsage, now: float, *, is_history: bool = False) -> None:
        """Takes what another router reports.

        Args:
            usage: Its report.
            now: This router's clock.
            is_history: An engine kept it: what is known from reports is newer.
        """
        second = math.floor(now)
        peer = self._limiter.peers.get(usage.router_id)
        if peer is None:
            peer = self._limiter.peers[usage.router_id] = Peer(
                heard_s=now, offset=second - usage.second, number=usage.number
            )
        elif usage.number <= peer.number and not is_history:
            return
        if not is_history:
            peer.heard_s, peer.number = now, usage.number
        for reported in usage.owners:
            if not self._limiter.is_limited(reported.owner):
                continue
            owner = peer.owners.get(reported.owner)
            is_known = owner is not None
            if owner is None:
                owner = peer.owners[reported.owner] = OwnerUsage()
            if not (is_history and is_known):
                owner.running = reported.running
            for entry in reported.seconds:
                bucket = entry.second + peer.offset
                if second - bucket < NUM_BUCKETS and not (is_history and bucket in owner.buckets):
                    owner.replace(bucket, entry.requests, entry.tokens)


def _add_owner(message: engine_pb2.RouterUsage, owner: str, usage: LocalUsage, seconds: Iterable[int]) -> None:
    buckets = [(second, usage.buckets[second]) for second in sorted(seconds) if second in usage.buckets]
    message.owners.add(
        owner=owner,
        running=usage.running,
        seconds=[
            engine_pb2.SecondUsage(second=second, requests=bucket.requests, tokens=max(0, bucket.tokens))
            for second, bucket in buckets
        ],
    )
