"""Renders the desired children of a ServingCluster, a pure function of the manifest and ``RenderInputs``.

The plan's ConfigMap is not among them: it is compared and swapped, never applied (``planning.plan_store``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.kubernetes.objects import name_of
from sluice_operator.resources import (
    disruption_budgets,
    network_policies,
    service_accounts,
    service_monitors,
    services,
)
from sluice_operator.resources.certificates import render_certificates
from sluice_operator.resources.deployments.engine_deployment import render_engines
from sluice_operator.resources.deployments.rolling_update import hold_split, mark_rollout
from sluice_operator.resources.deployments.router_deployment import render_routers
from sluice_operator.resources.owner_references import set_controller_reference
from sluice_operator.resources.rollout_hash import keep_pod_template

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.resources.rollout_state import RolloutState
    from sluice_operator.settings import OperatorSettings

# Kind and name: within a namespace there is one such object.
ChildKey = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderInputs:
    """What the children depend on besides the manifest.

    Args:
        engine_replicas: Engine pods, victims of a scale-down included until they have drained.
        has_monitors: Whether the cluster knows ServiceMonitors.
        live: Children as they are.
        roll: The roll that the engines are in, where it is gated.
        is_roll_held: Whether it waits for its verdict.
        served_model: The model that routers serve; None: the manifest's.
        split_unavailable: Engines of the older model that may be away while two are served; None: one is served.
        router_model: Id of the model whose routers get new connections; empty: all do.
    """

    engine_replicas: int
    has_monitors: bool
    live: Mapping[ChildKey, Object]
    roll: RolloutState | None = None
    is_roll_held: bool = False
    served_model: ModelSpec | None = None
    split_unavailable: int | None = None
    router_model: str = ""


def render_children(cluster: ServingCluster, inputs: RenderInputs, settings: OperatorSettings) -> list[Object]:
    """Renders all children, in the order in which they are needed.

    Args:
        cluster: The manifest, with namespace and uid.
        inputs: What else they depend on.
        settings: Default images, and where the operator runs.
    """
    of_routers = _with_model(cluster, inputs.served_model)
    routers, engines = (
        keep_pod_template(deployment, inputs.live.get(key_of(deployment)))
        for deployment in (
            render_routers(of_routers, settings.router_image, names.name_operator_peer(settings.namespace)),
            render_engines(cluster, inputs.engine_replicas, settings.engine_image, settings.gpu_resource_name),
        )
    )
    rendered = [
        *service_accounts.render_service_accounts(cluster),
        *network_policies.render_network_policies(cluster, settings.namespace),
        *services.render_services(cluster, inputs.router_model),
        *render_certificates(cluster),
        routers,
        hold_split(mark_rollout(engines, inputs.roll, is_held=inputs.is_roll_held), inputs.split_unavailable),
        *disruption_budgets.render_disruption_budgets(cluster),
        *(
            service_monitors.render_service_monitors(cluster, settings.labels_of_monitors)
            if inputs.has_monitors and settings.cluster_monitors
            else []
        ),
    ]
    return [set_controller_reference(child, cluster) for child in rendered]


def _with_model(cluster: ServingCluster, model: ModelSpec | None) -> ServingCluster:
    if model is None:
        return cluster
    return cluster.model_copy(update={"spec": cluster.spec.model_copy(update={"model": model})})


def key_of(child: Object) -> ChildKey:
    """Kind and name of a child."""
    return child["kind"], name_of(child)
