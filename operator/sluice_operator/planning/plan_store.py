"""Stores plans: compare-and-swap in one ConfigMap, so that no two plans of a cluster ever have one number.

The first plan is created, which fails when somebody was faster; every later one replaces exactly the version that its
number was counted from. Whatever is pushed to routers was stored before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.kubernetes.interface import CONFIG_MAPS, ConflictError, uid_of
from sluice_operator.planning.plan import write_plan

if TYPE_CHECKING:
    from sluice.v1 import plan_pb2
    from sluice_operator.autotune.decision import StoredSliders
    from sluice_operator.kubernetes.interface import Object
    from sluice_operator.kubernetes.own_writes import OwnWrites
    from sluice_operator.resources.apply import ChildApplier


async def store_plan(
    applier: ChildApplier, live: Object | None, plan: plan_pb2.Plan, tuned: StoredSliders | None, own_writes: OwnWrites
) -> bool:
    """Stores a plan.

    Args:
        applier: The cluster's children.
        live: The ConfigMap that the plan's number was counted from; None: there was none.
        plan: The plan.
        tuned: Sliders in it that autotune put in force instead of the spec's; they are stored with it.
        own_writes: Takes note of the write.

    Returns:
        Whether it is stored; the reason is among the children's troubles otherwise.

    Raises:
        ConflictError: Somebody else stored one; look again.
        KubernetesError: To be tried again.
    """
    content = _render(applier, plan, tuned)
    name, namespace = content["metadata"]["name"], content["metadata"]["namespace"]
    what = f"ConfigMap {name}"
    if live is None:
        found = await applier.get_live(content)
        if not applier.may_write(content, found):
            return False
        if found is not None:
            # Ours, but it has lost its labels: given back, it is seen with its number at the next look.
            labels = {"metadata": {"uid": uid_of(found), "labels": content["metadata"]["labels"]}}
            await applier.kubernetes.patch(CONFIG_MAPS, namespace, name, labels)
            raise ConflictError(f"{what} had lost its labels")
        return await applier.try_write(applier.kubernetes.create(content), what)
    version = {"uid": uid_of(live), "resourceVersion": live["metadata"]["resourceVersion"]}
    patch = {"metadata": {**content["metadata"], **version}, "data": content["data"]}

    async def replace() -> None:
        own_writes.record(live, patch, await applier.kubernetes.patch(CONFIG_MAPS, namespace, name, patch))

    return await applier.try_write(replace(), what)


def _render(applier: ChildApplier, plan: plan_pb2.Plan, tuned: StoredSliders | None) -> Object:
    cluster = applier.cluster_name
    content = applier.set_controller_reference(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": names.name_plan(cluster), "labels": names.label_child(cluster, names.ROUTER)},
            "data": {names.PLAN_FILE: write_plan(plan)},
        }
    )
    content["metadata"]["annotations"] = {
        names.GENERATION_ANNOTATION: str(plan.generation),
        # Empty rather than absent: a patch leaves what it does not name.
        names.TUNED_ANNOTATION: tuned.to_json() if tuned else "",
    }
    return content
