"""What an iteration may hold within a time: how many prefill tokens beside its decodes, and how many decodes."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from sluice_core.latency import LatencyModel
from sluice_core.records import IterationShape

_STEP_DECODES: Final = 16  # GEMMs take steps of so many tokens


class IterationLimits(NamedTuple):
    """How long the iterations of engines may take.

    Args:
        iteration_s: With as many prefill tokens as fit, in seconds.
        least_prefill_s: Time that prefills have beside decodes in any case.
        decodes_s: With no more prefills than that, or than decodes bring. An engine has no seats for more decodes.
        alone_tokens: Most prefill tokens of an iteration without decodes; 0: as many as fit.
    """

    iteration_s: float = math.inf
    least_prefill_s: float = 0.0
    decodes_s: float = math.inf
    alone_tokens: int = 0


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


def count_fitting_decodes(
    latency: LatencyModel,
    limits: IterationLimits,
    num_decodes: int,
    context_tokens: float,
    *,
    prefill_per_decode: float = 0.0,
) -> int | None:
    """Count the decodes with which an iteration ends within a limit, beside the prefills that they bring.

    Args:
        latency: How long the engine's iterations take.
        limits: Of the engine.
        num_decodes: About how many there are: around it the time is taken to grow evenly.
        context_tokens: Context of each.
        prefill_per_decode: Prefill tokens of each.

    Returns:
        The number; None: not even one fits, or more of them take no longer, so that their number does not matter.
    """

    def estimate_s(number: int) -> float:
        contexts = round(number * context_tokens)
        alone_s = latency.estimate_shape_s(IterationShape(num_decodes=number, decode_context_tokens=contexts))
        prefill_tokens = round(number * prefill_per_decode)
        if not prefill_tokens or not limits.least_prefill_s:
            return alone_s
        beside_s = estimate_chunk_s(latency, prefill_tokens, number, contexts)
        return min(alone_s + limits.least_prefill_s, beside_s)

    now_s = estimate_s(num_decodes)
    step_s = estimate_s(num_decodes + _STEP_DECODES) - now_s
    if step_s <= 0.0:
        return None
    number = num_decodes + math.floor((limits.decodes_s - now_s) * _STEP_DECODES / step_s)
    return number if number > 0 else None


def estimate_chunk_s(latency: LatencyModel, tokens: int, num_decodes: int, decode_context_tokens: int) -> float:
    """Estimate an iteration with one chunk that needs no attention, in seconds."""
    return latency.estimate_shape_s(
        IterationShape(
            prefill_tokens=tokens, num_chunks=1, num_decodes=num_decodes, decode_context_tokens=decode_context_tokens
        )
    )
