"""Decides, as a pure function, the next step from the processes that run to those that the manifest asks for.

Each step is carried out to its end before the next is decided from a new observation. So a rolling restart never has
two engines away, and an edit in the middle of it only changes the next decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_cli.local_cluster.reconcile.router_names import replica_of
from sluice_operator.planning.scale_down import RemovableEngine, choose_victims

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sluice_core.records import EngineId, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredProcesses:
    """What the manifest asks for.

    Args:
        compatibility_key: Identifies the model and TLS; engines and routers that differ in it cannot work together.
        engine_hash: Identifies an engine's command and environment.
        router_hash: Identifies a router's command.
        num_engines: Engines.
        routers: Names of the routers.
        num_prefill_heavy: P-heavy engines among them.
        is_paused: Whether no engine is restarted for now.
    """

    compatibility_key: str
    engine_hash: str
    router_hash: str
    num_engines: int
    routers: tuple[str, ...]
    num_prefill_heavy: int
    is_paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedProcesses:
    """What runs.

    Args:
        compatibility_key: As in ``DesiredProcesses``.
        engines: Each engine's hash, as in ``DesiredProcesses``, in the order of their start.
        routers: Each router's hash, as in ``DesiredProcesses``, in the order of their start.
        roles: Roles of the engines.
        loads: Requests of each engine.
        serving: Engines that take requests.
    """

    compatibility_key: str
    engines: Mapping[EngineId, str]
    routers: Mapping[str, str]
    roles: Mapping[EngineId, Role]
    loads: Mapping[EngineId, int]
    serving: Collection[EngineId]


@dataclass(frozen=True, slots=True)
class Recreate:
    """Stop everything, then start it again: the compatibility key differs."""


@dataclass(frozen=True, slots=True)
class AddEngines:
    """Start engines."""

    count: int


@dataclass(frozen=True, slots=True)
class RemoveEngines:
    """Drain engines, then stop them."""

    engine_ids: tuple[EngineId, ...]


@dataclass(frozen=True, slots=True)
class RestartEngine:
    """Drain an engine, and start it again with its new command."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class AddRouters:
    """Start routers."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RemoveRouter:
    """Stop a router once its streams have ended."""

    name: str


@dataclass(frozen=True, slots=True)
class RestartRouter:
    """Stop a router once its streams have ended, and start it again."""

    name: str


RolloutStep = Recreate | AddEngines | RemoveEngines | RestartEngine | AddRouters | RemoveRouter | RestartRouter


def next_step(observed: ObservedProcesses, desired: DesiredProcesses) -> RolloutStep | None:
    """Decides the next step; None when what runs is what is desired."""
    if observed.compatibility_key != desired.compatibility_key:
        return Recreate()
    return _next_scaling(observed, desired) or _next_restart(observed, desired)


def _next_scaling(observed: ObservedProcesses, desired: DesiredProcesses) -> RolloutStep | None:
    def is_addable(name: str) -> bool:
        """A worker shares the ports of its replica's first one, which must be ready for that."""
        return name == replica_of(name) or observed.routers.get(replica_of(name)) == desired.router_hash

    missing_engines = desired.num_engines - len(observed.engines)
    missing_routers = tuple(name for name in desired.routers if name not in observed.routers and is_addable(name))
    needless_routers = [name for name in observed.routers if name not in desired.routers]
    # Routers first: engines that start meanwhile are known to them at once.
    if missing_routers:
        return AddRouters(missing_routers)
    if missing_engines > 0:
        return AddEngines(missing_engines)
    if missing_engines < 0:
        return RemoveEngines(_choose_victims(observed, -missing_engines, desired.num_prefill_heavy))
    return RemoveRouter(needless_routers[-1]) if needless_routers else None


def _next_restart(observed: ObservedProcesses, desired: DesiredProcesses) -> RolloutStep | None:
    old = [engine_id for engine_id, spec_hash in observed.engines.items() if spec_hash != desired.engine_hash]
    if old and not desired.is_paused:
        # One engine at a time, also when an edit ended the wait for the one before.
        return RestartEngine(old[0]) if observed.engines.keys() - old <= set(observed.serving) else None
    for name, spec_hash in observed.routers.items():
        if spec_hash != desired.router_hash:
            return RestartRouter(name)
    return None


def _choose_victims(observed: ObservedProcesses, num_victims: int, num_prefill_heavy: int) -> tuple[EngineId, ...]:
    engines = [
        RemovableEngine(
            engine_id=engine_id,
            role=observed.roles.get(engine_id),
            load=observed.loads.get(engine_id, 0),
            is_serving=engine_id in observed.serving,
        )
        for engine_id in observed.engines
    ]
    return tuple(choose_victims(engines, num_victims, num_prefill_heavy))
