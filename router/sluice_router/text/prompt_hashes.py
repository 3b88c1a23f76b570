"""Hashes of a prompt's KV blocks, as vLLM computes them."""

from __future__ import annotations

from array import array
from hashlib import sha256
from pickle import dumps
from typing import NamedTuple

# vLLM hashes what it pickles, with the highest protocol of the Pythons that it supports.
PICKLE_PROTOCOL = 5


class PrefixScheme(NamedTuple):
    """How engines hash the KV blocks of prompts; those of one scheme give equal prompts equal hashes.

    Args:
        root: What stands in the place of a hash before that of a prompt's first block.
        block_size_tokens: Tokens per KV block.
    """

    root: bytes
    block_size_tokens: int


class PromptHashes:
    """Hashes of a prompt's full blocks, made as far as they are asked for.

    A block with the prompt's last token is left out: it is computed whatever is cached.

    Args:
        token_ids: The prompt.
        scheme: How its engines hash.
        cache_salt: Keeps it apart from prompts with another one; empty: none.

    Source: vLLM 0.32, ``v1/core/kv_cache_utils.hash_block_tokens`` with ``utils/hashing.sha256``.
    """

    __slots__ = ("_block_size", "_extra_keys", "_hashes", "_parent", "_token_ids", "num_blocks")

    def __init__(self, token_ids: array[int], scheme: PrefixScheme, cache_salt: str) -> None:
        self._token_ids = token_ids
        self._block_size = scheme.block_size_tokens
        self._parent = scheme.root
        self._extra_keys = (("cache_salt", cache_salt),) if cache_salt else None
        self._hashes: list[int] = []
        self.num_blocks = (len(token_ids) - 1) // self._block_size

    def extend(self, num_blocks: int) -> list[int]:
        """Returns the hashes of at least so many blocks, or of all that there are."""
        hashes, size, parent = self._hashes, self._block_size, self._parent
        start, end = len(hashes) * size, min(num_blocks, self.num_blocks) * size
        token_ids = tuple(self._token_ids[start:end])
        for offset in range(0, end - start, size):
            block = (parent, token_ids[offset : offset + size], None if hashes else self._extra_keys)
            parent = sha256(dumps(block, PICKLE_PROTOCOL)).digest()
            hashes.append(int.from_bytes(parent[-8:], "big"))
        self._parent = parent
        return hashes
