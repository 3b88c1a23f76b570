"""A latency model as a table: the time of an iteration of one model on one kind of GPU.

An iteration of n tokens takes

    linear(n)                                                 GEMMs, norms, all-reduces, lm_head, the host's constant
      + sum over chunks ( p0 + p1 * c + p2 * c * (ctx + c / 2) )   prefill attention
      + [decodes] ( d0 + d1 * decodes + d2 * contexts )            decode attention
      + host_sequence * (decodes + chunks)

``linear`` is a table, because no closed form fits it: flat while memory-bound, affine above. Prefill and decode tokens
share it, which alone makes them interfere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from sluice_core.latency.prefill_time import PrefillCoefficients
from sluice_core.records import IterationShape

TABLE_STEP_TOKENS: Final = 8


class DecodeCoefficients(NamedTuple):
    """Decode attention of batches from a size on, in place of the profile's own coefficients.

    Args:
        from_requests: The first size.
        base_s: See ``IterationProfile.decode_base_s``; likewise the others.
        request_s: Per decode.
        context_s: Per token of context.
    """

    from_requests: int
    base_s: float
    request_s: float
    context_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationProfile:
    """Coefficients of one model on one kind of GPU; a ``LatencyModel`` that does not learn.

    Args:
        linear_s: ``linear`` at 0, 8, 16, ... tokens, never falling; an iteration of n tokens has entry ceil(n / 8).
            Entry 0 is 0: an iteration without tokens takes no time.
        prefill_base_s: Attention of a chunk, whatever its size (p0).
        prefill_token_s: Per token of a chunk (p1).
        prefill_work_s: Per token pair of a chunk's attention work (p2).
        decode_base_s: Decode attention of an iteration with decodes (d0).
        decode_request_s: Per decode (d1).
        decode_context_s: Per token of the decodes' contexts (d2).
        host_sequence_s: The host's work per chunk and per decode.
        slope_s: Per token beyond the table.
        num_observations: Kernel measurements that it was made from.
        relative_error: Mean relative error against them.
        large_batch: Other coefficients for decode batches from a size on (DistServe's).
    """

    linear_s: tuple[float, ...]
    prefill_base_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_work_s: float = 0.0
    decode_base_s: float = 0.0
    decode_request_s: float = 0.0
    decode_context_s: float = 0.0
    host_sequence_s: float = 0.0
    slope_s: float = 0.0
    num_observations: int = 0
    relative_error: float = 0.0
    large_batch: DecodeCoefficients | None = None

    def estimate_linear_s(self, num_tokens: int) -> float:
        """Estimate what does not depend on contexts, in seconds."""
        index = (num_tokens + 7) >> 3
        table = self.linear_s
        if index < len(table):
            return table[index]
        return table[-1] + self.slope_s * (num_tokens - TABLE_STEP_TOKENS * (len(table) - 1))

    def estimate_iteration_s(  # noqa: PLR0917 - a record per iteration would cost as much as the estimate
        self,
        num_tokens: int,
        num_chunks: int,
        prefill_tokens: int,
        prefill_work: float,
        num_decodes: int,
        decode_context_tokens: int,
    ) -> float:
        """Estimate an iteration, in seconds, without a record: the simulator asks a million times.

        Args:
            num_tokens: All tokens: ``prefill_tokens + num_decodes``.
            num_chunks: Prefill chunks.
            prefill_tokens: Their tokens.
            prefill_work: Their attention work, in token pairs (``compute_attention_work``).
            num_decodes: Decodes, one token each.
            decode_context_tokens: Sum of their contexts.
        """
        index = (num_tokens + 7) >> 3
        table = self.linear_s
        time_s = table[index] if index < len(table) else self.estimate_linear_s(num_tokens)
        if num_chunks:
            time_s += (
                num_chunks * (self.prefill_base_s + self.host_sequence_s)
                + prefill_tokens * self.prefill_token_s
                + prefill_work * self.prefill_work_s
            )
        if num_decodes:
            time_s += self._decodes_s(num_decodes, decode_context_tokens)
        return time_s

    def estimate_shape_s(self, shape: IterationShape) -> float:
        """See ``LatencyModel.estimate_shape_s``."""
        return self.estimate_iteration_s(
            shape.prefill_tokens + shape.num_decodes,
            shape.num_chunks,
            shape.prefill_tokens,
            shape.attention_work,
            shape.num_decodes,
            shape.decode_context_tokens,
        )

    def compute_prefill_coefficients(
        self, num_decodes: int, decode_context_tokens: int, room_tokens: int
    ) -> PrefillCoefficients:
        """See ``LatencyModel.compute_prefill_coefficients``.

        The secant of ``linear`` over the room: exact for full iterations, and never too low for the last one, because
        ``linear`` is flat first.
        """
        room_tokens = max(1, room_tokens)
        least_s = self.estimate_linear_s(max(1, num_decodes))
        per_token_s = (self.estimate_linear_s(num_decodes + room_tokens) - least_s) / room_tokens
        per_iteration_s = least_s + self._chunk_s() + self._decodes_s(num_decodes, decode_context_tokens)
        return PrefillCoefficients(self.prefill_token_s + per_token_s, self.prefill_work_s, per_iteration_s)

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
        if tokens <= 0:
            return 0.0
        if room_tokens <= 0:
            return math.inf
        num_full, rest = divmod(tokens, room_tokens)
        num_iterations = num_full + (1 if rest else 0)
        time_s = num_full * self.estimate_linear_s(num_decodes + room_tokens)
        if rest:
            time_s += self.estimate_linear_s(num_decodes + rest)
        num_chunks = num_iterations + max(0, num_prompts - 1)
        return (
            time_s
            + tokens * self.prefill_token_s
            + attention_work * self.prefill_work_s
            + num_chunks * self._chunk_s()
            + num_iterations * self._decodes_s(num_decodes, decode_context_tokens)
        )

    def observe(self, shape: IterationShape, duration_s: float) -> None:
        """See ``LatencyModel.observe``; a profile stays as it is."""

    def _chunk_s(self) -> float:
        return self.prefill_base_s + self.host_sequence_s

    def _decodes_s(self, num_decodes: int, decode_context_tokens: int) -> float:
        if not num_decodes:
            return 0.0
        large = self.large_batch
        if large is not None and num_decodes >= large.from_requests:
            return (
                large.base_s
                + num_decodes * (large.request_s + self.host_sequence_s)
                + decode_context_tokens * large.context_s
            )
        return (
            self.decode_base_s
            + num_decodes * (self.decode_request_s + self.host_sequence_s)
            + decode_context_tokens * self.decode_context_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnGpu:
    """A model on one engine's GPUs: what the simulator and the planner need of it.

    Args:
        model: Its name.
        gpu: Name of the GPU.
        tensor_parallel: GPUs that share each layer.
        weight_bytes: Weights, over all of the engine's GPUs.
        kv_bytes_per_token: KV cache of a token, over all of the engine's GPUs.
        kv_capacity_tokens: Tokens that the engine's KV cache holds.
        profile: How long an iteration takes, in one stage.
        pipeline_parallel: Stages of equal layers.
    """

    model: str
    gpu: str
    tensor_parallel: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    profile: IterationProfile
    pipeline_parallel: int = 1
