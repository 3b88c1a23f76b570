"""The apply step of a reconcile: labels and annotations of pods, then every child, then what is obsolete."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sluice_operator.kubernetes.kinds import PODS
from sluice_operator.planning.model_switch import choose_router_model
from sluice_operator.planning.pod_patches import render_pod_patches
from sluice_operator.resources.apply import ChildApplier
from sluice_operator.resources.certificates import find_certificate_failures
from sluice_operator.resources.children import RenderInputs, key_of, render_children

if TYPE_CHECKING:
    from sluice_operator.api.condition_types import Failure
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.controller.observation import ObservedRouters, ObservedState
    from sluice_operator.controller.plan_step import PlanOutcome
    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.kubernetes.own_writes import OwnWrites
    from sluice_operator.planning.rollout_gate import GateDecision
    from sluice_operator.settings import OperatorSettings


async def apply_children(
    kubernetes: Kubernetes,
    own_writes: OwnWrites,
    cluster: ServingCluster,
    observed: ObservedState,
    *,
    settings: OperatorSettings,
    reported: ObservedRouters,
    planned: PlanOutcome,
    rollout: GateDecision,
    wall_s: float,
) -> list[Failure]:
    """Makes the children what they should be.

    Args:
        kubernetes: The API server.
        own_writes: Records writes whose events need no reconcile.
        cluster: The cluster, checked.
        observed: What the API server says.
        settings: Default images, and where the operator runs.
        reported: What the routers say.
        planned: The number of engines, and who leaves.
        rollout: Whether a roll of the engines goes on.
        wall_s: The time, in seconds since 1970.

    Returns:
        What could not be done, and is not cured by an immediate retry.

    Raises:
        KubernetesError: To be tried again.
    """
    applier = ChildApplier(kubernetes, cluster, observed.live)
    # Deletion costs before replicas: Kubernetes chooses victims at the moment in which replicas are lowered.
    for patch in render_pod_patches(observed.engines, planned.scale, reported.reports, wall_s):
        await applier.try_write(_patch_pod(kubernetes, own_writes, observed, patch), f"pod {patch['metadata']['name']}")
    desired = render_children(cluster, _make_inputs(observed, planned, rollout), settings)
    for child in desired:
        await applier.apply_child(child)
    await applier.prune({key_of(child) for child in desired})
    return [*applier.failures, *find_certificate_failures(list(observed.live.values()))]


def _make_inputs(observed: ObservedState, planned: PlanOutcome, rollout: GateDecision) -> RenderInputs:
    """Collects what the children depend on besides the manifest."""
    assert planned.models is not None, "there is a spec to go by"
    switch, split = planned.models.switch, planned.models.split
    inputs = RenderInputs(
        engine_replicas=planned.scale.replicas,
        has_monitors=observed.has_monitors,
        live=observed.live,
        roll=rollout.state,
        is_roll_held=rollout.is_held,
        served_model=switch.served,
    )
    if split is None:
        return inputs
    router_model = choose_router_model(switch, observed.routers)
    return replace(inputs, split_unavailable=split.max_unavailable, router_model=router_model)


async def _patch_pod(kubernetes: Kubernetes, own_writes: OwnWrites, observed: ObservedState, patch: Object) -> None:
    name, namespace = patch["metadata"]["name"], observed.body["metadata"]["namespace"]
    answer = await kubernetes.patch(PODS, namespace, name, patch)
    if "annotations" not in patch["metadata"]:
        # A role label is for users: its event needs no reconcile. A deletion cost does: scale-down waits for it.
        own_writes.record(observed.pods[name], patch, answer)
