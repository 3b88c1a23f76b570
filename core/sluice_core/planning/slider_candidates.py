"""What a plan may choose, within bounds.

Sliders lie on a lattice: chunk sizes at powers of two and halfway between, P-heavy engines at whole numbers. Neighbours
on it differ by a few percent of goodput near the best, which is what a search can distinguish.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters

LEAST_CHUNK_TOKENS = 16
WATERMARKS = (0.85, 0.9, 0.95, 0.98)
APPROACHING_FACTORS = (0.9, 0.96, 1.0)
DEFAULTS = StrategyParameters()
_LEAST_LATTICE_TOKENS = 64
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliderCandidate:
    """A choice of every slider.

    Args:
        strategy: Its name.
        num_prefill_heavy: P-heavy engines; under aggregation all of them.
        num_decode_heavy: D-heavy engines.
        prefill_heavy_tokens: Chunk size of P-heavy engines.
        decode_heavy_tokens: Chunk size of D-heavy engines; 0 where there are none.
        tensor_parallel: GPUs per engine.
        watermark: M.
        approaching_factor: Alpha.
    """

    strategy: str
    num_prefill_heavy: int
    num_decode_heavy: int
    prefill_heavy_tokens: int
    decode_heavy_tokens: int
    tensor_parallel: int = 1
    watermark: float = DEFAULTS.watermark
    approaching_factor: float = DEFAULTS.approaching_factor

    @property
    def replicas(self) -> int:
        """Engines in all."""
        return self.num_prefill_heavy + self.num_decode_heavy

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.replicas * self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillHeavyBounds:
    """Bounds of the P-heavy engines, as counts or as shares of the engines.

    Args:
        low: Least count, or percent.
        high: Most.
        is_percent: They are percent.
    """

    low: int = 0
    high: int = 100
    is_percent: bool = True

    def resolve(self, replicas: int) -> tuple[int, int] | None:
        """Resolve to the least and the most count, with an engine of each role; None when that is impossible."""
        low, high = self.low, self.high
        if self.is_percent:
            low, high = (low * replicas + 99) // 100, high * replicas // 100
        low, high = max(low, 1), min(high, replicas - 1)
        return None if low > high else (low, high)

    def scale(self, replicas: int) -> PrefillHeavyBounds:
        """Scale counts for so many engines to shares, which bound smaller clusters at least as widely."""
        if self.is_percent:
            return self
        return PrefillHeavyBounds(low=100 * self.low // replicas, high=-(-100 * self.high // replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What a plan may choose.

    Args:
        strategies: Names.
        prefill_heavy_tokens: Chunk sizes that P-heavy engines (and aggregated ones) may have, ascending.
        decode_heavy_tokens: Chunk sizes that D-heavy engines may have, ascending.
        max_batch_tokens: Chunk size of P-heavy engines under disaggregation.
        prefill_heavy: Bounds of the P-heavy engines.
        watermarks: Values of M, ascending.
        approaching_factors: Values of alpha, ascending.

    Raises:
        ValueError: Nothing to choose from.
    """

    strategies: tuple[str, ...]
    prefill_heavy_tokens: tuple[int, ...]
    decode_heavy_tokens: tuple[int, ...]
    max_batch_tokens: int
    prefill_heavy: PrefillHeavyBounds = PrefillHeavyBounds()
    watermarks: tuple[float, ...] = WATERMARKS
    approaching_factors: tuple[float, ...] = APPROACHING_FACTORS

    def __post_init__(self) -> None:
        sizes = {
            "strategies": len(self.strategies),
            "chunk sizes of P-heavy engines": len(self.prefill_heavy_tokens),
            "chunk sizes of D-heavy engines": len(self.decode_heavy_tokens),
            "watermarks": len(self.watermarks),
            "approaching factors": len(self.approaching_factors),
        }
        for name, size in sizes.items():
            if size == 0:
                raise ValueError(f"there are no {name} to choose from")

    def contains(self, candidate: SliderCandidate) -> bool:
        """Say whether a candidate is within the bounds, with an engine of each role where both are needed."""
        if candidate.strategy not in self.strategies:
            return False
        sliders = get_strategy(candidate.strategy).sliders
        if not sliders.has_roles:
            sizes = self.prefill_heavy_tokens if sliders.varies_prefill_tokens else (self.max_batch_tokens,)
            return candidate.num_decode_heavy == 0 and candidate.prefill_heavy_tokens in sizes
        counts = self.prefill_heavy.resolve(candidate.replicas)
        if counts is None or not counts[0] <= candidate.num_prefill_heavy <= counts[1]:
            return False
        if candidate.strategy == "disaggregated":
            return (candidate.prefill_heavy_tokens, candidate.decode_heavy_tokens) == (self.max_batch_tokens, 0)
        return (
            candidate.prefill_heavy_tokens in self.prefill_heavy_tokens
            and candidate.decode_heavy_tokens in self.decode_heavy_tokens
            and candidate.decode_heavy_tokens < candidate.prefill_heavy_tokens
        )

    def make_candidate(
        self,
        strategy: str,
        replicas: int,
        tensor_parallel: int,
        *,
        num_prefill_heavy: int = 0,
        prefill_heavy_tokens: int = 0,
        decode_heavy_tokens: int = 0,
    ) -> SliderCandidate:
        """Make the candidate of a strategy that uses no more of the sliders than the strategy does.

        Chunk sizes go to the nearest that may be chosen; M and alpha to the nearest of their defaults.
        """
        sliders = get_strategy(strategy).sliders
        if not sliders.has_roles:
            num_prefill_heavy = replicas
        if not sliders.varies_prefill_tokens:
            chunks = (self.max_batch_tokens, 0)
        elif not sliders.has_roles:
            chunks = (find_nearest(self.prefill_heavy_tokens, prefill_heavy_tokens), 0)
        else:
            chunks = (
                find_nearest(self.prefill_heavy_tokens, prefill_heavy_tokens),
                find_nearest(self.decode_heavy_tokens, decode_heavy_tokens),
            )
        return SliderCandidate(
            strategy=strategy,
            num_prefill_heavy=num_prefill_heavy,
            num_decode_heavy=replicas - num_prefill_heavy,
            prefill_heavy_tokens=chunks[0],
            decode_heavy_tokens=chunks[1],
            tensor_parallel=tensor_parallel,
            watermark=find_nearest(self.watermarks, DEFAULTS.watermark),
            approaching_factor=find_nearest(self.approaching_factors, DEFAULTS.approaching_factor),
        )


def find_nearest(values: Sequence[_Number], wanted: _Number) -> _Number:
    """Find the nearest value, by ratio; of equally near ones the first."""
    return min(values, key=lambda value: abs(math.log((value + 1.0) / (wanted + 1.0))))


def list_chunk_sizes(low: int, high: int, extra: Iterable[int] = ()) -> tuple[int, ...]:
    """List the chunk sizes of the lattice within bounds.

    Args:
        low: Least; 0 adds 0, no prefills.
        high: Most.
        extra: More values, such as the one in force; those out of bounds are left out.

    Raises:
        ValueError: No chunk size is within the bounds.
    """
    sizes = {size for size in extra if low <= size <= high}
    power = _LEAST_LATTICE_TOKENS
    while power <= high:
        sizes |= {size for size in (power, power * 3 // 2) if low <= size <= high}
        power *= 2
    # The bounds themselves, which a user chose. Below the lattice an engine makes hardly any progress.
    sizes |= {size for size in (low, high) if size == 0 or size >= LEAST_CHUNK_TOKENS}
    if not sizes or low > high:
        raise ValueError(f"no chunk size is within {low} to {high} tokens; {LEAST_CHUNK_TOKENS} is the least, or 0")
    return tuple(sorted(sizes))


def resize(candidate: SliderCandidate, replicas: int, space: SearchSpace) -> SliderCandidate | None:
    """Give a candidate another number of engines at the same share of P-heavy ones; None: out of bounds."""
    if candidate.num_decode_heavy == 0:
        return replace(candidate, num_prefill_heavy=replicas)
    counts = space.prefill_heavy.resolve(replicas)
    if counts is None:
        return None
    count = min(max(round(candidate.num_prefill_heavy * replicas / candidate.replicas), counts[0]), counts[1])
    return replace(candidate, num_prefill_heavy=count, num_decode_heavy=replicas - count)
