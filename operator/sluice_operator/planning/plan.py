"""Makes the plan: which engine has which role, which engines drain, and the plan's generation.

A plan is a pure function of the stored plan and of what is observed, so that no decision is lost with a process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf import json_format

from sluice.v1 import plan_pb2
from sluice_core.records import EngineId, Role
from sluice_operator.api import names
from sluice_operator.api.model_identity import REVISION_KEY_PREFIX
from sluice_operator.api.proto_enums import ROLES
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.api.spec.model_spec import ModelSpec
from sluice_operator.autoscaling.stored_scale import StoredScale
from sluice_operator.autotune.decision import StoredSliders
from sluice_operator.kubernetes.interface import annotations_of
from sluice_operator.planning.model_switch import ModelSwitch
from sluice_operator.planning.plan_message import render_plan
from sluice_operator.planning.roles import decide_roles
from sluice_operator.routers.engine_reports import count_loads

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from sluice.v1 import control_pb2
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.interface import Object
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.routers.engine_reports import EngineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """The plan in its ConfigMap.

    Args:
        plan: The plan; None when there is none, or none that can be read.
        generation: Its generation, or the highest that is known to have been used; 0: none.
        tuned: Sliders that autotune put in force instead of the spec's.
        scale: What autoscaling decided; None: it is disabled.
        accepted_spec: The spec that was accepted last; None: none was stored.
        switch: Which models are served; None: none was stored.
        revisions: What unpinned revisions were resolved to, by the model's id: the same for every pod from then on.
    """

    plan: plan_pb2.Plan | None = None
    generation: int = 0
    tuned: StoredSliders | None = None
    scale: StoredScale | None = None
    accepted_spec: Object | None = None
    switch: ModelSwitch | None = None
    revisions: Mapping[str, str] = field(default_factory=dict)

    @property
    def roles(self) -> dict[EngineId, Role]:
        """Roles in it."""
        engines = self.plan.engines if self.plan else ()
        return {EngineId(engine.engine_id): ROLES[engine.role] for engine in engines if engine.role in ROLES}

    @property
    def draining(self) -> set[EngineId]:
        """Engines that drain by it."""
        return {EngineId(engine.engine_id) for engine in (self.plan.engines if self.plan else ()) if engine.is_draining}


def read_plan(config_map: Object | None, cluster_uid: str) -> StoredPlan:
    """Reads the plan.

    Args:
        config_map: As it is in the cluster; None when there is none.
        cluster_uid: A plan of another cluster counts as none.
    """
    if config_map is None:
        return StoredPlan()
    number = annotations_of(config_map).get(names.GENERATION_ANNOTATION, "")
    generation = int(number) if number.isdecimal() else 0
    data = config_map.get("data") or {}
    text = data.get(names.PLAN_FILE, "")
    try:
        # Fields of another release are left out, so that its plan still says which engine has which role.
        plan = json_format.ParseDict(json.loads(text), plan_pb2.Plan(), ignore_unknown_fields=True)
    except (ValueError, json_format.ParseError):
        return StoredPlan(generation=generation)
    if plan.cluster_uid != cluster_uid:
        return StoredPlan(generation=generation)
    annotations = annotations_of(config_map)
    return StoredPlan(
        plan=plan,
        generation=max(generation, plan.generation),
        tuned=StoredSliders.from_json(annotations.get(names.TUNED_ANNOTATION, "")),
        scale=StoredScale.from_json(annotations.get(names.SCALE_ANNOTATION, "")),
        accepted_spec=_read_object(data.get(names.ACCEPTED_SPEC_FILE, "")),
        switch=_read_switch(data.get(names.MODELS_FILE, "")),
        revisions={
            key.removeprefix(REVISION_KEY_PREFIX): value
            for key, value in data.items()
            if key.startswith(REVISION_KEY_PREFIX)
        },
    )


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


def _read_switch(text: str) -> ModelSwitch | None:
    """Reads which models are served; None: it was not stored, or somebody edited it."""
    try:
        models = [ModelSpec.model_validate(model) for model in json.loads(text)]
    except (ValueError, TypeError):
        return None
    return ModelSwitch(served=models[0], replaced=models[1] if len(models) > 1 else None) if models else None


def write_switch(switch: ModelSwitch) -> str:
    """Writes which models are served, the present one first."""
    models = [model.model_dump(mode="json", by_alias=True, exclude_defaults=True) for model in switch.models]
    return json.dumps(models, sort_keys=True)


def _read_object(text: str) -> Object | None:
    """Reads a JSON object; None: there is none, or somebody edited it."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def write_plan(plan: plan_pb2.Plan) -> str:
    """Writes the plan as the routers read it (``--plan``)."""
    return json.dumps(json_format.MessageToDict(plan, preserving_proto_field_name=True), sort_keys=True)


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
