"""A latency model that is wrong by a factor: what routers and policies then decide is no better than it."""

from __future__ import annotations

from sluice_core.latency.interface import LatencyModel
from sluice_core.latency.prefill_time import PrefillCoefficients
from sluice_core.records import IterationShape


def scale_latency(model: LatencyModel, factor: float) -> LatencyModel:
    """Make a model wrong by a factor; 1: it is the model itself."""
    return model if factor == 1.0 else ScaledLatencyModel(model, factor)


class ScaledLatencyModel:
    """Estimates as another model does, times a factor; a ``LatencyModel`` that does not learn.

    Args:
        model: The other model.
        factor: Above 1: everything seems slower than it is.
    """

    def __init__(self, model: LatencyModel, factor: float) -> None:
        self._model = model
        self._factor = factor

    @property
    def num_observations(self) -> int:
        """See ``LatencyModel.num_observations``."""
        return self._model.num_observations

    @property
    def relative_error(self) -> float:
        """See ``LatencyModel.relative_error``."""
        return self._model.relative_error

    def estimate_shape_s(self, shape: IterationShape) -> float:
        """See ``LatencyModel.estimate_shape_s``."""
        return self._factor * self._model.estimate_shape_s(shape)

    def compute_prefill_coefficients(
        self, num_decodes: int, decode_context_tokens: int, room_tokens: int
    ) -> PrefillCoefficients:
        """See ``LatencyModel.compute_prefill_coefficients``."""
        exact = self._model.compute_prefill_coefficients(num_decodes, decode_context_tokens, room_tokens)
        return PrefillCoefficients(
            self._factor * exact.per_token_s, self._factor * exact.per_work_s, self._factor * exact.per_iteration_s
        )

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
        return self._factor * self._model.estimate_prefill_s(
            tokens=tokens,
            attention_work=attention_work,
            num_prompts=num_prompts,
            room_tokens=room_tokens,
            num_decodes=num_decodes,
            decode_context_tokens=decode_context_tokens,
        )

    def observe(self, shape: IterationShape, duration_s: float) -> None:
        """See ``LatencyModel.observe``; it stays as wrong as it is."""
