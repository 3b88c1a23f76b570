"""What the spec fixes for a search: objectives, bounds, and what a slider without bounds may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice_core.strategies import PARAMETERS, get_strategy
from sluice_core.strategy_parameters import read_parameters
from sluice_operator.api.sliders import AUTO, resolve_sliders, write_parameters

if TYPE_CHECKING:
    from sluice_core.strategy_parameters import StrategyParameters
    from sluice_operator.api.fields_and_defaults.autotune_spec import CountBounds, TokenBounds
    from sluice_operator.api.serving_cluster import ServingClusterSpec

# Least chunk size of P-heavy engines where no bounds are given.
MIN_PREFILL_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchObjectives:
    """An SLO class and its objectives.

    Args:
        name: Empty for the default one.
        ttft_milliseconds: TTFT.
        tpot_milliseconds: TPOT.
        priority: Higher goes first.
    """

    name: str
    ttft_milliseconds: int
    tpot_milliseconds: int
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConstraints:
    """The part of a request that the spec fixes; a change of it makes a running search pointless.

    Args:
        replicas: Engines.
        strategy: As ``sluice_core`` calls it; ``auto``: any.
        classes: Objectives, the default class first.
        target: Attainment, 0.9 is 90 %.
        parameters: Those of all strategies, as on the wire.
        max_batch_tokens: Largest chunk size.
        link: What KV moves over, as ``sluice_core`` calls it.
        prefill_heavy: Least and most P-heavy engines, as counts or percentages.
        prefill_tokens: Least and most chunk size of P-heavy engines.
        decode_tokens: Least and most chunk size of the others.
    """

    replicas: int
    strategy: str
    classes: tuple[SearchObjectives, ...]
    target: float
    parameters: dict[str, str]
    max_batch_tokens: int
    link: str
    prefill_heavy: tuple[str, str]
    prefill_tokens: tuple[int, int]
    decode_tokens: tuple[int, int]

    @property
    def strategy_parameters(self) -> StrategyParameters:
        """The parameters, read."""
        return read_parameters(PARAMETERS, self.parameters, self.strategy)

    @property
    def chooses_strategy(self) -> bool:
        """Whether the strategy is to be chosen too."""
        return self.strategy == AUTO.lower()

    @property
    def is_fixed(self) -> bool:
        """Whether the bounds leave no choice."""
        if self.chooses_strategy:
            return False
        pairs = (self.prefill_heavy, self.prefill_tokens, self.decode_tokens)
        return all(low == high for low, high in pairs)

    def equals_but_for_size(self, other: SearchConstraints) -> bool:
        """Whether these are for the same objectives and bounds, whatever the number of engines."""
        return replace(self, replicas=other.replicas, prefill_heavy=other.prefill_heavy) == other


def _read_objectives(spec: ServingClusterSpec) -> tuple[SearchObjectives, ...]:
    default = SearchObjectives(
        name="",
        ttft_milliseconds=spec.slo.ttft_milliseconds,
        tpot_milliseconds=spec.slo.tpot_milliseconds,
        priority=0,
    )
    return default, *(SearchObjectives(**slo_class.model_dump(by_alias=False)) for slo_class in spec.slo.classes)


def make_constraints(spec: ServingClusterSpec) -> SearchConstraints:
    """Reads the constraints of a search from a spec.

    In mode Apply a slider without bounds stays as the spec says; a recommendation may name any value for it. So may a
    choice of strategy, as each needs its own.
    """
    sliders, bounds = resolve_sliders(spec), spec.autotune.bounds
    most = spec.engine.max_batch_tokens
    counts, prefill_tokens, decode_tokens = ("0%", "100%"), (MIN_PREFILL_TOKENS, most), (0, most)
    if spec.autotune.mode == "Apply" and spec.strategy != AUTO:
        counts = (str(sliders.num_prefill_heavy), str(sliders.num_prefill_heavy))
        prefill_tokens = (sliders.prefill_heavy_tokens, sliders.prefill_heavy_tokens)
        decode_tokens = (sliders.decode_heavy_tokens, sliders.decode_heavy_tokens)
    constraints = SearchConstraints(
        replicas=spec.replicas,
        strategy=spec.strategy.lower(),
        classes=_read_objectives(spec),
        target=spec.slo.attainment_share,
        parameters=write_parameters(spec, PARAMETERS),
        max_batch_tokens=most,
        link="infiniband" if spec.network.mode == "RDMA" else "tcp",
        prefill_heavy=_read_counts(bounds.prefill_heavy, counts),
        prefill_tokens=_read_tokens(bounds.chunk_sizes.prefill_heavy, prefill_tokens),
        decode_tokens=_read_tokens(bounds.chunk_sizes.decode_heavy, decode_tokens),
    )
    if constraints.chooses_strategy:
        return constraints
    # A slider that the strategy ignores is not searched.
    if constraints.strategy == "aggregated":
        count = str(sliders.num_prefill_heavy)
        return replace(constraints, prefill_heavy=(count, count), decode_tokens=constraints.prefill_tokens)
    if not get_strategy(constraints.strategy).sliders.varies_any:
        count = str(sliders.num_prefill_heavy)
        return replace(
            constraints, prefill_heavy=(count, count), prefill_tokens=(most, most), decode_tokens=(most, most)
        )
    if constraints.strategy == "disaggregated":
        return replace(constraints, prefill_tokens=(most, most), decode_tokens=(0, 0))
    return constraints


def _read_counts(bounds: CountBounds | None, free: tuple[str, str]) -> tuple[str, str]:
    return free if bounds is None else (str(bounds.min), str(bounds.max))


def _read_tokens(bounds: TokenBounds | None, free: tuple[int, int]) -> tuple[int, int]:
    return free if bounds is None else (bounds.min, bounds.max)
