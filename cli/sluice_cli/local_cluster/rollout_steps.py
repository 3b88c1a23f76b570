"""What to do next so that the running processes become what the manifest asks for: a pure decision.

One step at a time: each is carried out to its end before the next is decided, on what is then the case. So a roll
never has two engines away, and an edit in the middle of one is simply what the next decision sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_core.records import EngineId, Role

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the manifest asks for.

    Args:
        world: Identifies the model; engines and routers of two models never meet.
        engine: Identifies an engine's command and environment.
        router: Identifies a router's command.
        num_engines: Engines.
        num_routers: Routers.
        num_prefill_heavy: P-heavy engines among them.
    """

    world: str
    engine: str
    router: str
    num_engines: int
    num_routers: int
    num_prefill_heavy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What runs.

    Args:
        world: As in ``Wanted``.
        engines: Each engine's identity, as in ``Wanted``, in the order of their start.
        routers: Each router's identity, as in ``Wanted``, in the order of their start.
        roles: Roles of the engines.
        loads: Work of each engine, in any one unit.
    """

    world: str
    engines: Mapping[EngineId, str]
    routers: Mapping[str, str]
    roles: Mapping[EngineId, Role]
    loads: Mapping[EngineId, int]


@dataclass(frozen=True, slots=True)
class Recreate:
    """Stop everything and start anew: another model."""


@dataclass(frozen=True, slots=True)
class AddEngines:
    """Start engines."""

    count: int


@dataclass(frozen=True, slots=True)
class RemoveEngines:
    """Drain engines, then stop them."""

    engine_ids: tuple[EngineId, ...]


@dataclass(frozen=True, slots=True)
class RollEngine:
    """Drain an engine and start it anew with its new command."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class AddRouters:
    """Start routers."""

    count: int


@dataclass(frozen=True, slots=True)
class RemoveRouter:
    """Stop a router once its streams have ended."""

    name: str


@dataclass(frozen=True, slots=True)
class RollRouter:
    """Stop a router once its streams have ended, and start it anew."""

    name: str


Step = Recreate | AddEngines | RemoveEngines | RollEngine | AddRouters | RemoveRouter | RollRouter


def next_step(running: Running, wanted: Wanted) -> Step | None:
    """Decides the next step; None when all is as wanted."""
    if running.world != wanted.world:
        return Recreate()
    return _next_count(running, wanted) or _next_roll(running, wanted)


def _next_count(running: Running, wanted: Wanted) -> Step | None:
    missing_engines = wanted.num_engines - len(running.engines)
    missing_routers = wanted.num_routers - len(running.routers)
    if missing_routers > 0:
        return AddRouters(missing_routers)
    if missing_engines > 0:
        return AddEngines(missing_engines)
    if missing_engines < 0:
        return RemoveEngines(choose_victims(running, -missing_engines, wanted.num_prefill_heavy))
    return RemoveRouter(list(running.routers)[-1]) if missing_routers < 0 else None


def _next_roll(running: Running, wanted: Wanted) -> Step | None:
    for engine_id, identity in running.engines.items():
        if identity != wanted.engine:
            return RollEngine(engine_id)
    for name, identity in running.routers.items():
        if identity != wanted.router:
            return RollRouter(name)
    return None


def choose_victims(running: Running, count: int, num_prefill_heavy: int) -> tuple[EngineId, ...]:
    """Chooses engines to remove: of the role that has too many, the least loaded, the youngest.

    Args:
        running: What runs.
        count: Engines to remove.
        num_prefill_heavy: P-heavy engines wanted afterwards.
    """
    age = {engine_id: index for index, engine_id in enumerate(running.engines)}
    order = sorted(running.engines, key=lambda engine: (running.loads.get(engine, 0), -age[engine]))
    surplus = sum(role is Role.PREFILL_HEAVY for role in running.roles.values()) - num_prefill_heavy
    prefill_heavy = [engine for engine in order if running.roles.get(engine) is Role.PREFILL_HEAVY]
    others = [engine for engine in order if running.roles.get(engine) is not Role.PREFILL_HEAVY]
    from_prefill_heavy = prefill_heavy[: max(0, min(surplus, count))]
    from_others = others[: count - len(from_prefill_heavy)]
    rest = [engine for engine in prefill_heavy if engine not in from_prefill_heavy]
    return (*from_prefill_heavy, *from_others, *rest)[:count]
