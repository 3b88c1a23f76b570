"""The switch step of a reconcile: which model the routers serve, and how far the engines are split between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.model_identity import identify_model
from sluice_operator.api.spec import ModelSpec
from sluice_operator.controller.preconditions import has_served
from sluice_operator.kubernetes.interface import annotations_of
from sluice_operator.planning.model_switch import (
    ModelSwitch,
    SplitStep,
    count_ready,
    decide_switch,
    is_split,
    split_fleet,
)
from sluice_operator.resources.rollout_hash import RESTARTS_ENGINES, compute_rollout_hash
from sluice_operator.resources.rollout_state import find_roll

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.controller.observation import ObservedState
    from sluice_operator.kubernetes.interface import Object
    from sluice_operator.planning.plan import StoredPlan
    from sluice_operator.resources.rollout_state import RolloutState


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
    image = spec.engine.image or annotations_of(live).get(names.DEFAULT_IMAGE_ANNOTATION, "")
    return find_roll(live, compute_rollout_hash(spec, RESTARTS_ENGINES, image))
