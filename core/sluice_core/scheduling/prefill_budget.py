"""The prefill budget of an iteration: how many prefill tokens it may hold within a time."""

from __future__ import annotations

import math

from sluice_core.latency import LatencyModel
from sluice_core.records import IterationShape


class PrefillBudget:
    """Prefill budget of an iteration that has a time limit.

    A plain class: compiled, it takes a fifth of the time of a named tuple to make.

    Args:
        tokens: Prefill tokens that it may hold if they need no attention.
        per_work: Room that a token pair of attention takes (``BatchLimits.room_per_work``).
    """

    __slots__ = ("per_work", "tokens")

    def __init__(self, tokens: int, per_work: float) -> None:
        self.tokens = tokens
        self.per_work = per_work


def fit_prefill_budget(
    latency: LatencyModel,
    limit_s: float,
    most_tokens: int,
    num_decodes: int,
    decode_context_tokens: int,
    *,
    least_prefill_s: float = 0.0,
) -> PrefillBudget:
    """Find the most prefill tokens with which an iteration ends within a limit, to within 1 %.

    Args:
        latency: How long the engine's iterations take.
        limit_s: The limit; ``math.inf``: none.
        most_tokens: Most tokens to try.
        num_decodes: Decodes of the iteration.
        decode_context_tokens: Sum of their contexts.
        least_prefill_s: Time that prefills have beside decodes in any case, whatever the limit.
    """
    least_s = estimate_chunk_s(latency, 0, num_decodes, decode_context_tokens)
    if num_decodes and least_prefill_s > 0.0:
        limit_s = max(limit_s, least_s + least_prefill_s)
    most_s = estimate_chunk_s(latency, most_tokens, num_decodes, decode_context_tokens)
    low, low_s, high = 0, least_s, most_tokens
    if most_s <= limit_s:
        low, low_s = most_tokens, most_s
    elif least_s >= limit_s:
        return PrefillBudget(0, 0.0)
    while high - low > 1 + (low >> 7):
        middle = (low + high) >> 1
        middle_s = estimate_chunk_s(latency, middle, num_decodes, decode_context_tokens)
        if middle_s <= limit_s:
            low, low_s = middle, middle_s
        else:
            high = middle
    if low_s <= least_s or limit_s == math.inf:
        return PrefillBudget(low, 0.0)
    coefficients = latency.compute_prefill_coefficients(num_decodes, decode_context_tokens, low)
    return PrefillBudget(low, coefficients.per_work_s * low / (low_s - least_s))


def estimate_chunk_s(latency: LatencyModel, tokens: int, num_decodes: int, decode_context_tokens: int) -> float:
    """Estimate an iteration with one chunk that needs no attention, in seconds."""
    return latency.estimate_shape_s(
        IterationShape(
            prefill_tokens=tokens, num_chunks=1, num_decodes=num_decodes, decode_context_tokens=decode_context_tokens
        )
    )
