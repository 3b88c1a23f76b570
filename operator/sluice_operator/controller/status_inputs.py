"""The inputs of a cluster's status and conditions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_operator.planning.rollout_gate import GateDecision
from sluice_operator.planning.scale_down import ScaleDecision
from sluice_operator.resources.deployments.deployment_status import find_pod_refusals, is_rolling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice.v1 import control_pb2, plan_pb2
    from sluice_core.records import EngineId
    from sluice_core.slo_attainment import SloCounts
    from sluice_operator.api.condition_types import Failure
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.autoscaling.condition import ScaleStatus
    from sluice_operator.autoscaling.stored_scale import StoredScale
    from sluice_operator.autotune.condition import AutotuneStatus
    from sluice_operator.autotune.search_messages import SearchResult
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.routers.engine_reports import EngineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusInputs:
    """What one reconcile observed and decided.

    Args:
        body: The ServingCluster as it is.
        cluster: It, checked; while it cannot be carried out, with the spec accepted last; None: there is none.
        refusal: Why it cannot be carried out as it is.
        failures: What could not be applied.
        engines: Engine pods.
        routers: Router pods.
        deployments: Deployments of engines and routers, by component, as far as they exist.
        scale: What was decided about the number of engines.
        leaving: Why engines leave with their nodes.
        plan: The plan that is stored; None: none yet.
        reports: What routers say of the engines.
        statuses: Newest status of each router that answers.
        refusals: Why routers refused the plan, by pod.
        attainment: Requests of the last five minutes, by class.
        autotune: What the tuner says; None: the spec is refused.
        recommended: What the search for sliders found last; None: nothing yet.
        autoscale: What the scaler says; None: the spec is refused.
        wanted: How many engines it wants; None: autoscaling is disabled.
        rollout: What was decided about a gated roll.
        switching: How far one model has replaced another; empty: none does.
        waiting_upgrade: Which images wait for their turn; empty: none.
        runbook_url: Address of the runbook; empty: there is none.
    """

    body: Object
    cluster: ServingCluster | None
    refusal: Failure | None = None
    failures: tuple[Failure, ...] = ()
    engines: tuple[Pod, ...] = ()
    routers: tuple[Pod, ...] = ()
    deployments: Mapping[str, Object] = field(default_factory=dict)
    scale: ScaleDecision = field(default_factory=lambda: ScaleDecision(replicas=0))
    leaving: Mapping[EngineId, str] = field(default_factory=dict)
    plan: plan_pb2.Plan | None = None
    reports: Mapping[EngineId, EngineReport] = field(default_factory=dict)
    statuses: Mapping[str, control_pb2.GetStatusResponse] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    attainment: Mapping[str, SloCounts] = field(default_factory=dict)
    autotune: AutotuneStatus | None = None
    recommended: SearchResult | None = None
    autoscale: ScaleStatus | None = None
    wanted: StoredScale | None = None
    rollout: GateDecision = field(default_factory=lambda: GateDecision(state=None))
    switching: str = ""
    waiting_upgrade: str = ""
    runbook_url: str = ""

    @property
    def num_engines_ready(self) -> int:
        """Engines that serve."""
        return sum(pod.is_serving for pod in self.engines)

    @property
    def num_routers_ready(self) -> int:
        """Router pods that serve."""
        return sum(pod.is_serving for pod in self.routers)

    @property
    def num_workers_ready(self) -> int:
        """Router processes that serve, of which a pod has one or more."""
        return sum(pod.num_workers for pod in self.routers if pod.is_serving)

    @property
    def pod_failures(self) -> list[Failure]:
        """What is wrong with pods."""
        return [pod.failure for pod in (*self.engines, *self.routers) if pod.failure and not pod.is_ending]

    def is_rolling(self, component: str) -> bool:
        """Whether pods of another template are still to be replaced."""
        deployment = self.deployments.get(component)
        return deployment is not None and is_rolling(deployment)

    def find_deployment_failures(self) -> list[Failure]:
        """Why Kubernetes could not create pods: a quota, or the namespace's Pod Security."""
        return [failure for deployment in self.deployments.values() for failure in find_pod_refusals(deployment)]
