"""Resolves the sliders of a spec: P-heavy engines, each role's chunk size, and what strategies have as parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice_core.records import Role
from sluice_core.strategies import DEFAULT_STRATEGY, Strategy, get_strategy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sluice_core.strategy_parameters import Parameter
    from sluice_operator.api.fields_and_defaults.cluster_spec import SpecFields


# ``spec.strategy`` that leaves the choice to the search.
AUTO = "Auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliders:
    """The sliders in force.

    Args:
        num_prefill_heavy: P-heavy engines (slider R_PD).
        prefill_heavy_tokens: Their chunk size, in tokens (slider S_P).
        decode_heavy_tokens: Chunk size of the others, in tokens (slider S_D).
        strategy: The strategy that they are for, as ``sluice_core`` calls it; empty: the spec names it.
    """

    num_prefill_heavy: int
    prefill_heavy_tokens: int
    decode_heavy_tokens: int
    strategy: str = ""

    def chunk_size_tokens(self, role: Role) -> int:
        """Chunk size of a role, in tokens."""
        return self.prefill_heavy_tokens if role is Role.PREFILL_HEAVY else self.decode_heavy_tokens


def write_parameters(spec: SpecFields, rows: Iterable[Parameter]) -> dict[str, str]:
    """Writes parameters of a spec as on the wire, by name.

    Args:
        spec: The spec.
        rows: Those that are written.
    """
    return {row.name: str(getattr(spec.parameters, row.name)) for row in rows}


def scale_sliders(sliders: Sliders, replicas: int, num_engines: int) -> Sliders:
    """Scales the number of P-heavy engines from a fleet of one size to another, rounded half up.

    Both kinds stay where the whole fleet has both; a single engine is P-heavy where D-heavy ones take no prefills.
    """
    if not replicas:
        # A fleet of none has no share of its own to keep.
        return sliders
    low, high = find_mix_limits(sliders, replicas, num_engines)
    nearest = (2 * sliders.num_prefill_heavy * num_engines + replicas) // (2 * replicas)
    return replace(sliders, num_prefill_heavy=min(max(nearest, low), high))


def find_mix_limits(sliders: Sliders, replicas: int, num_engines: int) -> tuple[int, int]:
    """Least and most P-heavy engines that so many engines of a fleet may have."""
    has_room = num_engines >= 2
    low = int(sliders.num_prefill_heavy > 0 and (has_room or sliders.decode_heavy_tokens == 0))
    return low, num_engines - int(sliders.num_prefill_heavy < replicas and has_room)


def resolve_strategy(spec: SpecFields) -> Strategy:
    """Resolves the strategy that a spec asks for: ``Auto`` is the default one, until a search has chosen."""
    return DEFAULT_STRATEGY if spec.strategy == AUTO else get_strategy(spec.strategy)


def resolve_sliders(spec: SpecFields) -> Sliders:
    """Resolves the sliders that a spec asks for.

    The strategy says what they mean: aggregation is S_P = S_D, disaggregation is S_P = maximum and S_D = 0.
    """
    strategy = resolve_strategy(spec)
    prefill_tokens, decode_tokens = strategy.sliders.resolve(
        spec.chunk_sizes.prefill_heavy, spec.chunk_sizes.decode_heavy, spec.engine.max_batch_tokens
    )
    return Sliders(
        num_prefill_heavy=count_prefill_heavy(spec.prefill_heavy, spec.replicas, needs_both_roles=decode_tokens == 0),
        prefill_heavy_tokens=prefill_tokens,
        decode_heavy_tokens=decode_tokens,
        strategy=strategy.name if spec.strategy == AUTO else "",
    )


def count_prefill_heavy(wanted: int | str, replicas: int, *, needs_both_roles: bool) -> int:
    """Turns a count or a percentage into a number of engines.

    Args:
        wanted: A count, or a share of the replicas such as ``"50%"``, rounded half up.
        replicas: Engines in all.
        needs_both_roles: True when one role alone cannot serve: at least one engine of each is kept.

    Returns:
        P-heavy engines, 0 to ``replicas``.
    """
    # Integers throughout: 2.5 engines are 3, where Python's round() gives 2.
    count = wanted if isinstance(wanted, int) else (int(wanted.removesuffix("%")) * replicas + 50) // 100
    low, high = (1, max(1, replicas - 1)) if needs_both_roles else (0, replicas)
    return min(max(count, low), high)
