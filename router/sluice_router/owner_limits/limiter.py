"""Whether an owner of API keys may have one more request, given what it has used on this router and on the others.

Routers tell each other what was used (``sharing``), but late. So a router assumes that each of its peers has used as
much in the last moments as it has itself. Let D be how late news is at most. If each router counts its own use of the
last 2 D once more for each peer, then all together stay within the limit: at any time, the sum of what N routers
assume is at least N times what is used. A peer that is not heard of at all is assumed to use as much of the whole
minute as this router, so that each of N separate routers keeps to an Nth. Each router may be one request ahead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sluice_core.records import OwnerLimits
from sluice_router.errors import MIN_RETRY_S, OwnerLimitError
from sluice_router.owner_limits.peers import Peer
from sluice_router.owner_limits.usage_window import OwnerUsage

# Stands for each owner that has no limits of its own.
OTHERS = "*"
# How late a router hears what another one has used, at most: two intervals of its reports, and the way.
NEWS_DELAY_S = 0.25


@dataclass(slots=True, kw_only=True)
class LocalUsage(OwnerUsage):
    """What one owner has used on this router.

    Args:
        recent: Admissions that peers may not have heard of: time and tokens, oldest first.
        dirty: Seconds that changed since they were last reported.
    """

    recent: deque[tuple[float, int]] = field(default_factory=deque)
    dirty: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a running request holds of its owner's limits.

    Args:
        owner: The owner.
        usage: Where it counts.
        second: The second of its admission.
        tokens: Tokens that were reserved: prompt and max_tokens.
    """

    owner: str
    usage: LocalUsage
    second: int
    tokens: int


class OwnerLimiter:
    """Keeps owners of API keys to their limits. Times are seconds on the router's clock.

    Attributes:
        local: Usage on this router, by owner.
        peers: Usage on the other routers, by router.
        changed: Owners whose usage here changed since it was last reported.
    """

    def __init__(self) -> None:
        self._limits: Mapping[str, OwnerLimits] = {}
        self._num_routers = 1
        self._owners: Collection[str] | None = None
        self._swept_s = -math.inf
        self.local: dict[str, LocalUsage] = {}
        self.peers: dict[str, Peer] = {}
        self.changed: set[str] = set()

    @property
    def has_limits(self) -> bool:
        """Whether any owner has limits."""
        return bool(self._limits)

    def set_limits(self, limits: Mapping[str, OwnerLimits], num_routers: int) -> None:
        """Puts limits in force; the usage of owners that have none any more is forgotten.

        Args:
            limits: By owner.
            num_routers: Routers that share them.
        """
        self._limits, self._num_routers = limits, num_routers
        self._keep()

    def keep_owners(self, owners: Collection[str]) -> None:
        """Forgets owners who have no key any more."""
        self._owners = owners
        self._keep()

    def is_limited(self, owner: str) -> bool:
        """Whether an owner has limits, and still has a key."""
        return (self._owners is None or owner in self._owners) and self.find_limits(owner) is not None

    def find_limits(self, owner: str) -> OwnerLimits | None:
        """Finds the limits of an owner; None: it has none."""
        if not owner or not self._limits:
            return None
        return self._limits.get(owner) or self._limits.get(OTHERS)

    def find_weight(self, owner: str) -> int:
        """Finds an owner's share where several wait."""
        limits = self.find_limits(owner)
        return 1 if limits is None else limits.weight

    def admit(self, owner: str, tokens: int, now: float) -> Reservation | None:
        """Counts a request in.

        Args:
            owner: Whose key it came with; empty: nobody's.
            tokens: Most tokens that it will use: prompt and max_tokens.
            now: The router's clock.

        Returns:
            What it holds until ``end``; None where the owner has no limits.

        Raises:
            OwnerLimitError: A limit is reached; names it, and when to try again.
        """
        limits = self.find_limits(owner)
        if limits is None:
            return None
        local = self.local.setdefault(owner, LocalUsage())
        # A request larger than the limit would never be admitted; it counts as the whole minute.
        tokens = min(tokens, limits.tokens_per_minute or tokens)
        self._check(owner, limits, local, tokens, now)
        return self._reserve(owner, local, 1, tokens, now)

    def take_over(self, owner: str, tokens: int, now: float) -> Reservation | None:
        """Counts a request in that another router has admitted: it runs, within the limits or not.

        Args:
            owner: Whose key it came with; empty: nobody's.
            tokens: Most tokens that it will use here.
            now: The router's clock.

        Returns:
            As ``admit``.
        """
        limits = self.find_limits(owner)
        if limits is None:
            return None
        local = self.local.setdefault(owner, LocalUsage())
        local.advance(math.floor(now))
        return self._reserve(owner, local, 0, min(tokens, limits.tokens_per_minute or tokens), now)

    def _reserve(self, owner: str, local: LocalUsage, num_requests: int, tokens: int, now: float) -> Reservation:
        second = math.floor(now)
        local.add(second, num_requests, tokens)
        local.running += 1
        local.recent.append((now, tokens))
        self._note_change(owner, local, second)
        return Reservation(owner=owner, usage=local, second=second, tokens=tokens)

    def end(self, reservation: Reservation, tokens: int, now: float) -> None:
        """Counts an ended request with the tokens that it has used.

        Args:
            reservation: What it held.
            tokens: Tokens of prompt and output that were computed.
            now: The router's clock.
        """
        local = reservation.usage
        local.running -= 1
        local.advance(math.floor(now))
        if reservation.second in local.buckets:
            local.add(reservation.second, 0, tokens - reservation.tokens)
        # One that was forgotten meanwhile concerns nobody.
        if self.local.get(reservation.owner) is local:
            self._note_change(reservation.owner, local, reservation.second)

    def sweep(self, now: float) -> None:
        """Forgets owners and peers that have used nothing for a minute; looks once a second."""
        if now - self._swept_s < 1:
            return
        self._swept_s, second = now, math.floor(now)
        for owner, local in list(self.local.items()):
            local.advance(second)
            if local.is_idle and owner not in self.changed:
                del self.local[owner]
        for router_id, peer in list(self.peers.items()):
            is_heard = peer.is_heard(now)
            for owner, usage in list(peer.owners.items()):
                usage.advance(second)
                # Of one that has left nothing runs.
                if usage.is_idle or not (usage.buckets or is_heard):
                    del peer.owners[owner]
            if not peer.owners and not is_heard:
                del self.peers[router_id]

    # --- checks --------------------------------------------------------------------------------------------------

    def _check(self, owner: str, limits: OwnerLimits, local: LocalUsage, tokens: int, now: float) -> None:
        """Compares what is used, as far as it is known and as far as it must be assumed, with each limit."""
        second = math.floor(now)
        local.advance(second)
        while local.recent and local.recent[0][0] < now - 2 * NEWS_DELAY_S:
            local.recent.popleft()
        heard = [peer.owners.get(owner) for peer in self.peers.values() if peer.is_heard(now)]
        num_heard = len(heard)
        known = _Known(
            local=local,
            num_shares=1 + max(0, self._num_routers - 1 - num_heard),
            others=[peer.owners[owner] for peer in self.peers.values() if owner in peer.owners],
            heard=[usage for usage in heard if usage is not None],
        )
        for usage in known.others:
            usage.advance(second)
        num_unseen, unseen_tokens = num_heard * len(local.recent), num_heard * sum(spent for _, spent in local.recent)
        for limit, kind, unseen, wanted in (
            ("concurrent_requests", "running", num_unseen, 1),
            ("requests_per_minute", "requests", num_unseen, 1),
            ("tokens_per_minute", "tokens", unseen_tokens, tokens),
        ):
            value = getattr(limits, limit)
            used = known.count(kind) + unseen
            excess = used + wanted - value
            if value and excess > 0:
                retry_s = MIN_RETRY_S if kind == "running" else max(MIN_RETRY_S, known.find_end_s(kind, excess) - now)
                message = (
                    f"{limit} of {owner} is {value}: {used} are in use, {wanted} more are asked for; "
                    f"try again in {math.ceil(retry_s)} s"
                )
                raise OwnerLimitError(message, code=limit, retry_after_s=retry_s)

    def _keep(self) -> None:
        self.changed |= {owner for owner in self.local if not self.is_limited(owner)}
        self.local = {owner: usage for owner, usage in self.local.items() if self.is_limited(owner)}
        for peer in self.peers.values():
            peer.owners = {owner: usage for owner, usage in peer.owners.items() if self.is_limited(owner)}

    def _note_change(self, owner: str, local: LocalUsage, second: int) -> None:
        local.dirty.add(second)
        self.changed.add(owner)


@dataclass(slots=True, kw_only=True)
class _Known:
    """What is known of an owner's use.

    Args:
        local: Here.
        num_shares: This router, and those of which nothing is known: they are assumed to use as much as this one.
        others: On the other routers, also on those that have left.
        heard: On those whose news comes in time.
    """

    local: OwnerUsage
    num_shares: int
    others: list[OwnerUsage]
    heard: list[OwnerUsage]

    def count(self, kind: str) -> int:
        """Sums up what is used of ``running``, ``requests`` or ``tokens``."""
        others = self.heard if kind == "running" else self.others
        return int(getattr(self.local, kind) * self.num_shares + sum(getattr(usage, kind) for usage in others))

    def find_end_s(self, kind: str, excess: int) -> float:
        """Finds when so much of ``requests`` or ``tokens`` has left the minute; the end of a minute at the latest."""
        ends = [(end, getattr(bucket, kind) * self.num_shares) for end, bucket in self.local.list_ends()]
        ends += [(end, getattr(bucket, kind)) for usage in self.others for end, bucket in usage.list_ends()]
        last = 0
        for end, amount in sorted(ends):
            last, excess = end, excess - amount
            if excess <= 0:
                break
        return last
