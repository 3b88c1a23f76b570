"""How long an iteration, a prefill and a KV transfer take.

An iteration's time is linear in its shape: tokens (prefill and decode alike), attention work, chunks, decodes and
their contexts, plus a constant (simulation.md section 1, with one straight line for the GEMMs). All coefficients are
non-negative, so more work never takes less time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from sluice_core.records import IterationShape

TRANSFER_LATENCY_S = 0.002  # simulation.md section 1: per transfer, whatever its size
DEFAULT_TRANSFER_BYTES_PER_S = 10e9  # until an engine has measured a pull: a 100 Gb/s link, less overhead


class PrefillCoefficients(NamedTuple):
    """Closed form of a prefill beside a given decode batch.

    A prefill of p tokens with w token pairs of attention work and room r takes
    ``per_token_s * p + per_work_s * w + ceil(p / r) * per_iteration_s``.
    """

    per_token_s: float
    per_work_s: float
    per_iteration_s: float


class LatencyModel(Protocol):
    """Estimates what one engine needs."""

    @property
    def num_observations(self) -> int:
        """Iterations the model was fitted on; 0 for a model that is not fitted."""
        ...

    @property
    def relative_error(self) -> float:
        """Mean of abs(estimate - measured) / measured over recent iterations; 0 before any."""
        ...

    def estimate_iteration_s(self, shape: IterationShape) -> float:
        """Estimate one iteration, in seconds."""
        ...

    def compute_prefill_coefficients(self, num_decodes: int, decode_context_tokens: int) -> PrefillCoefficients:
        """Fold a decode batch into the closed form of prefills that run beside it.

        Args:
            num_decodes: Decodes of each iteration.
            decode_context_tokens: Sum of their contexts.
        """
        ...

    def estimate_prefill_s(
        self,
        *,
        tokens: int,
        attention_work: float,
        num_prompts: int,
        room_tokens: int,
        num_decodes: int,
        decode_context_tokens: int,
    ) -> float:
        """Estimate the time to compute queued prefills, from their sums.

        Args:
            tokens: Prompt tokens to compute.
            attention_work: Their attention work, as in ``IterationShape``.
            num_prompts: Prompts they belong to.
            room_tokens: Prefill room of each iteration.
            num_decodes: Decodes of each iteration.
            decode_context_tokens: Sum of their contexts.

        Returns:
            Seconds; 0 without tokens, ``math.inf`` without room.
        """
        ...

    def observe(self, shape: IterationShape, duration_s: float) -> None:
        """Learn from a measured iteration.

        Args:
            shape: What it computed.
            duration_s: Measured wall time, in seconds; others than finite positive ones are ignored.
        """
        ...


class OnlineLatencyModel:
    """Fits the coefficients to the iterations that an engine measures.

    Recursive least squares on relative residuals with forgetting and non-negative coefficients. Features are measured
    in the seconds that the prior gives them, so the fit has no scale of its own, and coefficients are drawn weakly to
    one common multiple of the prior: after a few iterations of any kind the unseen kinds are right in magnitude.
    Outliers weigh in proportion to the recent error, so a stall is ignored and a changed engine is learned.
    """

    num_observations: int
    relative_error: float

    def estimate_iteration_s(self, shape: IterationShape) -> float:
        """See ``LatencyModel.estimate_iteration_s``."""
        raise NotImplementedError

    def compute_prefill_coefficients(self, num_decodes: int, decode_context_tokens: int) -> PrefillCoefficients:
        """See ``LatencyModel.compute_prefill_coefficients``."""
        raise NotImplementedError

    def estimate_prefill_s(
        self,
        *,
        tokens: int,
        attention_work: float,
        num_prompts: int,
        room_tokens: int,
        num_decodes: int,
        decode_context_tokens: int,
    ) -> float:
        """See ``LatencyModel.estimate_prefill_s``."""
        raise NotImplementedError

    def observe(self, shape: IterationShape, duration_s: float) -> None:
        """See ``LatencyModel.observe``."""
        raise NotImplementedError


def compute_attention_work(tokens: int, context_tokens: int) -> float:
    """Compute the attention work of a prefill; chunking does not change it.

    Args:
        tokens: Tokens to compute.
        context_tokens: Tokens of the same prompt already in the KV cache.

    Returns:
        Token pairs: ``tokens * (context + tokens / 2)``.

    Source: simulation.md section 1 (``p2``).
    """
    return tokens * (context_tokens + tokens / 2)


def estimate_transfer_s(num_tokens: int, kv_bytes_per_token: int, bytes_per_s: float) -> float:
    """Estimate the time to move the KV cache of a request between engines.

    Args:
        num_tokens: Tokens in the cache.
        kv_bytes_per_token: Bytes of KV cache per token.
        bytes_per_s: Measured rate; 0 when none was measured.

    Returns:
        Seconds.

    Source: simulation.md section 1, KV transfer.
    """
    rate = bytes_per_s if bytes_per_s > 0 and math.isfinite(bytes_per_s) else DEFAULT_TRANSFER_BYTES_PER_S
    return TRANSFER_LATENCY_S + num_tokens * kv_bytes_per_token / rate
