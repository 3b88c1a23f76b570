"""Plans: checked whole, applied between two messages, and sent to the engines as ``Configure``.

The highest (cluster uid, generation) wins. A role counts from the engine's acknowledgement on, a drain at once.
"""

from __future__ import annotations

import dataclasses

from sluice.v1 import control_pb2, engine_pb2, plan_pb2
from sluice_core.records import EnginePlan, Plan, Role
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.iteration_limits import IterationLimits
from sluice_core.strategies import get_strategy
from sluice_router.errors import PlanRefusedError
from sluice_router.scheduling import model_match, wire_conversion
from sluice_router.scheduling.entities import ConnectedEngine
from sluice_router.scheduling.state import RouterState

_UNLIMITED = 2**31 - 1


def apply_plan(state: RouterState, message: plan_pb2.Plan) -> None:
    """Puts a plan in force, whole; the plan in force again changes nothing.

    Args:
        state: The router's state.
        message: The plan.

    Raises:
        PlanRefusedError: The plan in force stays; the message names the field, the value and the limit.
    """
    try:
        _check_newer(state.active.plan, message)
        _check_plan(state.active.plan, message)
    except PlanRefusedError:
        state.metrics.count("plans", "refused")
        raise
    plan = wire_conversion.plan_from(message)
    if plan == state.active.plan:
        return
    state.metrics.count("plans", "applied")
    if _changes_policy(state.active.plan, plan):
        state.active.policy = get_strategy(plan.strategy).make_router(plan.parameters, state.rng)
        state.engines.table.limit_iterations(IterationLimits())
        state.engines.table.separate_phases(separates=False)
    state.active.plan = plan
    state.limiter.set_limits(plan.owner_limits, plan.num_routers)
    for engine in state.engines.connected.values():
        model_match.check_model(state, engine)
        configure(state, engine)
    state.status.mark_changed()


def configure(state: RouterState, engine: ConnectedEngine) -> None:
    """Sends an engine its part of the plan in force."""
    plan = state.active.plan
    if plan is None or engine.status == control_pb2.ENGINE_STATE_REFUSED:
        return
    part = engine_plan_for(plan, engine)
    state.outbox.message_to(engine).configure.CopyFrom(wire_conversion.configure_message(plan, part))
    if part.is_draining and not engine.is_draining:
        begin_drain(state, engine)


def engine_plan_for(plan: Plan, engine: ConnectedEngine) -> EnginePlan:
    """Returns an engine's part of a plan, as far as it can run it; one that is not named serves with the D setting."""
    # In a roll that raises maxBatchTokens one plan is in force on old and new engines: each runs as much as it can.
    unnamed = EnginePlan(role=Role.DECODE_HEAVY, chunk_size_tokens=plan.unnamed_chunk_size_tokens)
    part = plan.engines.get(engine.engine_id, unnamed)
    if part.chunk_size_tokens <= engine.spec.max_batch_tokens:
        return part
    return dataclasses.replace(part, chunk_size_tokens=engine.spec.max_batch_tokens)


def begin_drain(state: RouterState, engine: ConnectedEngine) -> None:
    """Stops placements on an engine at once."""
    engine.is_draining = True
    if engine.engine_id in state.engines.table and engine.role is not None:
        state.engines.table.configure(
            engine.engine_id, role=engine.role, chunk_size_tokens=engine.chunk_size_tokens, is_draining=True
        )
    state.status.mark_changed()


def handle_configured(state: RouterState, engine: ConnectedEngine, configured: engine_pb2.Configured) -> None:
    """An engine says what it has in force: its role counts from here on.

    Args:
        state: The router's state.
        engine: Who says so.
        configured: What is in force, or why a part was refused.
    """
    if configured.error:
        engine.last_fault = f"refused plan {configured.generation}: {configured.error}"
        state.metrics.count("plans", "refused_by_engine")
        state.status.mark_changed()
        return
    plan = state.active.plan
    if plan is None or configured.cluster_uid != plan.cluster_uid:
        return
    role = wire_conversion.role_from(configured.role)
    engine.role, engine.chunk_size_tokens = role, configured.chunk_size_tokens
    engine.acknowledged_generation = configured.generation
    engine.is_draining = engine_plan_for(plan, engine).is_draining or engine.load.is_draining
    if engine.status != control_pb2.ENGINE_STATE_REFUSED:
        if engine.engine_id not in state.engines.table:
            _add_to_table(state.engines.table, engine, role)
        state.engines.table.configure(
            engine.engine_id,
            role=role,
            chunk_size_tokens=engine.chunk_size_tokens,
            is_draining=engine.is_draining,
        )
    state.status.mark_changed()


def _add_to_table(table: EngineTable, engine: ConnectedEngine, role: Role) -> None:
    """Lets policies see an engine, with the load that it has reported already: an idle one reports seldom."""
    table.add(engine.engine_id, engine.spec, role=role, chunk_size_tokens=engine.chunk_size_tokens)
    if engine.load.kv_blocks_total:
        table.report(
            engine.engine_id, wire_conversion.load_from(engine.load, engine.last_heard_s, 0.0), engine.last_heard_s
        )


def _changes_policy(in_force: Plan | None, plan: Plan) -> bool:
    """Says whether strategy or parameters change; else the policy keeps what it has learned of requests."""
    return in_force is None or (in_force.strategy, in_force.parameters) != (plan.strategy, plan.parameters)


def _check_newer(in_force: Plan | None, message: plan_pb2.Plan) -> None:
    if in_force is None:
        return
    if message.cluster_uid != in_force.cluster_uid:
        raise PlanRefusedError(f"cluster_uid is {message.cluster_uid!r}, this router serves {in_force.cluster_uid!r}")
    if message.generation < in_force.generation:
        raise PlanRefusedError(f"generation is {message.generation}, {in_force.generation} is in force")


def _check_plan(in_force: Plan | None, message: plan_pb2.Plan) -> None:
    """Checks every field.

    Raises:
        PlanRefusedError: Names the field, the value and the limit.
    """
    if not message.cluster_uid:
        raise PlanRefusedError("cluster_uid is empty")
    _check_range("generation", message.generation, 1, 2**63 - 1)
    try:
        get_strategy(message.strategy).read_parameters(message.strategy_parameters)
    except ValueError as error:
        raise PlanRefusedError(str(error)) from error
    _check_classes(message)
    _check_range("attainment_percent", message.attainment_percent, 1, 100)
    _check_engines(message)
    _check_limits(message)
    if (
        in_force is not None
        and message.generation == in_force.generation
        and wire_conversion.plan_from(message) != in_force
    ):
        raise PlanRefusedError(f"generation is {message.generation}, which is in force with other contents")


def _check_classes(message: plan_pb2.Plan) -> None:
    names = [item.name for item in message.slo_classes]
    if not names or names[0]:
        raise PlanRefusedError(f"slo_classes are {names}, the default class (empty name) must come first")
    if len(set(names)) != len(names):
        raise PlanRefusedError(f"slo_classes are {names}, names must be unique")
    for number, item in enumerate(message.slo_classes):
        _check_range(f"slo_classes[{number}].ttft_milliseconds", item.ttft_milliseconds, 1, _UNLIMITED)
        _check_range(f"slo_classes[{number}].tpot_milliseconds", item.tpot_milliseconds, 1, _UNLIMITED)


def _check_engines(message: plan_pb2.Plan) -> None:
    seen: set[str] = set()
    for number, item in enumerate(message.engines):
        field = f"engines[{number}]"
        if not item.engine_id or item.engine_id in seen:
            raise PlanRefusedError(f"{field}.engine_id is {item.engine_id!r}, ids must be unique and not empty")
        seen.add(item.engine_id)
        if item.role not in wire_conversion.ROLES:
            raise PlanRefusedError(f"{field}.role is {item.role}, known are {sorted(wire_conversion.ROLES)}")
        _check_range(f"{field}.chunk_size_tokens", item.chunk_size_tokens, 0, _UNLIMITED)
    _check_range("unnamed_chunk_size_tokens", message.unnamed_chunk_size_tokens, 0, _UNLIMITED)


def _check_limits(message: plan_pb2.Plan) -> None:
    seen: set[str] = set()
    known = {item.name for item in message.slo_classes}
    for number, item in enumerate(message.owner_limits):
        field = f"owner_limits[{number}]"
        if not item.owner or item.owner in seen:
            raise PlanRefusedError(f"{field}.owner is {item.owner!r}, owners must be unique and not empty")
        seen.add(item.owner)
        unknown = sorted(set(item.classes) - known)
        if unknown:
            raise PlanRefusedError(f"{field}.classes are {unknown}, known are {sorted(known)}")
        _check_range(f"{field}.weight", item.weight, 1, 1000)


def _check_range(field: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise PlanRefusedError(f"{field} is {value}, allowed are {lowest} to {highest}")
