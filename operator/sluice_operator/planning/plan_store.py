"""Stores plans by compare-and-swap in one ConfigMap, so that no two plans of a cluster share a generation.

The first plan is created, which conflicts when another operator was faster. Each later one replaces exactly the
resourceVersion that its generation was counted from. Plans are stored before they are pushed to routers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.model_identity import name_revision_key
from sluice_operator.kubernetes.interface import CONFIG_MAPS, ConflictError, uid_of
from sluice_operator.planning.plan import write_plan, write_switch

if TYPE_CHECKING:
    from sluice_operator.kubernetes.interface import Object
    from sluice_operator.kubernetes.own_writes import OwnWrites
    from sluice_operator.planning.plan import StoredPlan
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
        if not applier.may_write(content, found):
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
            "metadata": {"name": names.name_plan(cluster), "labels": names.label_child(cluster, names.ROUTER)},
            "data": {
                names.PLAN_FILE: write_plan(stored.plan),
                names.ACCEPTED_SPEC_FILE: json.dumps(stored.accepted_spec, sort_keys=True),
                names.MODELS_FILE: write_switch(stored.switch) if stored.switch else "",
                **{name_revision_key(model_id): revision for model_id, revision in stored.revisions.items()},
            },
        }
    )
    content["metadata"]["annotations"] = {
        names.GENERATION_ANNOTATION: str(stored.plan.generation),
        # Empty rather than absent: a merge patch keeps what it does not name.
        names.TUNED_ANNOTATION: stored.tuned.to_json() if stored.tuned else "",
        names.SCALE_ANNOTATION: stored.scale.to_json() if stored.scale else "",
    }
    return content
