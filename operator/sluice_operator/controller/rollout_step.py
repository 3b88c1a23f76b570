"""The rollout step of a reconcile: whether a gated roll of the engines goes on, and which model the routers serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
from sluice_operator.api.labels import DEFAULT_IMAGE_ANNOTATION
from sluice_operator.api.model_identity import identify_model
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
from sluice_operator.planning.roll_observation import RollingEngine, follow_roll
from sluice_operator.resources.rollout_hash import RESTARTS_ENGINES, compute_rollout_hash
from sluice_operator.resources.rollout_state import find_roll

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.controller.cluster_state import ClusterState
    from sluice_operator.controller.observation import ObservedRouters, ObservedState
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.planning.plan_store import StoredPlan
    from sluice_operator.planning.rollout_gate import GateDecision
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.resources.rollout_state import RolloutState


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
    target_hash = compute_rollout_hash(cluster.spec, RESTARTS_ENGINES, cluster.spec.engine.image or default_image)
    return follow_roll(
        cluster.spec,
        find_roll(live, target_hash),
        [_describe_engine(pod) for pod in observed.engines if pod.is_present],
        state.rolling,
        has_reports=bool(reported.statuses),
        is_before_switch=is_before_switch,
        now=now,
        wall_s=wall_s,
    )


def _describe_engine(pod: Pod) -> RollingEngine:
    is_refused = pod.failure is not None and pod.failure.reason is Reason.ENGINE_REFUSED
    return RollingEngine(
        engine_id=pod.engine_id,
        restart_hash=pod.restart_hash,
        is_ready=pod.is_ready,
        refusal=pod.failure.message if pod.failure and is_refused else "",
    )


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
