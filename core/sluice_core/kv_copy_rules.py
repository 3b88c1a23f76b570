"""How much of a moving request's KV is copied, and what its target computes instead.

Parts of its KV are copied while it still decodes. They end when the copy is close enough, or after ``MAX_COPY_PARTS``.
A short tail is computed where the request arrives. Router, engine and simulator go by these rules.
"""

from __future__ import annotations

# Longest tail that is recomputed rather than pulled: in tokens, and in blocks if that is more.
SHORT_TAIL_TOKENS = 64
SHORT_TAIL_BLOCKS = 2


def count_tail_tokens(num_missing_tokens: int, num_present_tokens: int, block_size_tokens: int) -> int:
    """Count the tokens that a moved request computes where it arrives, instead of pulling their KV.

    A pull makes it wait for one iteration more. The end of a request whose beginning is there costs less than that.

    Args:
        num_missing_tokens: Tokens whose KV is not there.
        num_present_tokens: Tokens before them whose KV is.
        block_size_tokens: Tokens per block.

    Returns:
        All of the missing tokens, or 0 when they are to be pulled.
    """
    most = max(SHORT_TAIL_TOKENS, SHORT_TAIL_BLOCKS * block_size_tokens)
    if num_present_tokens <= 0:
        most = block_size_tokens - 1  # no full block to copy beforehand
    return num_missing_tokens if num_missing_tokens <= most else 0


# Parts of a copy; then whatever is left is pulled after the hand-off.
MAX_COPY_PARTS = 4
# Tokens that the source makes between the end of a copy and its hand-off.
HAND_OFF_TOKENS = 4


def is_copy_close(num_tokens: int, num_copied_tokens: int, num_parts: int, block_size_tokens: int) -> bool:
    """Say whether a copy of KV is close enough to a request that runs on, or copying on is of no use.

    Args:
        num_tokens: Tokens of the request.
        num_copied_tokens: Those of them whose KV is copied.
        num_parts: Parts so far.
        block_size_tokens: Tokens per block.
    """
    missing = num_tokens - num_copied_tokens + HAND_OFF_TOKENS
    return num_parts >= MAX_COPY_PARTS or count_tail_tokens(missing, num_copied_tokens, block_size_tokens) > 0
