"""What an emulated engine answers: at each position a token that is a function of the prompt and the position alone.

So a request that moves, recomputes or recovers has the very tokens of one that does not, and whoever knows the prompt
knows the answer.
"""

from __future__ import annotations

import zlib

import numpy as np

# Ids below it are usually special tokens.
FIRST_TOKEN = 16
# Odd constants of a multiplicative hash (Knuth, TAOCP 6.4); any would do.
_HASH_PROMPT, _HASH_POSITION = 2654435761, 2246822519


def choose_token(prompt_hash: int, position: int, vocabulary_tokens: int, eos_token_ids: frozenset[int]) -> int:
    """The token at a position of a prompt's sequence, and of every part of it wherever it is computed.

    Args:
        prompt_hash: ``hash_prompt`` of the whole prompt.
        position: Index in prompt + output.
        vocabulary_tokens: Size of the vocabulary.
        eos_token_ids: Tokens that it must not be.
    """
    first = min(FIRST_TOKEN, vocabulary_tokens - 1)
    mixed = (prompt_hash * _HASH_PROMPT ^ position * _HASH_POSITION) & 0xFFFFFFFF
    mixed ^= mixed >> 15
    token = first + mixed % (vocabulary_tokens - first)
    while token in eos_token_ids:
        token = first + (token + 1 - first) % (vocabulary_tokens - first)
    return token


def hash_prompt(prompt_token_ids: list[int]) -> int:
    """Checksum of a whole prompt."""
    return zlib.crc32(np.asarray(prompt_token_ids, dtype=np.uint32).tobytes())
