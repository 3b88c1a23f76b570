"""Grants: room for requests that are on their way to this engine, whether there is any, and how they come to use it.

Without grants, two full engines that hand requests over to each other stop for ever. A grant takes real KV blocks out
of vLLM's pool at once, so that no two routers are promised the same block. States::

    open     reserved for a key; lapses after its time to live
    claimed  a request named the key; kept until that request is admitted or ends
    closed   the blocks are the request's own, or free again

While a grant is open, KV may come into its blocks in parts (``part_pulls``). Blocks that a read fills are
kept from everybody until it has ended, whatever becomes of the grant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sluice_engine.core_messages import GrantAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice_core.kv_blocks import KvBlocks
    from sluice_engine.core_messages import GrantCommand

# Time to live of a grant, in seconds: from its answer until the request names it.
GRANT_TTL_S = 2.0


class BlockPool(Protocol):
    """What is used of ``vllm.v1.core.block_pool.BlockPool``."""

    def get_num_free_blocks(self) -> int:
        """Blocks that an allocation could take."""

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Takes blocks; ValueError when there are too few."""

    def free_blocks(self, ordered_blocks: list[Any]) -> None:
        """Gives blocks back."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Holds cached blocks too."""


@dataclass(slots=True)
class GrantedRoom:
    """A reservation; mutable, owned by the table.

    Args:
        num_blocks: Blocks promised.
        ttl_s: Its time to live, from the grant and from each part on.
        blocks: Empty blocks out of the pool now.
        held: Blocks of the request's KV, in order; they are in the prefix cache.
        num_shared: Of these, those that a request had when they were found.
        num_reading: Blocks that a read fills.
        copy: What ``part_pulls`` knows of the KV.
        expires_s: When it lapses, while it is open.
        request_id: Who claimed it; empty while it is open.
    """

    num_blocks: int
    ttl_s: float = 0.0
    blocks: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    num_shared: int = 0
    num_reading: int = 0
    copy: Any = None
    expires_s: float = 0.0
    request_id: str = ""


class GrantTable:
    """All reservations of one engine.

    Args:
        pool: vLLM's pool of KV blocks.

    Attributes:
        key_of_request: Key of the grant that each request has claimed; read it, and change it through the methods.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_key: dict[str, GrantedRoom] = {}
        self._num_reading = 0
        self.key_of_request: dict[str, str] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks out of the pool for grants."""
        return self._num_reading + sum(
            len(grant.blocks) + len(grant.held) - grant.num_shared for grant in self._by_key.values()
        )

    @property
    def num_open(self) -> int:
        """Grants that no request has claimed yet; each keeps a seat in the batch."""
        return len(self._by_key) - len(self.key_of_request)

    def reserve(self, key: str, num_blocks: int, expires_s: float, ttl_s: float = 0.0) -> bool:
        """Takes blocks out of the pool for ``key``; each part that comes lets it live for ``ttl_s`` more.

        Returns:
            False when the pool has too few, or the key is in use.
        """
        if key in self._by_key or num_blocks > self._pool.get_num_free_blocks():
            return False
        blocks = self._pool.get_new_blocks(num_blocks)
        self._by_key[key] = GrantedRoom(num_blocks=num_blocks, blocks=blocks, expires_s=expires_s, ttl_s=ttl_s)
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
        self.key_of_request[request_id] = key
        return True

    def is_claimed_by(self, request_id: str) -> bool:
        """True when the request has a reservation."""
        return request_id in self.key_of_request

    def lift(self, request_id: str) -> None:
        """Gives the request's reserved blocks to the pool, for the allocation that follows at once.

        Both happen in one call of vLLM's allocator, during which nobody else can take the blocks.
        """
        self._give_back(self._by_key[self.key_of_request[request_id]])

    def lower(self, request_id: str, num_held_blocks: int) -> None:
        """Reserves again what the request did not take: its KV is one token shorter than the grant.

        Args:
            request_id: The request.
            num_held_blocks: Blocks that it holds now.
        """
        grant = self._by_key[self.key_of_request[request_id]]
        missing = min(grant.num_blocks - num_held_blocks, self._pool.get_num_free_blocks())
        grant.blocks = self._pool.get_new_blocks(missing) if missing > 0 else []

    def close(self, request_id: str) -> None:
        """Ends the request's reservation, if it has one."""
        key = self.key_of_request.get(request_id)
        if key is not None:
            self.release(key)

    def release(self, key: str) -> None:
        """Ends a reservation; an unknown key is no error."""
        grant = self._by_key.pop(key, None)
        if grant is None:
            return
        self.key_of_request.pop(grant.request_id, None)
        self._give_back(grant)

    def _give_back(self, grant: GrantedRoom) -> None:
        """Gives the pool all but what a read fills; the last blocks of a prefix are evicted first."""
        blocks = grant.blocks + grant.held[::-1]
        grant.blocks, grant.held, grant.num_shared = [], [], 0
        if blocks:
            self._pool.free_blocks(blocks)

    def release_open(self, key: str) -> None:
        """Ends a reservation that no request has claimed; others stay."""
        grant = self._by_key.get(key)
        if grant is not None and not grant.request_id:
            self.release(key)

    def expire(self, now_s: float) -> None:
        """Ends open grants whose time is over."""
        if len(self._by_key) == len(self.key_of_request):
            return
        lapsed = [
            key
            for key, grant in self._by_key.items()
            if not grant.request_id and grant.expires_s <= now_s and not grant.num_reading
        ]
        for key in lapsed:
            self.release(key)

    # --- parts -----------------------------------------------------------------------------------------------------

    def get_open(self, key: str) -> GrantedRoom | None:
        """The grant of a key, if no request has claimed it yet."""
        grant = self._by_key.get(key)
        return None if grant is None or grant.request_id else grant

    def count_held(self, key: str) -> int:
        """Counts the blocks of a request's KV that a grant holds; 0 for an unknown key."""
        grant = self._by_key.get(key)
        return 0 if grant is None else len(grant.held)

    def hold(self, grant: GrantedRoom, cached: list[Any]) -> int:
        """Holds cached blocks in the place of empty ones.

        Returns:
            How many of them: no more than the grant has empty ones.
        """
        cached = cached[: len(grant.blocks)]
        grant.num_shared += sum(block.ref_cnt > 0 for block in cached)
        self._pool.touch(cached)
        self._pool.free_blocks(grant.blocks[: len(cached)])
        del grant.blocks[: len(cached)]
        grant.held += cached
        return len(cached)

    def begin_read(self, grant: GrantedRoom, num_blocks: int) -> list[Any]:
        """Takes empty blocks of a grant for a read, as many as there are."""
        blocks = grant.blocks[:num_blocks]
        del grant.blocks[: len(blocks)]
        grant.num_reading += len(blocks)
        self._num_reading += len(blocks)
        return blocks

    def end_read(self, key: str, blocks: list[Any], *, is_whole: bool, now_s: float) -> GrantedRoom | None:
        """Gives the blocks of a read back to their grant; to the pool, if it has ended.

        Returns:
            The grant; None: it has ended, or a request has claimed it.
        """
        self._num_reading -= len(blocks)
        grant = self._by_key.get(key)
        if grant is not None:
            grant.num_reading -= len(blocks)
        if grant is None or grant.request_id:
            self._pool.free_blocks(blocks)
            return None
        (grant.held if is_whole else grant.blocks).extend(blocks)
        grant.expires_s = max(grant.expires_s, now_s + grant.ttl_s)
        return grant


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoom:
    """What decides on a grant.

    Args:
        is_draining: The engine drains.
        share: Share of its KV blocks that it fills for such a move.
        has_seat: The batch has a place that is neither taken nor promised.
        kv: KV blocks now.
        num_prefill_blocks: Blocks that prefills under way still need.
        is_recompute_waiting: A preempted request waits for blocks.
    """

    is_draining: bool
    share: float
    has_seat: bool
    kv: KvBlocks
    num_prefill_blocks: int
    is_recompute_waiting: bool


def answer_grant(
    command: GrantCommand, num_blocks: int, room: EngineRoom, table: GrantTable, now_s: float
) -> GrantAnswer:
    """Reserves blocks for a grant if there is room.

    Args:
        command: The key, the reason for the move and the time to live.
        num_blocks: Blocks that the request will hold.
        room: What the engine has.
        table: Where the blocks are reserved.
        now_s: Monotonic time.
    """
    reason = find_refusal(num_blocks, room)
    if not reason and not table.reserve(command.key, num_blocks, now_s + command.ttl_s, command.ttl_s):
        reason = "kv"
    return GrantAnswer(key=command.key, is_granted=not reason, reason=reason, ttl_s=0.0 if reason else command.ttl_s)


def find_refusal(num_blocks: int, room: EngineRoom) -> str:
    """Why a grant is refused: ``draining``, ``seqs``, ``watermark``, ``kv``; empty when it is not."""
    if room.is_draining:
        return "draining"
    if not room.has_seat:
        return "seqs"
    kv = room.kv
    if room.share < 1.0 and kv.used + kv.granted + num_blocks > room.share * kv.total:
        return "watermark"
    # Prefills under way need their rest, and whoever waits for room to recompute goes first.
    needed = num_blocks + room.num_prefill_blocks
    return "kv" if needed > kv.available or room.is_recompute_waiting else ""


class GrantAllocator:
    """Stands in for vLLM's ``allocate_slots``: a granted request finds its own blocks free, and nobody else does.

    Args:
        manager: vLLM's KV cache manager; its ``allocate_slots`` is replaced.
        table: The engine's grants.
        count_blocks_of: Counts a request's blocks.
    """

    __slots__ = ("_allocate_slots", "_claims", "_count_blocks_of", "_table")

    def __init__(self, manager: Any, table: GrantTable, count_blocks_of: Callable[[str], int]) -> None:
        self._allocate_slots = manager.allocate_slots
        self._table = table
        self._claims = table.key_of_request
        self._count_blocks_of = count_blocks_of
        manager.allocate_slots = self.allocate_slots

    def allocate_slots(self, request: Any, num_new_tokens: int, **options: Any) -> Any:
        """See vLLM's ``KVCacheManager.allocate_slots``."""
        request_id = request.request_id
        # Every request of every iteration comes through here, so that the common case costs no call.
        if request_id not in self._claims:
            return self._allocate_slots(request, num_new_tokens, **options)
        self._table.lift(request_id)
        # The grant has reserved the room already: vLLM's own reserve for others must not refuse it.
        options |= {"reserved_blocks": 0, "has_scheduled_reqs": False}
        blocks = self._allocate_slots(request, num_new_tokens, **options)
        is_pulling = options.get("delay_cache_blocks")
        if blocks is not None and not is_pulling:
            self._table.close(request_id)
        else:
            # Out of blocks, or the pull begins: the token after the pulled ones still needs its room.
            self._table.lower(request_id, self._count_blocks_of(request_id))
        return blocks
