"""Which engine has which role: sticky and minimal, so that an edit disturbs as little as it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.records import EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def assign_roles(
    current_roles: Mapping[EngineId, Role],
    engines: Collection[EngineId],
    num_prefill_heavy: int,
    loads: Mapping[EngineId, int] | None = None,
) -> dict[EngineId, Role]:
    """Gives every engine a role.

    Engines keep the role they have; engines without one fill what is missing; what is then still missing is made up
    by flipping the fewest and least loaded engines.

    Args:
        current_roles: Roles in force; engines that are gone may still be named.
        engines: Engines that count (draining ones do not).
        num_prefill_heavy: P-heavy engines wanted, 0 to ``len(engines)``; more means all.
        loads: Work of each engine, in any one unit; absent ones have none.

    Returns:
        A role for each of ``engines``, in their order.
    """
    load_of = loads or {}
    by_load = sorted(engines, key=lambda engine: load_of.get(engine, 0))
    kept = {engine: current_roles[engine] for engine in by_load if engine in current_roles}
    prefill_heavy = [engine for engine in by_load if kept.get(engine) is Role.PREFILL_HEAVY]
    newcomers = [engine for engine in engines if engine not in kept]
    others = [engine for engine in by_load if kept.get(engine) is Role.DECODE_HEAVY]
    surplus = max(0, len(prefill_heavy) - num_prefill_heavy)
    chosen = [*prefill_heavy[surplus:], *newcomers, *others][: min(num_prefill_heavy, len(by_load))]
    return {engine: Role.PREFILL_HEAVY if engine in chosen else Role.DECODE_HEAVY for engine in engines}
