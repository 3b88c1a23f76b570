"""The plan step of a reconcile: decides sliders, scale and roles, and stores the plan when it changed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.sliders import resolve_sliders, scale_sliders
from sluice_operator.autoscaling.scaler import ScalerInputs, apply_replicas
from sluice_operator.autotune.tuner import TunerInputs, apply_sliders
from sluice_operator.controller.rollout_step import SwitchOutcome, switch_models
from sluice_operator.kubernetes.kinds import CONFIG_MAPS
from sluice_operator.kubernetes.objects import uid_of
from sluice_operator.planning.expired_drains import drain_limit_s, find_drain_starts, find_expired
from sluice_operator.planning.node_drains import choose_leaving
from sluice_operator.planning.plan import make_plan, resolve_revisions
from sluice_operator.planning.plan_store import StoredPlan, read_plan, store_plan
from sluice_operator.planning.scale_down import ScaleDecision, decide_scale
from sluice_operator.resources.apply import ChildApplier
from sluice_operator.routers.engine_reports import count_loads, has_acknowledged

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sluice_core.records import EngineId
    from sluice_operator.api.condition_types import Failure
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.autoscaling.scaler import Scaler
    from sluice_operator.controller.cluster_state import ClusterState
    from sluice_operator.controller.observation import ObservedRouters, ObservedState
    from sluice_operator.controller.preconditions import SpecVerdict
    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.kubernetes.own_writes import OwnWrites
    from sluice_operator.planning.node_notices import NodeNotices


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """What was decided about a cluster, and what became of its plan.

    Args:
        cluster: The cluster to go by, with the engines that there are to be; None: there is none.
        scale: The number of engines, and who leaves.
        stored: The plan that is stored by now.
        models: What was decided about the models; None: there is no spec to go by.
        leaving: Why engines leave with their nodes.
        is_new: Whether this reconcile stored it.
        failures: Why it could not be stored.
    """

    cluster: ServingCluster | None
    scale: ScaleDecision
    stored: StoredPlan
    models: SwitchOutcome | None = None
    leaving: Mapping[EngineId, str] = field(default_factory=dict)
    is_new: bool = False
    failures: tuple[Failure, ...] = ()


async def reconcile_plan(
    kubernetes: Kubernetes,
    own_writes: OwnWrites,
    verdict: SpecVerdict,
    observed: ObservedState,
    reported: ObservedRouters,
    *,
    stored: StoredPlan,
    state: ClusterState,
    notices: NodeNotices,
    now: float,
    wall_s: float,
) -> PlanOutcome:
    """Makes the plan that should be in force, and stores it when it is another one than is stored.

    Args:
        kubernetes: The API server.
        own_writes: Records the write.
        verdict: The spec to go by; without one, the cluster keeps the plan that it has.
        observed: What the API server says.
        reported: What the routers say.
        stored: What is stored.
        state: The cluster's state; its tuner and drain times are updated.
        notices: What nodes announce.
        now: Monotonic seconds.
        wall_s: The time, in seconds since 1970.

    Raises:
        KubernetesError: To be tried again.
    """
    cluster = verdict.cluster
    if cluster is None:
        return PlanOutcome(cluster=None, scale=ScaleDecision(replicas=0), stored=stored)
    cluster = _size(cluster, observed, reported, stored, state)
    models = switch_models(cluster, observed, stored)
    leaving = choose_leaving(
        observed.engines,
        notices,
        replicas=cluster.spec.replicas,
        draining=stored.draining,
        loads=count_loads(reported.reports),
        find_model=models.switch.find_model,
    )
    effective = _tune(cluster, observed, reported, stored, state, leaving=leaving)
    scale = _scale(effective, observed, reported, stored, state=state, leaving=leaving, now=now, wall_s=wall_s)
    outcome = PlanOutcome(cluster=cluster, scale=scale, stored=stored, models=models, leaving=leaving)
    new = _make_plan(effective, verdict, observed, reported, stored=stored, state=state, decided=outcome, models=models)
    if new == stored:
        return outcome
    return await _replace_plan(ChildApplier(kubernetes, cluster, observed.live), own_writes, observed, new, outcome)


def _make_plan(
    effective: ServingCluster,
    verdict: SpecVerdict,
    observed: ObservedState,
    reported: ObservedRouters,
    *,
    stored: StoredPlan,
    state: ClusterState,
    decided: PlanOutcome,
    models: SwitchOutcome,
) -> StoredPlan:
    """Makes what is to be stored, the tuner's sliders and what the models' revisions are resolved to included."""
    plan = make_plan(
        effective,
        stored,
        observed.engines,
        victims=decided.scale.victims | decided.leaving.keys(),
        reports=reported.reports,
        statuses=reported.statuses.values(),
        switch=models.switch,
    )
    return StoredPlan(
        plan=plan,
        generation=plan.generation,
        tuned=state.tuner.stored,
        scale=state.scaler.stored,
        accepted_spec=verdict.accepted_spec,
        switch=models.switch,
        revisions=resolve_revisions(stored.revisions, (*observed.engines, *observed.routers)),
    )


async def _replace_plan(
    applier: ChildApplier,
    own_writes: OwnWrites,
    observed: ObservedState,
    new: StoredPlan,
    outcome: PlanOutcome,
) -> PlanOutcome:
    """Stores a plan in place of another one, and says what became of it."""
    is_stored = await store_plan(applier, _find_config_map(observed), new, own_writes)
    return replace(
        outcome,
        stored=new if is_stored else outcome.stored,
        is_new=is_stored and new.plan != outcome.stored.plan,
        failures=tuple(applier.failures),
    )


def read_stored_plan(observed: ObservedState) -> StoredPlan:
    """Reads what is stored of a cluster."""
    return read_plan(_find_config_map(observed), uid_of(observed.body))


def _find_config_map(observed: ObservedState) -> Object | None:
    return observed.own(CONFIG_MAPS, names.name_plan(observed.body["metadata"]["name"]))


def _size(
    cluster: ServingCluster,
    observed: ObservedState,
    reported: ObservedRouters,
    stored: StoredPlan,
    state: ClusterState,
) -> ServingCluster:
    """Returns the cluster with the engines that there are to be: the spec's, or the scaler's."""
    starts_s = [pod.started_in_s for pod in observed.engines if pod.started_in_s]
    replicas = state.scaler.update(
        ScalerInputs(
            cluster=cluster,
            statuses=list(reported.statuses.values()),
            find_sliders=state.tuner.find_sliders,
            start_s=statistics.median(starts_s) if starts_s else None,
            is_trial=state.tuner.is_on_trial,
            stored=stored.scale,
        )
    )
    return apply_replicas(cluster, replicas)


def _tune(
    cluster: ServingCluster,
    observed: ObservedState,
    reported: ObservedRouters,
    stored: StoredPlan,
    state: ClusterState,
    *,
    leaving: Collection[EngineId],
) -> ServingCluster:
    """Returns the cluster with the sliders that are to be in force: the spec's, or the tuner's."""
    state.tuner_inputs = TunerInputs(
        cluster=cluster,
        statuses=list(reported.statuses.values()),
        counts=state.window.total,
        is_settled=not leaving and is_settled(cluster, observed, stored, reported),
        stored=stored.tuned,
        sized=state.scaler.find_sliders(cluster.spec.replicas),
    )
    effective = state.tuner.update(state.tuner_inputs)
    state.scaler.search_if_due()
    return effective if state.tuner.is_on_trial else _suit_serving(effective, observed, state.scaler, leaving)


def _suit_serving(
    effective: ServingCluster, observed: ObservedState, scaler: Scaler, leaving: Collection[EngineId]
) -> ServingCluster:
    """Returns the cluster with sliders that suit the engines that serve, which carry all the load until others do."""
    replicas = effective.spec.replicas
    serving = [pod for pod in observed.engines if pod.is_serving and pod.engine_id not in leaving]
    if not 0 < len(serving) < replicas:
        return effective
    sliders = scaler.find_sliders(len(serving))
    return apply_sliders(effective, sliders and scale_sliders(sliders, len(serving), replicas))


def _scale(
    cluster: ServingCluster,
    observed: ObservedState,
    reported: ObservedRouters,
    stored: StoredPlan,
    *,
    state: ClusterState,
    leaving: Collection[EngineId],
    now: float,
    wall_s: float,
) -> ScaleDecision:
    """Decides the number of engines, and starts the drain timeout of new victims."""
    deployment = observed.deployment(names.ENGINE)
    limit_s = drain_limit_s(cluster)
    started = find_drain_starts(observed.engines, state.drain_started_s, limit_s=limit_s, now=now, wall_s=wall_s)
    # A router with an older plan says nothing of a drain: the newer plan may have given the engine work in between.
    has_plan = all(status.generation >= stored.generation for status in reported.statuses.values())
    reports = reported.reports.items()
    scale = decide_scale(
        cluster.spec.replicas,
        deployment["spec"]["replicas"] if deployment else None,
        observed.engines,
        roles=stored.roles,
        num_prefill_heavy=resolve_sliders(cluster.spec).num_prefill_heavy,
        reports={name: replace(report, is_drained=report.is_drained and has_plan) for name, report in reports},
        drain_expired=find_expired(started, limit_s=limit_s, now=now),
        leaving=leaving,
    )
    state.drain_started_s = {engine_id: started.get(engine_id, now) for engine_id in scale.victims}
    return scale


def is_settled(cluster: ServingCluster, observed: ObservedState, stored: StoredPlan, reported: ObservedRouters) -> bool:
    """Whether every engine has the newest plan, and none comes or goes: only then are sliders measured or changed."""
    present = [pod for pod in observed.engines if not pod.is_ending]
    return (
        len(present) == cluster.spec.replicas
        and all(pod.is_ready for pod in present)
        and len({pod.model_id for pod in present}) == 1
        and stored.plan is not None
        and has_acknowledged(stored.plan, reported.reports, reported.statuses.values())
    )
