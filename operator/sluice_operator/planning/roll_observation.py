"""Collects what is observed of a gated roll's present batch; ``rollout_gate`` judges it.

The operator follows the rolls of a Deployment by it, and ``sluice up`` those of its own processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

from sluice_operator.planning.rollout_gate import GateDecision, RollFacts, decide_gate
from sluice_operator.routers.engine_outcomes import EngineOutcomes, Outcomes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sluice_core.records import EngineId
    from sluice_operator.api.fields_and_defaults.rollout_gate_spec import RolloutGateSpec
    from sluice_operator.api.serving_cluster import ServingClusterSpec
    from sluice_operator.resources.rollout_state import RolloutState

# Beyond drain and start: the pod's termination, its image, the kubelet.
START_MARGIN_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingEngine:
    """An engine of a roll.

    Args:
        engine_id: Its name.
        restart_hash: Identifies the fields that it was started with.
        is_ready: Whether it serves.
        refusal: Why it refuses to start; empty: it does not.
    """

    engine_id: EngineId
    restart_hash: str
    is_ready: bool
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    """A batch of new engines, as this process found it.

    Args:
        key: Tells it from other batches.
        seen_s: When it was found.
        total: What had ended by then, on all engines.
        on_new: What had ended on the new ones.
    """

    key: object
    seen_s: float
    total: Outcomes
    on_new: Outcomes


@dataclass(slots=True, kw_only=True)
class RollMeasurement:
    """What this process measures of rolls. Mutable; ``follow_roll`` notes the batch.

    Attributes:
        outcomes: What became of requests, by engine.
        batch: The batch that is measured; None: none is.
    """

    outcomes: EngineOutcomes = field(default_factory=EngineOutcomes)
    batch: MeasuredBatch | None = None


def follow_roll(
    spec: ServingClusterSpec,
    roll: RolloutState | None,
    engines: Sequence[RollingEngine],
    measurement: RollMeasurement,
    *,
    has_reports: bool,
    is_before_switch: bool = False,
    now: float,
    wall_s: float,
) -> GateDecision:
    """Decides about the roll that the engines are in; without a gate there is none to decide about.

    Args:
        spec: What the manifest asks for.
        roll: What is stored of the roll; None: there is none.
        engines: Those that are there.
        measurement: What became of requests; where the figures of the batch begin is noted there.
        has_reports: Whether any router answers.
        is_before_switch: Whether the new engines serve another model, to which the routers have not switched yet.
        now: Monotonic seconds.
        wall_s: The time, in seconds since 1970.
    """
    gate = spec.rollout.gate
    if gate is None:
        return GateDecision(state=None)
    if roll is None or spec.rollout.paused:
        return GateDecision(state=roll)
    facts = _observe_roll(spec, gate, roll, engines, measurement, has_reports=has_reports, now=now)
    if is_before_switch and not roll.failure:
        # No request reaches the new engines yet: there is nothing to measure, but whether they start.
        return GateDecision(state=replace(roll, failure=facts.refusal))
    return decide_gate(roll, facts, gate, wall_s)


def _observe_roll(
    spec: ServingClusterSpec,
    gate: RolloutGateSpec,
    roll: RolloutState,
    engines: Sequence[RollingEngine],
    measurement: RollMeasurement,
    *,
    has_reports: bool,
    now: float,
) -> RollFacts:
    """Collects what is observed of a roll; see ``follow_roll``."""
    new = [engine for engine in engines if engine.restart_hash == roll.target_hash]
    new_ids = [engine.engine_id for engine in new]
    outcomes, batch = measurement.outcomes, _find_batch(measurement, roll, new_ids, now)
    on_new = _sum(outcomes, new_ids).minus(batch.on_new)
    figures = on_new if on_new.num_ended >= gate.min_requests else outcomes.total().minus(batch.total)
    return RollFacts(
        num_new=len(new),
        num_new_ready=sum(engine.is_ready for engine in new),
        num_old=len(engines) - len(new),
        replicas=spec.replicas,
        refusal=next((engine.refusal for engine in new if engine.refusal), ""),
        figures=figures if has_reports else None,
        num_ended_on_new=on_new.num_ended,
        watched_s=now - batch.seen_s,
        start_limit_s=spec.engine.drain_timeout_seconds + spec.engine.startup_timeout_seconds + START_MARGIN_S,
    )


def _find_batch(
    measurement: RollMeasurement, roll: RolloutState, new_ids: Iterable[EngineId], now: float
) -> MeasuredBatch:
    """Finds the batch that is measured; figures and time count from when this process saw it."""
    key = (roll.target_hash, roll.num_passed, roll.measured_since_s)
    if measurement.batch is None or measurement.batch.key != key:
        total, on_new = measurement.outcomes.total(), _sum(measurement.outcomes, new_ids)
        measurement.batch = MeasuredBatch(key=key, seen_s=now, total=total, on_new=on_new)
    return measurement.batch


def _sum(outcomes: EngineOutcomes, engines: Iterable[EngineId]) -> Outcomes:
    return reduce(Outcomes.plus, map(outcomes.total, engines), Outcomes())
