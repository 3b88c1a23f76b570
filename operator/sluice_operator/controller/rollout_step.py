"""The rollout step of a reconcile: whether a gated roll of the engines goes on, and which model the routers serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.labels import DEFAULT_IMAGE_ANNOTATION
from sluice_operator.api.model_identity import identify_model
from sluice_operator.api.spec.model_spec import ModelSpec
from sluice_operator.controller.cluster_state import MeasuredBatch
from sluice_operator.controller.preconditions import has_served
from sluice_operator.kubernetes.objects import annotations_of
from sluice_operator.planning.model_switch import (
    ModelSwitch,
    SplitStep,
    count_ready,
    decide_switch,
    is_split,
    split_fleet,
)
from sluice_operator.planning.rollout_gate import GateDecision, RollFacts, decide_gate
from sluice_operator.resources.rollout_hash import RESTARTS_ENGINES, compute_rollout_hash
from sluice_operator.resources.rollout_state import find_roll
from sluice_operator.routers.engine_outcomes import Outcomes

if TYPE_CHECKING:
    from collections.abc import Collection

    from sluice_core.records import EngineId
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.api.spec.rollout_spec import RolloutGateSpec
    from sluice_operator.controller.cluster_state import ClusterState
    from sluice_operator.controller.observation import ObservedRouters, ObservedState
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.planning.plan_store import StoredPlan
    from sluice_operator.resources.rollout_state import RolloutState

# Beyond drain and start: the pod's termination, its image, the kubelet.
START_MARGIN_S = 120


def decide_rollout(
    cluster: ServingCluster,
    live: Object | None,
    observed: ObservedState,
    reported: ObservedRouters,
    state: ClusterState,
    *,
    default_image: str,
    is_before_switch: bool = False,
    now: float,
    wall_s: float,
) -> GateDecision:
    """Decides about the roll that the engines are in; without a gate there is none to decide about.

    Args:
        cluster: The manifest.
        live: The engines' Deployment as it is; None before it exists.
        observed: What the API server says.
        reported: What the routers say.
        state: The cluster's state; where the figures of the batch begin is noted there.
        default_image: Image of engines whose manifest names none.
        is_before_switch: Whether the new engines serve another model, to which the routers have not switched yet.
        now: Monotonic seconds.
        wall_s: The time, in seconds since 1970.
    """
    spec, gate = cluster.spec, cluster.spec.rollout.gate
    if gate is None:
        return GateDecision(state=None)
    target_hash = compute_rollout_hash(spec, RESTARTS_ENGINES, spec.engine.image or default_image)
    roll = find_roll(live, target_hash)
    if roll is None or spec.rollout.paused:
        return GateDecision(state=roll)
    facts = _observe_roll(cluster, observed, reported, state, roll=roll, gate=gate, now=now)
    if is_before_switch and not roll.failure:
        # No request reaches the new engines yet: there is nothing to measure, but whether they start.
        return GateDecision(state=replace(roll, failure=facts.refusal))
    return decide_gate(roll, facts, gate, wall_s)


def _observe_roll(
    cluster: ServingCluster,
    observed: ObservedState,
    reported: ObservedRouters,
    state: ClusterState,
    *,
    roll: RolloutState,
    gate: RolloutGateSpec,
    now: float,
) -> RollFacts:
    """Collects what is observed of a roll; see ``decide_rollout``."""
    spec = cluster.spec
    present = [pod for pod in observed.engines if pod.is_present]
    new = [pod for pod in present if pod.restart_hash == roll.target_hash]
    refusals = [pod.failure.message for pod in new if pod.failure and pod.failure.reason is Reason.ENGINE_REFUSED]
    new_engines = [pod.engine_id for pod in new]
    batch = _find_batch(state, roll, new_engines, now)
    on_new = _sum(state, new_engines).minus(batch.on_new)
    figures = on_new if on_new.num_ended >= gate.min_requests else state.outcomes.total().minus(batch.total)
    return RollFacts(
        num_new=len(new),
        num_new_ready=sum(pod.is_ready for pod in new),
        num_old=len(present) - len(new),
        replicas=spec.replicas,
        refusal=refusals[0] if refusals else "",
        figures=figures if reported.statuses else None,
        num_ended_on_new=on_new.num_ended,
        watched_s=now - batch.seen_s,
        start_limit_s=spec.engine.drain_timeout_seconds + spec.engine.startup_timeout_seconds + START_MARGIN_S,
    )


def _find_batch(
    state: ClusterState, roll: RolloutState, new_engines: Collection[EngineId], now: float
) -> MeasuredBatch:
    """Finds the batch that is measured; figures and time count from when this process saw it."""
    key = (roll.target_hash, roll.num_passed, roll.measured_since_s)
    if state.batch is None or state.batch.key != key:
        total, on_new = state.outcomes.total(), _sum(state, new_engines)
        state.batch = MeasuredBatch(key=key, seen_s=now, total=total, on_new=on_new)
    return state.batch


def _sum(state: ClusterState, engines: Collection[EngineId]) -> Outcomes:
    return reduce(Outcomes.plus, map(state.outcomes.total, engines), Outcomes())


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchOutcome:
    """What was decided about the models of a cluster.

    Args:
        switch: Which models are served.
        split: How far the engines are split; None: one model is served.
        is_before: Whether the routers have not switched to the engines' model yet.
    """

    switch: ModelSwitch
    split: SplitStep | None = None
    is_before: bool = False

    def describe(self) -> str:
        """Says how far the switch is; empty: there is none."""
        if self.split is None:
            return ""
        if self.is_before:
            return f"the routers switch to the other model once {self.split.num_needed} engines of it serve"
        return "new requests go to the new model, and streams of the replaced one end on its own engines"


def switch_models(cluster: ServingCluster, observed: ObservedState, stored: StoredPlan) -> SwitchOutcome:
    """Decides which model the routers serve.

    Args:
        cluster: The manifest.
        observed: What the API server says.
        stored: What is stored.
    """
    spec, old = cluster.spec, stored.switch or _find_served(cluster, stored)
    if not has_served(observed.body):
        return SwitchOutcome(switch=ModelSwitch(served=spec.model))
    roll = _find_gated_roll(cluster, observed.deployment(names.ENGINE))
    has_failed = roll is not None and bool(roll.failure)
    target = spec.model
    if has_failed:
        # The engines that served before come back, and with them the model that they serve.
        others = [model for model in old.models if identify_model(model) != identify_model(spec.model)]
        target = others[0] if others else spec.model
    split = split_fleet(spec.rollout, spec.replicas, count_ready(old, target, observed.engines))
    switch = decide_switch(
        old,
        target,
        observed.engines,
        observed.routers,
        # Back to engines that are known to be good: at once.
        num_needed=1 if has_failed else split.num_needed,
        may_return=roll is not None and not roll.failure,
    )
    if not is_split(switch, target, observed.routers):
        return SwitchOutcome(switch=switch)
    is_before = identify_model(switch.served) != identify_model(target)
    return SwitchOutcome(switch=switch, split=split, is_before=is_before)


def _find_served(cluster: ServingCluster, stored: StoredPlan) -> ModelSwitch:
    """The model of the spec that was accepted last, for clusters of an operator that stored no models."""
    try:
        return ModelSwitch(served=ModelSpec.model_validate((stored.accepted_spec or {})["model"]))
    except (KeyError, ValueError):
        return ModelSwitch(served=cluster.spec.model)


def _find_gated_roll(cluster: ServingCluster, live: Object | None) -> RolloutState | None:
    """The roll to the template that the spec asks for, where it is measured; None: there is none."""
    spec = cluster.spec
    if spec.rollout.gate is None or live is None:
        return None
    image = spec.engine.image or annotations_of(live).get(DEFAULT_IMAGE_ANNOTATION, "")
    return find_roll(live, compute_rollout_hash(spec, RESTARTS_ENGINES, image))
