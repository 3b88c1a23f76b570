"""Room for requests that are on their way to this engine (architecture 4.3).

A grant takes real KV blocks out of vLLM's pool at once, so that all routers compete for the same room and no two of them
can be promised the same block. It has three states:

    open     reserved for a key; lapses after its time to live
    claimed  a request named the key; kept until that request is admitted or ends
    closed   the blocks are the request's own, or free again

While its request is being admitted the blocks are lifted: given to the pool and taken by the request in one call of
vLLM's allocator, during which nobody else can take them. What the request did not need yet (its KV is one token shorter
than the grant) is reserved again until it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


class BlockPool(Protocol):
    """What is used of ``vllm.v1.core.block_pool.BlockPool``."""

    def get_num_free_blocks(self) -> int:
        """Blocks that an allocation could take."""

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Takes blocks; ValueError when there are too few."""

    def free_blocks(self, ordered_blocks: list[Any]) -> None:
        """Gives blocks back."""


@dataclass(slots=True)
class _Reservation:
    """A reservation; mutable, owned by the table.

    Args:
        num_blocks: Blocks promised.
        blocks: Blocks out of the pool now.
        expires_s: When it lapses, while it is open.
        request_id: Who claimed it; empty while it is open.
    """

    num_blocks: int
    blocks: list[Any] = field(default_factory=list)
    expires_s: float = 0.0
    request_id: str = ""


class GrantTable:
    """All reservations of one engine.

    Args:
        pool: vLLM's pool of KV blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_key: dict[str, _Reservation] = {}
        self._key_of: dict[str, str] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks out of the pool for grants."""
        return sum(len(grant.blocks) for grant in self._by_key.values())

    @property
    def num_open(self) -> int:
        """Grants that no request has claimed yet; each keeps a seat in the batch."""
        return len(self._by_key) - len(self._key_of)

    def reserve(self, key: str, num_blocks: int, expires_s: float) -> bool:
        """Takes blocks out of the pool for ``key``.

        Returns:
            False when the pool has too few, or the key is in use.
        """
        if key in self._by_key or num_blocks > self._pool.get_num_free_blocks():
            return False
        blocks = self._pool.get_new_blocks(num_blocks)
        self._by_key[key] = _Reservation(num_blocks=num_blocks, blocks=blocks, expires_s=expires_s)
        return True

    def claim(self, key: str, request_id: str) -> bool:
        """Ties an open grant to a request.

        Returns:
            False when the key is unknown (it lapsed) or already claimed.
        """
        grant = self._by_key.get(key)
        if grant is None or grant.request_id:
            return False
        grant.request_id = request_id
        self._key_of[request_id] = key
        return True

    def is_claimed_by(self, request_id: str) -> bool:
        """True when the request has a reservation."""
        return request_id in self._key_of

    def lift(self, request_id: str) -> None:
        """Gives the request's reserved blocks to the pool, for the allocation that follows at once."""
        grant = self._by_key[self._key_of[request_id]]
        self._pool.free_blocks(grant.blocks)
        grant.blocks = []

    def lower(self, request_id: str, num_held_blocks: int) -> None:
        """Reserves again what the request did not take.

        Args:
            request_id: The request.
            num_held_blocks: Blocks that it holds now.
        """
        grant = self._by_key[self._key_of[request_id]]
        missing = min(grant.num_blocks - num_held_blocks, self._pool.get_num_free_blocks())
        grant.blocks = self._pool.get_new_blocks(missing) if missing > 0 else []

    def close(self, request_id: str) -> None:
        """Ends the request's reservation, if it has one."""
        key = self._key_of.get(request_id)
        if key is not None:
            self.release(key)

    def release(self, key: str) -> None:
        """Ends a reservation; an unknown key is no error."""
        grant = self._by_key.pop(key, None)
        if grant is None:
            return
        self._key_of.pop(grant.request_id, None)
        if grant.blocks:
            self._pool.free_blocks(grant.blocks)

    def release_open(self, key: str) -> None:
        """Ends a reservation that no request has claimed; others stay."""
        grant = self._by_key.get(key)
        if grant is not None and not grant.request_id:
            self.release(key)

    def expire(self, now_s: float) -> None:
        """Ends open grants whose time is over."""
        if len(self._by_key) == len(self._key_of):
            return
        lapsed = [key for key, grant in self._by_key.items() if not grant.request_id and grant.expires_s <= now_s]
        for key in lapsed:
            self.release(key)
