"""Merges what the routers report about the engines: each router has its own stream to each engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.v1 import control_pb2
from sluice_core.records import EngineId
from sluice_operator.api.proto_roles import ROLES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from sluice.v1 import plan_pb2
    from sluice_core.records import Role

ATTACHED = frozenset(
    {control_pb2.ENGINE_STATE_READY, control_pb2.ENGINE_STATE_DRAINING, control_pb2.ENGINE_STATE_DRAINED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine, as all routers together see it.

    Args:
        role: Role in force; None while routers disagree or the engine has acknowledged none.
        chunk_size_tokens: Chunk size in force, in tokens.
        acknowledged_generation: Newest plan that all of its streams acknowledged.
        is_drained: Whether no router has work on it.
        load: Requests on it.
        transport: KV transport in use; empty until one is.
        fault: Last fault, for people.
    """

    role: Role | None
    chunk_size_tokens: int
    acknowledged_generation: int
    is_drained: bool
    load: int
    transport: str
    fault: str


def merge_reports(statuses: Iterable[control_pb2.GetStatusResponse]) -> dict[EngineId, EngineReport]:
    """Merges the routers' views.

    Args:
        statuses: Newest status of each router that answers.

    Returns:
        The engines that at least one router has a stream to.
    """
    views: dict[EngineId, list[control_pb2.EngineStatus]] = {}
    for status in statuses:
        for engine in status.engines:
            if engine.engine_id and engine.state in ATTACHED:
                views.setdefault(EngineId(engine.engine_id), []).append(engine)
    return {engine_id: _merge(seen) for engine_id, seen in views.items()}


def _merge(views: list[control_pb2.EngineStatus]) -> EngineReport:
    roles = {ROLES.get(view.role) for view in views}
    return EngineReport(
        role=roles.pop() if len(roles) == 1 else None,
        chunk_size_tokens=min(view.chunk_size_tokens for view in views),
        acknowledged_generation=min(view.acknowledged_generation for view in views),
        is_drained=all(view.state == control_pb2.ENGINE_STATE_DRAINED for view in views),
        # Each router reports the load of the whole engine.
        load=max(view.running_decodes + view.waiting_requests for view in views),
        transport=next((view.transport for view in views if view.transport), ""),
        fault=next((view.last_fault for view in views if view.last_fault), ""),
    )


def count_loads(reports: Mapping[EngineId, EngineReport]) -> dict[EngineId, int]:
    """Requests on each engine, by which roles and victims are chosen. The operator and ``sluice up`` both call this."""
    return {engine_id: report.load for engine_id, report in reports.items()}


def has_acknowledged(
    plan: plan_pb2.Plan,
    reports: Mapping[EngineId, EngineReport],
    statuses: Collection[control_pb2.GetStatusResponse],
) -> bool:
    """Whether all routers and the engines that the plan names have acknowledged it; False while no router answers."""
    named = [EngineId(engine.engine_id) for engine in plan.engines]
    return (
        bool(statuses)
        and all(status.generation >= plan.generation for status in statuses)
        and all(name in reports and reports[name].acknowledged_generation >= plan.generation for name in named)
    )


def find_refused_engines(statuses: Mapping[str, control_pb2.GetStatusResponse]) -> list[str]:
    """Engines that a router does not use, with its reason."""
    return sorted(
        {
            f"engine {engine.engine_id} at {engine.address}: {engine.last_fault}"
            for status in statuses.values()
            for engine in status.engines
            if engine.state == control_pb2.ENGINE_STATE_REFUSED and not engine.serves_other_model
        }
    )


def needs_reconcile(old: control_pb2.GetStatusResponse | None, new: control_pb2.GetStatusResponse | None) -> bool:
    """Whether a router's status has changed in something to act on; loads and counters do not count."""
    return _summarize(old) != _summarize(new)


def _summarize(status: control_pb2.GetStatusResponse | None) -> object:
    if status is None:
        return None
    engines = [
        (e.engine_id, e.epoch, e.state, e.role, e.chunk_size_tokens, e.acknowledged_generation, e.transport)
        for e in status.engines
    ]
    return status.router_id, status.generation, status.acknowledged_generation, status.is_ready, engines
