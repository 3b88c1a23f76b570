"""The KV blocks of a simulated engine by what is in them, as vLLM keeps them with prefix caching.

A block that a prompt has filled is *cached* under a hash of its tokens and of all before them; a prompt that begins
with the same tokens refers to it instead of computing it.

- Only full blocks are found, from the start of the prompt up to the first that is missing, and never all tokens: the
  last one is computed, for its logits.
- A block is found as soon as the chunk that fills it is scheduled, before it is computed: in its layers a batch writes
  KV before it reads any.
- What two requests computed at the same time is there twice. The block that was cached first is found.
- A block that nobody refers to is free and stays cached. Blocks are taken first of those without content, then of the
  cached ones, the longest unused first; of one request the last one first.
- Blocks that hold generated tokens are found by their own request only, after a preemption or a move, unless the
  request has hashes of its answer, too: without them nobody knows what other prompts would contain of it.

Blocks without a hash are all alike, so they are counted; cached ones are *entries*, numbers into lists. At all times
``num_empty + num_free_cached + num_uncached + entries referred to == num_blocks``.

Source: vLLM 0.32, ``v1/core/block_pool.py`` and ``single_type_kv_cache_manager.py``; ``engine_image/tests`` compares.
"""

from __future__ import annotations

from typing import Final

from sluice_core.sim.block_table import BlockTable


class CacheChanges:
    """What entered a cache and what left it since the last report, each block of a prompt once.

    Attributes:
        stored: Keys that were not there and are.
        removed: Keys that were there and are not.
    """

    __slots__ = ("removed", "stored")

    def __init__(self) -> None:
        self.stored: set[int] = set()
        self.removed: set[int] = set()

    def store(self, key: int) -> None:
        """Note that a key entered the cache."""
        if key in self.removed:
            self.removed.remove(key)
        else:
            self.stored.add(key)

    def remove(self, key: int) -> None:
        """Note that a key left the cache."""
        if key in self.stored:
            self.stored.remove(key)
        else:
            self.removed.add(key)


class ReportedCache:
    """A cache whose changes are reported; mutable.

    Attributes:
        changes: Since they were last taken away; None: they are not kept.
    """

    __slots__ = ("changes",)

    def __init__(self) -> None:
        self.changes: CacheChanges | None = None

    def take_changes(self) -> CacheChanges:
        """Return what has changed since the last call; keeps changes from the first call on."""
        changes = self.changes
        self.changes = CacheChanges()
        return CacheChanges() if changes is None else changes


POSITION_BITS: Final = 24  # of a key: a request's blocks are fewer
_ENDS: Final = 0  # the entry between the last and the first idle one


class PrefixCache(ReportedCache):
    """The blocks of one engine; mutable, changed by the engine and its ``PrefillQueue``.

    Callers have checked that there are so many blocks: see ``SimEngine.free_blocks``.

    Args:
        num_blocks: Blocks of the engine.
        block_size_tokens: Tokens of each.
        hash_block_tokens: Tokens that each hash of a request names.

    Attributes:
        num_empty: Free blocks without content.
        num_free_cached: Free blocks that are cached.
        num_uncached: Blocks in use without a hash.
        num_queried_tokens: Tokens of the prompts that were looked up and begun.
        num_hit_tokens: Of these, tokens that were found.
    """

    __slots__ = (
        "_block_size",
        "_duplicates",
        "_entry_of",
        "_hash_block",
        "_keys",
        "_next",
        "_num_blocks",
        "_previous",
        "_references",
        "_unused",
        "num_empty",
        "num_free_cached",
        "num_hit_tokens",
        "num_queried_tokens",
        "num_uncached",
    )

    def __init__(self, num_blocks: int, block_size_tokens: int, hash_block_tokens: int) -> None:
        super().__init__()
        self.num_empty = num_blocks
        self.num_free_cached = 0
        self.num_uncached = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._num_blocks = num_blocks
        self._block_size = block_size_tokens
        self._hash_block = hash_block_tokens
        self._entry_of: dict[int, int] = {}
        self._duplicates: dict[int, list[int]] = {}
        self._unused: list[int] = list(range(num_blocks, 0, -1))
        self._keys: list[int] = [0] * (num_blocks + 1)
        self._references: list[int] = [0] * (num_blocks + 1)
        self._next: list[int] = [_ENDS] * (num_blocks + 1)
        self._previous: list[int] = [_ENDS] * (num_blocks + 1)

    def find_cached_blocks(self, index: int, prompt_tokens: int, hashes: tuple[int, ...], num_tokens: int) -> list[int]:
        """Find the cached blocks that a request's tokens begin with.

        Args:
            index: Number of the request.
            prompt_tokens: Its prompt.
            hashes: Of its prompt.
            num_tokens: Look no further; at most those that it will have KV of.

        Returns:
            Their entries, from the start.
        """
        found: list[int] = []
        for position in range(num_tokens // self._block_size):
            entry = self._entry_of.get(self._make_key(index, prompt_tokens, hashes, position))
            if entry is None:
                break
            found.append(entry)
        return found

    def list_keys(self, index: int, prompt_tokens: int, hashes: tuple[int, ...], first: int, end: int) -> list[int]:
        """List the keys of a request's blocks from ``first`` up to ``end``."""
        return [self._make_key(index, prompt_tokens, hashes, position) for position in range(first, end)]

    def holds(self, key: int) -> bool:
        """Say whether a block is cached."""
        return key in self._entry_of

    def count_free(self, found: list[int]) -> int:
        """Count the found blocks that are free: a request that takes them needs as many fewer."""
        references, num_free_cached = self._references, 0
        for entry in found:
            if references[entry] == 0:
                num_free_cached += 1
        return num_free_cached

    def open_table(self, index: int, prompt_tokens: int, hashes: tuple[int, ...], found: list[int]) -> BlockTable:
        """Refer to found blocks: what a request begins with."""
        references = self._references
        for entry in found:
            if references[entry] == 0:
                self._remove_free(entry)
            references[entry] += 1
        return BlockTable(index, prompt_tokens, hashes, found)

    def take(self, num_blocks: int) -> None:
        """Take free blocks for tokens to come; what was in them is cached no more."""
        self.num_uncached += num_blocks
        num_evicted = num_blocks - self.num_empty
        if num_evicted <= 0:
            self.num_empty -= num_blocks
            return
        self.num_empty = 0
        for _ in range(num_evicted):
            entry = self._next[_ENDS]
            assert entry != _ENDS, "more blocks were taken than are free"
            self._remove_free(entry)
            self._evict(entry)

    def free_uncached(self, num_blocks: int) -> None:
        """Free blocks that were taken and have no content."""
        self.num_uncached -= num_blocks
        self.num_empty += num_blocks

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Take the blocks of a prefill's next chunk, and cache those that it fills.

        Args:
            table: The request's.
            num_tokens: Its tokens up to the end of the chunk.
        """
        num_blocks = -(-num_tokens // self._block_size)
        if num_blocks > table.num_blocks:
            self.take(num_blocks - table.num_blocks)
            table.num_blocks = num_blocks
        self._cache(table, min(num_tokens, table.prompt_tokens) // self._block_size)

    def reserve(self, table: BlockTable, num_blocks: int) -> None:
        """Take the blocks that KV on its way will fill, those found included."""
        self.take(num_blocks - table.num_blocks)
        table.num_blocks = num_blocks

    def cache_filled_blocks(self, table: BlockTable, num_tokens: int, num_cached_tokens: int | None = None) -> None:
        """Cache the blocks that a request has filled by decoding or that have arrived.

        They are cached late, when the request leaves: no other request could find them before.

        Args:
            table: The request's.
            num_tokens: Tokens that it has KV of.
            num_cached_tokens: Those of them whose blocks are cached if they are full; None: all.
        """
        table.num_blocks = -(-num_tokens // self._block_size)
        self._cache(table, (num_tokens if num_cached_tokens is None else num_cached_tokens) // self._block_size)

    def release(self, table: BlockTable) -> int:
        """Give up what a request refers to.

        Returns:
            Blocks that became free.
        """
        references, entries = self._references, table.entries
        num_uncached = num_free = table.num_blocks - len(entries)
        self.num_uncached -= num_uncached
        self.num_empty += num_uncached
        for position in range(len(entries) - 1, -1, -1):
            entry = entries[position]
            references[entry] -= 1
            if references[entry] == 0:
                self._append_free(entry)
                num_free += 1
        return num_free

    def check(self) -> None:
        """Assert that no block is lost or counted twice, and that the lists agree with one another."""
        num_referred = sum(count > 0 for count in self._references)
        assert self.num_empty + self.num_free_cached + self.num_uncached + num_referred == self._num_blocks
        assert min(self.num_empty, self.num_free_cached, self.num_uncached, *self._references) >= 0
        idle: list[int] = []
        entry = self._next[_ENDS]
        while entry != _ENDS:
            assert self._references[entry] == 0
            assert self._previous[self._next[entry]] == entry
            idle.append(entry)
            entry = self._next[entry]
        cached = list(self._entry_of.values()) + [
            duplicate for duplicates in self._duplicates.values() for duplicate in duplicates
        ]
        assert len(idle) == self.num_free_cached
        assert len(set(cached)) == len(cached) == self.num_free_cached + num_referred
        assert not set(cached) & set(self._unused)
        assert len(cached) + len(self._unused) == self._num_blocks
        assert all(self._keys[entry] == key for key, entry in self._entry_of.items())

    def check_idle(self) -> None:
        """Assert that nobody refers to anything, and what ``check`` does."""
        self.check()
        assert self.num_uncached == 0
        assert self.num_empty + self.num_free_cached == self._num_blocks

    def _make_key(self, index: int, prompt_tokens: int, hashes: tuple[int, ...], position: int) -> int:
        """Name a block of a request and all that is before it; others have the same name where they have the same."""
        end = (position + 1) * self._block_size
        if hashes and (end <= prompt_tokens or len(hashes) > -(-prompt_tokens // self._hash_block)):
            return hashes[(end - 1) // self._hash_block] << POSITION_BITS | position
        return ~(index << POSITION_BITS | position)

    def _cache(self, table: BlockTable, num_full_blocks: int) -> None:
        """Cache blocks of a request up to a number."""
        entries, index, prompt_tokens, hashes = table.entries, table.index, table.prompt_tokens, table.hashes
        for position in range(len(entries), num_full_blocks):
            key = self._make_key(index, prompt_tokens, hashes, position)
            entry = self._unused.pop()
            self._keys[entry] = key
            self._references[entry] = 1
            if key not in self._entry_of:
                self._entry_of[key] = entry
                if self.changes is not None and key >= 0:
                    self.changes.store(key)
            elif key in self._duplicates:
                self._duplicates[key].append(entry)
            else:
                self._duplicates[key] = [entry]
            entries.append(entry)
            self.num_uncached -= 1

    def _evict(self, entry: int) -> None:
        """Take the hash off a block."""
        key = self._keys[entry]
        self._unused.append(entry)
        duplicates = self._duplicates.get(key)
        if duplicates is None:
            del self._entry_of[key]
            if self.changes is not None and key >= 0:
                self.changes.remove(key)
            return
        if self._entry_of[key] == entry:
            self._entry_of[key] = duplicates.pop(0)
        else:
            duplicates.remove(entry)
        if not duplicates:
            del self._duplicates[key]

    def _append_free(self, entry: int) -> None:
        """Put an entry behind all idle ones."""
        last = self._previous[_ENDS]
        self._next[last] = entry
        self._previous[entry] = last
        self._next[entry] = _ENDS
        self._previous[_ENDS] = entry
        self.num_free_cached += 1

    def _remove_free(self, entry: int) -> None:
        """Take an entry from among the idle ones."""
        before, after = self._previous[entry], self._next[entry]
        self._next[before] = after
        self._previous[after] = before
        self.num_free_cached -= 1


def list_prompt_keys(hashes: tuple[int, ...], num_blocks: int, block_size: int, hash_block_tokens: int) -> list[int]:
    """List the keys of the first blocks of a prompt; empty for one without hashes.

    Args:
        hashes: Of its prompt: see ``Arrival.block_hashes``.
        num_blocks: How many; all are full.
        block_size: Tokens of each.
        hash_block_tokens: Tokens that each hash names.
    """
    if not hashes:
        return []
    return [
        hashes[((position + 1) * block_size - 1) // hash_block_tokens] << POSITION_BITS | position
        for position in range(num_blocks)
    ]
