"""Assigns roles to engines: engines keep their role where possible, so that an edit flips the fewest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.records import EngineId, Role
from sluice_operator.api.sliders import find_mix_limits, scale_sliders

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sluice_operator.api.sliders import Sliders


def decide_roles(
    current_roles: Mapping[EngineId, Role],
    serving: Collection[EngineId],
    away: Collection[EngineId],
    *,
    sliders: Sliders,
    replicas: int,
    loads: Mapping[EngineId, int],
) -> dict[EngineId, Role]:
    """Decides the roles of a fleet, of which a part may be missing. The operator and ``sluice up`` both call this.

    The mix counts over the engines that serve. An engine that is away keeps the role that it had, for its return.

    Args:
        current_roles: Roles in force.
        serving: Engines that serve, draining ones excluded.
        away: Engines that do not serve and may come back.
        sliders: Sliders of the whole fleet.
        replicas: Engines of the whole fleet.
        loads: Work of each engine, in any one unit; absent ones have none.

    Returns:
        A role for each engine that serves, and for those that are away and had one, sorted by engine.
    """
    num_prefill_heavy = _scale_mix(current_roles, serving, sliders, replicas)
    resting = {engine: current_roles[engine] for engine in away if engine in current_roles}
    roles = assign_roles(current_roles, serving, num_prefill_heavy, loads) | resting
    return dict(sorted(roles.items()))


def _scale_mix(
    current_roles: Mapping[EngineId, Role], serving: Collection[EngineId], sliders: Sliders, replicas: int
) -> int:
    """Scales the number of P-heavy engines to the engines that serve.

    Where the share is no whole number, both neighbours of it are right, and the one that changes no role is taken.
    """
    wanted, num_engines = sliders.num_prefill_heavy, len(serving)
    if not replicas or not num_engines:
        return 0
    low, high = find_mix_limits(sliders, replicas, num_engines)
    nearest = scale_sliders(sliders, replicas, num_engines).num_prefill_heavy
    num_kept = sum(current_roles.get(engine) is Role.PREFILL_HEAVY for engine in serving)
    num_new = sum(engine not in current_roles for engine in serving)
    unflipped = min(max(nearest, num_kept), num_kept + num_new)
    floor, ceiling = wanted * num_engines // replicas, -(-wanted * num_engines // replicas)
    return min(max(min(max(unflipped, floor), ceiling), low), high)


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
