"""What a search needs to know of the engines: iteration times and KV cache size.

For an emulated GPU it is the engine's own latency profile. For real GPUs it is what routers fitted to measured
iterations, because a manifest does not name the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice.v1 import control_pb2
from sluice_core.latency.online_latency_model import LinearCoefficients
from sluice_core.records import IterationShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sluice_core.latency.iteration_time import IterationProfile
    from sluice_operator.api.serving_cluster import ServingClusterSpec

# Over all engines; fewer iterations say too little.
MIN_ITERATIONS = 200
# A fit remembers about so many iterations, so that those of an engine count for no more.
MAX_ITERATIONS = 500
# Of the estimated time of typical iterations: other coefficients beyond it are another engine.
CHANGED_RATIO = 1.5
COEFFICIENTS = tuple(field.name for field in control_pb2.LatencyCoefficients.DESCRIPTOR.fields)
_READY = frozenset({control_pb2.ENGINE_STATE_READY, control_pb2.ENGINE_STATE_DRAINING})
_TYPICAL = (
    IterationShape(
        prefill_tokens=512, attention_work=512 * 256.0, num_chunks=1, num_decodes=16, decode_context_tokens=8192
    ),
    IterationShape(num_decodes=16, decode_context_tokens=8192),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedEngineFacts:
    """An engine that emulates a GPU.

    Args:
        gpu: Name of the GPU; with ``x2``, two of them share an engine.
        model: Name of the model, or the path of its config.json.
    """

    gpu: str
    model: str

    def differs(self, other: EngineFacts) -> bool:
        """Whether it is another engine."""
        return self != other


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEngineFacts:
    """An engine as its routers know it.

    Args:
        coefficients: As in ``LatencyCoefficients``, in that order.
        kv_blocks_total: KV blocks.
        block_size_tokens: Tokens of each.
        kv_bytes_per_token: Bytes of KV cache per token.
        max_num_seqs: Most running requests.
    """

    coefficients: tuple[float, ...]
    kv_blocks_total: int
    block_size_tokens: int
    kv_bytes_per_token: int
    max_num_seqs: int

    def differs(self, other: EngineFacts) -> bool:
        """Whether it is another engine, beyond what a fit wavers."""
        if not isinstance(other, MeasuredEngineFacts):
            return True
        if (self.block_size_tokens, self.max_num_seqs) != (other.block_size_tokens, other.max_num_seqs):
            return True
        mine, theirs = self.profile, other.profile
        ratios = [mine.estimate_shape_s(shape) / theirs.estimate_shape_s(shape) for shape in _TYPICAL]
        return any(abs(math.log(ratio)) > math.log(CHANGED_RATIO) for ratio in ratios)

    @property
    def profile(self) -> IterationProfile:
        """How long its iterations take; proven, so that the simulated routers reject by it as real ones do."""
        return replace(LinearCoefficients(*self.coefficients).make_profile(), num_observations=MIN_ITERATIONS)


EngineFacts = EmulatedEngineFacts | MeasuredEngineFacts


def find_engine_facts(
    spec: ServingClusterSpec, statuses: Iterable[control_pb2.GetStatusResponse]
) -> tuple[EngineFacts | None, str]:
    """Finds what is known of the engines.

    Args:
        spec: The spec.
        statuses: Newest status of each router that answers.

    Returns:
        The facts; or None, and what is missing.
    """
    emulation = spec.engine.emulation
    if emulation is not None:
        return EmulatedEngineFacts(gpu=emulation.gpu, model=emulation.model), ""
    views = [
        engine
        for status in statuses
        for engine in status.engines
        if engine.state in _READY and engine.HasField("latency")
    ]
    if sum(view.num_fitted_iterations for view in views) < MIN_ITERATIONS:
        return None, f"routers have measured fewer than {MIN_ITERATIONS} iterations of the engines; send requests"
    if not all(view.kv_blocks_total and view.block_size_tokens and view.max_num_seqs for view in views):
        return None, "routers do not report the engines' KV caches; they are older than the operator"
    return _merge(views), ""


def _merge(views: Sequence[control_pb2.EngineStatus]) -> MeasuredEngineFacts:
    """Engines run the same software on the same hardware: the mean of their fits, by what each has seen."""
    weights = [min(view.num_fitted_iterations, MAX_ITERATIONS) for view in views]
    total = sum(weights)
    return MeasuredEngineFacts(
        coefficients=tuple(
            [
                sum(weight * getattr(view.latency, name) for weight, view in zip(weights, views, strict=True)) / total
                for name in COEFFICIENTS
            ]
        ),
        kv_blocks_total=min(view.kv_blocks_total for view in views),
        block_size_tokens=views[0].block_size_tokens,
        kv_bytes_per_token=views[0].kv_bytes_per_token,
        max_num_seqs=min(view.max_num_seqs for view in views),
    )
