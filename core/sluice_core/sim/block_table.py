"""The KV blocks that one request refers to on one engine, with prefix reuse."""

from __future__ import annotations


class BlockTable:
    """What a request holds on one engine; mutable, changed by ``PrefixCache`` only.

    Args:
        index: Number of the request.
        prompt_tokens: Its prompt.
        hashes: Of its prompt: see ``Arrival.block_hashes``.
        entries: Cached blocks that it begins with.

    Attributes:
        num_found: Cached blocks that it began with.
        num_blocks: Blocks that were taken for it or found, ``entries`` included; those of decodes as of ``cache_filled_blocks``.
    """

    __slots__ = ("entries", "hashes", "index", "num_blocks", "num_found", "prompt_tokens")

    def __init__(self, index: int, prompt_tokens: int, hashes: tuple[int, ...], entries: list[int]) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.hashes = hashes
        self.entries = entries
        self.num_found = self.num_blocks = len(entries)
