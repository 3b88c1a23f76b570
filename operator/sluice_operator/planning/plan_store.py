"""The plan in its ConfigMap: read, and stored by compare-and-swap, so that no two plans share a generation.

The first plan is created, which conflicts when another operator was faster. Each later one replaces exactly the
resourceVersion that its generation was counted from. Plans are stored before they are pushed to routers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf import json_format

from sluice.v1 import plan_pb2
from sluice_core.records import EngineId, Role
from sluice_operator.api import names
from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
from sluice_operator.api.labels import GENERATION_ANNOTATION, SCALE_ANNOTATION, TUNED_ANNOTATION, label_child
from sluice_operator.api.model_identity import REVISION_KEY_PREFIX, name_revision_key
from sluice_operator.api.proto_roles import ROLES
from sluice_operator.autoscaling.stored_scale import StoredScale
from sluice_operator.autotune.stored_sliders import StoredSliders
from sluice_operator.kubernetes.errors import ConflictError
from sluice_operator.kubernetes.kinds import CONFIG_MAPS
from sluice_operator.kubernetes.objects import annotations_of, uid_of
from sluice_operator.planning.model_switch import ModelSwitch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.kubernetes.own_writes import OwnWrites
    from sluice_operator.resources.apply import ChildApplier


async def store_plan(applier: ChildApplier, live: Object | None, stored: StoredPlan, own_writes: OwnWrites) -> bool:
    """Stores a plan.

    Args:
        applier: Applies the cluster's children.
        live: The ConfigMap that the plan's number was counted from; None: there was none.
        stored: What is to be stored; it has a plan.
        own_writes: Records the write.

    Returns:
        Whether it is stored; otherwise the reason is among the applier's failures.

    Raises:
        ConflictError: Somebody else stored one; the next reconcile reads it.
        KubernetesError: To be tried again.
    """
    content = _render(applier, stored)
    name, namespace = content["metadata"]["name"], content["metadata"]["namespace"]
    what = f"ConfigMap {name}"
    if live is None:
        found = await applier.get_live(content)
        if not applier.may_write(found):
            return False
        if found is not None:
            # Ours, but without its labels. With them restored, the next reconcile lists it and reads its number.
            labels = {"metadata": {"uid": uid_of(found), "labels": content["metadata"]["labels"]}}
            await applier.kubernetes.patch(CONFIG_MAPS, namespace, name, labels)
            raise ConflictError(f"{what} had lost its labels")
        return await applier.try_write(applier.kubernetes.create(content), what)
    version = {"uid": uid_of(live), "resourceVersion": live["metadata"]["resourceVersion"]}
    patch = {"metadata": {**content["metadata"], **version}, "data": content["data"]}

    async def replace() -> None:
        own_writes.record(live, patch, await applier.kubernetes.patch(CONFIG_MAPS, namespace, name, patch))

    return await applier.try_write(replace(), what)


def _render(applier: ChildApplier, stored: StoredPlan) -> Object:
    cluster = applier.cluster_name
    assert stored.plan is not None
    content = applier.set_controller_reference(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": names.name_plan(cluster), "labels": label_child(cluster, names.ROUTER)},
            "data": {
                names.PLAN_FILE: write_plan(stored.plan),
                names.ACCEPTED_SPEC_FILE: json.dumps(stored.accepted_spec, sort_keys=True),
                names.MODELS_FILE: write_switch(stored.switch) if stored.switch else "",
                **{name_revision_key(model_id): revision for model_id, revision in stored.revisions.items()},
            },
        }
    )
    content["metadata"]["annotations"] = {
        GENERATION_ANNOTATION: str(stored.plan.generation),
        # Empty rather than absent: a merge patch keeps what it does not name.
        TUNED_ANNOTATION: stored.tuned.to_json() if stored.tuned else "",
        SCALE_ANNOTATION: stored.scale.to_json() if stored.scale else "",
    }
    return content


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
    number = annotations_of(config_map).get(GENERATION_ANNOTATION, "")
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
        tuned=StoredSliders.from_json(annotations.get(TUNED_ANNOTATION, "")),
        scale=StoredScale.from_json(annotations.get(SCALE_ANNOTATION, "")),
        accepted_spec=_read_object(data.get(names.ACCEPTED_SPEC_FILE, "")),
        switch=_read_switch(data.get(names.MODELS_FILE, "")),
        revisions={
            key.removeprefix(REVISION_KEY_PREFIX): value
            for key, value in data.items()
            if key.startswith(REVISION_KEY_PREFIX)
        },
    )


def _read_switch(text: str) -> ModelSwitch | None:
    """Reads which models are served; None: it was not stored, or somebody edited it."""
    try:
        models = [ModelSpec.model_validate(model) for model in json.loads(text)]
    except (ValueError, TypeError):
        return None
    return ModelSwitch(served=models[0], replaced=models[1] if len(models) > 1 else None) if models else None


def write_switch(switch: ModelSwitch) -> str:
    """Writes which models are served, the present one first."""
    models = [model.model_dump(by_alias=True, exclude_defaults=True) for model in switch.models]
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
