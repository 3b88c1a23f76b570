"""What every latency model answers.

More work never takes less time in any of them.
"""

from __future__ import annotations

from typing import Protocol

from sluice_core.latency.prefill_time import PrefillCoefficients
from sluice_core.records import IterationShape


class UnknownModelError(ValueError):
    """A model, a GPU or a link has no profile; the message lists the known ones."""


class ModelTooLargeError(UnknownModelError):
    """A model's weights do not fit into the memory of the GPUs."""


class LatencyModel(Protocol):
    """Estimates what one engine needs."""

    @property
    def num_observations(self) -> int:
        """Measurements the model was fitted on; 0 for a model that is not fitted."""
        ...

    @property
    def relative_error(self) -> float:
        """Mean of abs(estimate - measured) / measured over recent measurements; 0 before any."""
        ...

    def estimate_shape_s(self, shape: IterationShape) -> float:
        """Estimate one iteration, in seconds."""
        ...

    def compute_prefill_coefficients(
        self, num_decodes: int, decode_context_tokens: int, room_tokens: int
    ) -> PrefillCoefficients:
        """Fold a decode batch into the closed form of prefills that run beside it.

        Args:
            num_decodes: Decodes of each iteration.
            decode_context_tokens: Sum of their contexts.
            room_tokens: Prefill budget of each iteration.
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
            room_tokens: Prefill budget of each iteration.
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
