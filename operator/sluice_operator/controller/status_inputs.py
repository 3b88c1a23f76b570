"""The inputs of a cluster's status and conditions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_operator.api.condition_types import Reason
from sluice_operator.planning.rollout_gate import GateDecision
from sluice_operator.planning.scale_down import ScaleDecision
from sluice_operator.resources.pods.pod_status import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice.v1 import control_pb2, plan_pb2
    from sluice_core.records import EngineId
    from sluice_core.slo import SloCounts
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.autoscaling.condition import ScaleStatus
    from sluice_operator.autoscaling.stored_scale import StoredScale
    from sluice_operator.autotune.condition import AutotuneStatus
    from sluice_operator.autotune.search_messages import SearchResult
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.routers.engine_reports import EngineReport

ROLLOUT_FAILURES = frozenset(
    {
        Reason.IMAGE_PULL_BACK_OFF,
        Reason.CRASH_LOOP,
        Reason.ENGINE_REFUSED,
        Reason.UNSCHEDULABLE,
        Reason.MOUNT_FAILED,
        Reason.PREFLIGHT_FAILED,
    }
)


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

    @property
    def num_engines_ready(self) -> int:
        """Engines that serve."""
        return sum(pod.is_ready and pod.is_present for pod in self.engines)

    @property
    def num_routers_ready(self) -> int:
        """Routers that serve."""
        return sum(pod.is_ready and pod.is_present for pod in self.routers)

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
        found = []
        for deployment in self.deployments.values():
            for condition in (deployment.get("status") or {}).get("conditions") or []:
                if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                    message = condition.get("message", "")
                    reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in message else Reason.FORBIDDEN
                    name = deployment["metadata"]["name"]
                    found.append(Failure(reason=reason, message=f"deployment {name} cannot create pods: {message}"))
        return found


def is_rolling(deployment: Object) -> bool:
    """Whether pods of another template are still to be replaced."""
    status = deployment.get("status") or {}
    is_seen = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return not is_seen or status.get("updatedReplicas", 0) < status.get("replicas", 0)


def is_whole(deployment: Object) -> bool:
    """Whether all pods of a Deployment serve."""
    return bool((deployment.get("status") or {}).get("readyReplicas", 0) >= deployment["spec"]["replicas"])
