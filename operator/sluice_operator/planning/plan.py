"""Makes the plan: which engine has which role, which engines drain, and the plan's generation.

A plan is a pure function of the stored plan and of what is observed, so that no decision is lost with a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.records import EngineId, Role
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.planning.plan_message import render_plan
from sluice_operator.planning.roles import decide_roles
from sluice_operator.routers.engine_reports import count_loads

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sluice.v1 import control_pb2, plan_pb2
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.planning.model_switch import ModelSwitch
    from sluice_operator.planning.plan_store import StoredPlan
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.routers.engine_reports import EngineReport


def resolve_revisions(known: Mapping[str, str], pods: Iterable[Pod]) -> dict[str, str]:
    """Takes what pods resolved their models' unpinned revisions to; the first answer for a model counts for all.

    Args:
        known: Revisions that are stored, by the model's id.
        pods: Engine and router pods.
    """
    found: dict[str, str] = {}
    for pod in sorted(pods, key=lambda pod: (pod.created, pod.name)):
        if pod.model_id and pod.resolved_revision:
            found.setdefault(pod.model_id, pod.resolved_revision)
    return {**found, **known}


def make_plan(
    cluster: ServingCluster,
    stored: StoredPlan,
    pods: Sequence[Pod],
    *,
    victims: Collection[EngineId],
    reports: Mapping[EngineId, EngineReport],
    statuses: Iterable[control_pb2.GetStatusResponse],
    switch: ModelSwitch | None = None,
) -> plan_pb2.Plan:
    """Makes the plan that should be in force.

    Args:
        cluster: The manifest, with the sliders that are to be in force.
        stored: The plan in its ConfigMap.
        pods: Engine pods.
        victims: Engines that leave, at a scale-down or with their nodes.
        reports: What routers say of the engines.
        statuses: Newest status of each router.
        switch: Which models are served; None: the manifest's.

    Returns:
        The stored plan when it is the same already, else one with the next generation.
    """
    roles = stored.roles
    ending = {pod.engine_id for pod in pods if pod.is_ending and pod.engine_id in roles}
    staying = [pod for pod in pods if pod.is_present and pod.engine_id not in victims]
    assigned = _assign_roles(cluster, roles, staying, reports, switch)
    # An engine that never had a role serves with the D-heavy setting, and drains like the others.
    gone = {engine_id: roles.get(engine_id, Role.DECODE_HEAVY) for engine_id in (*ending, *victims)}
    uid = cluster.metadata.uid
    # A ConfigMap that was deleted or edited by hand must not make generations fall.
    highest = max([stored.generation, *(status.generation for status in statuses if status.cluster_uid == uid)])

    def render(generation: int) -> plan_pb2.Plan:
        named = dict(sorted((assigned | gone).items()))
        models = switch.models if switch else ()
        return render_plan(cluster, named, generation=generation, cluster_uid=uid, draining=gone, served_models=models)

    if stored.plan is not None and stored.plan.generation == highest and render(highest) == stored.plan:
        return stored.plan
    return render(highest + 1)


def _assign_roles(
    cluster: ServingCluster,
    roles: Mapping[EngineId, Role],
    staying: Sequence[Pod],
    reports: Mapping[EngineId, EngineReport],
    switch: ModelSwitch | None,
) -> dict[EngineId, Role]:
    """Assigns roles within each model: requests stay within a model, so its engines have both among themselves."""
    assigned: dict[EngineId, Role] = {}
    for model in sorted({switch.find_model(pod) if switch else "" for pod in staying}):
        fleet = [pod for pod in staying if not switch or switch.find_model(pod) == model]
        assigned |= decide_roles(
            roles,
            serving=sorted(pod.engine_id for pod in fleet if pod.is_ready),
            away=sorted(pod.engine_id for pod in fleet if not pod.is_ready),
            sliders=resolve_sliders(cluster.spec),
            replicas=cluster.spec.replicas,
            loads=count_loads(reports),
        )
    return assigned
