"""How Deployments replace their pods: how many at once, and what holds the next ones back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sluice_operator.api.labels import ROLLOUT_ANNOTATION, TEMPLATE_ANNOTATION
from sluice_operator.kubernetes.objects import annotations_of

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingClusterSpec
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.resources.rollout_state import RolloutState

# Beyond the start itself: pulling an image of ten gigabytes.
PULL_MARGIN_S = 1800


# Routers start in seconds: the new one serves before an old one ends.
ROUTER_STRATEGY: Object = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def render_rolling_update(spec: ServingClusterSpec) -> Object:
    """Renders the fields of the engines' Deployment that say how it replaces its pods."""
    rollout, gate = spec.rollout, spec.rollout.gate
    min_ready_s = gate.duration_seconds if gate else 0
    # Must be above minReadySeconds, which grows while a batch waits for its verdict.
    deadline_s = spec.engine.startup_timeout_seconds + PULL_MARGIN_S + min_ready_s
    deadline_s += gate.timeout_seconds if gate else 0
    return {
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        },
        "paused": rollout.paused,
        # Until its verdict, or so long without one, a new engine lets no other be replaced.
        "minReadySeconds": min_ready_s,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": deadline_s,
    }


def mark_rollout(deployment: Object, state: RolloutState | None, *, is_held: bool) -> Object:
    """Puts a roll into the Deployment that is to be applied.

    Args:
        deployment: As rendered, with the template that the spec asks for.
        state: The roll; None: there is none.
        is_held: Whether no further engine is replaced now.
    """
    if state is None:
        return deployment
    spec, metadata = deployment["spec"], deployment["metadata"]
    annotations = {**annotations_of(deployment), ROLLOUT_ANNOTATION: state.to_json()}
    if state.failure:
        text = json.dumps(state.good_template, sort_keys=True, separators=(",", ":"))
        annotations[TEMPLATE_ANNOTATION] = text
        spec = {**spec, "template": state.good_template}
    elif is_held or not state.num_passed:
        # A paused Deployment still ends its old pods once all new ones are available: they are not, until the verdict.
        # The first batch is held by this from its beginning, however late the operator comes to pause it.
        spec = {**spec, "paused": spec["paused"] or is_held, "minReadySeconds": spec["progressDeadlineSeconds"] - 1}
    return {
        **deployment,
        "metadata": {**metadata, "annotations": annotations},
        "spec": spec,
    }


def hold_split(deployment: Object, max_unavailable: int | None) -> Object:
    """Keeps engines of two models side by side in the Deployment that is to be applied.

    New engines never become available meanwhile, so Kubernetes goes no further than the step allows, whoever leads.

    Args:
        deployment: As rendered.
        max_unavailable: Engines of the older model that may be away; None: one model is served.
    """
    if max_unavailable is None:
        return deployment
    spec = deployment["spec"]
    update = {**spec["strategy"]["rollingUpdate"], "maxUnavailable": max_unavailable}
    return {
        **deployment,
        "spec": {
            **spec,
            "strategy": {**spec["strategy"], "rollingUpdate": update},
            "minReadySeconds": spec["progressDeadlineSeconds"] - 1,
        },
    }
