"""The time of a prefill in closed form: its tokens, its attention work, and the rest of each of its iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(init=False, slots=True)
class PrefillCoefficients:
    """Closed form of a prefill beside a given decode batch.

    See ``compute_prefill_s``. Each report needs one, so it has its own constructor, as the records of each request
    (``records``).
    """

    per_token_s: Final[float]
    per_work_s: Final[float]
    per_iteration_s: Final[float]

    def __init__(self, per_token_s: float, per_work_s: float, per_iteration_s: float) -> None:
        self.per_token_s = per_token_s
        self.per_work_s = per_work_s
        self.per_iteration_s = per_iteration_s

    def compute_s(self, tokens: int, attention_work: float, room_tokens: int) -> float:
        """Compute ``compute_prefill_s`` with these coefficients."""
        return compute_prefill_s(
            per_token_s=self.per_token_s,
            per_work_s=self.per_work_s,
            per_iteration_s=self.per_iteration_s,
            tokens=tokens,
            attention_work=attention_work,
            room_tokens=room_tokens,
        )


def compute_prefill_s(
    *,
    per_token_s: float,
    per_work_s: float,
    per_iteration_s: float,
    tokens: int,
    attention_work: float,
    room_tokens: int,
) -> float:
    """Compute how long prefills take that run one after the other.

    ``AssignPass.walk`` (``scheduling.prefill_feasibility``) repeats the sum in place, for speed.

    Args:
        per_token_s: See ``PrefillCoefficients``.
        per_work_s: See there.
        per_iteration_s: See there; the decodes beside the prefills are part of it.
        tokens: Prompt tokens to compute.
        attention_work: Of these tokens, in token pairs.
        room_tokens: Prefill budget of each iteration, at least 1.
    """
    return per_token_s * tokens + per_work_s * attention_work + -(-tokens // room_tokens) * per_iteration_s


def compute_attention_work(tokens: int, context_tokens: int) -> float:
    """Compute the attention work of a prefill; chunking does not change it.

    Args:
        tokens: Tokens to compute.
        context_tokens: Tokens of the same prompt already in the KV cache.

    Returns:
        Token pairs: ``tokens * (context + tokens / 2)``.

    Source: causal attention: token i of the chunk reads ``context + i`` tokens.
    """
    return tokens * (context_tokens + tokens / 2)
