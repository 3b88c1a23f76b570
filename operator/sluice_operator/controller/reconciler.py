"""Reconciles one ServingCluster: get, observe, refuse, plan, apply, status.

Each reconcile starts from what the API server and the routers say now. It may end anywhere: the next one finishes what
it began. Only timing and counters are kept in between (``ClusterState``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.labels import UPGRADE_ANNOTATION
from sluice_operator.autoscaling import capacity_process
from sluice_operator.autoscaling.scaler import Scaler
from sluice_operator.autotune.search_process import SearchRunner
from sluice_operator.autotune.tuner import Tuner
from sluice_operator.controller.apply_step import apply_children
from sluice_operator.controller.cluster_state import DEFER_S, ClusterState
from sluice_operator.controller.observation import observe_children, observe_plan_inputs, observe_routers
from sluice_operator.controller.plan_step import read_stored_plan, reconcile_plan
from sluice_operator.controller.preconditions import judge_spec
from sluice_operator.controller.rollout_step import decide_rollout
from sluice_operator.controller.status_inputs import StatusInputs
from sluice_operator.controller.status_step import MEASURE_INTERVAL_S, RecordConditions, StatusWriter
from sluice_operator.kubernetes.errors import ForbiddenError
from sluice_operator.kubernetes.kinds import CLUSTERS
from sluice_operator.kubernetes.objects import uid_of
from sluice_operator.kubernetes.own_writes import OwnWrites
from sluice_operator.planning.expired_drains import drain_limit_s
from sluice_operator.planning.node_notices import NodeNotices
from sluice_operator.planning.rollout_gate import GateDecision
from sluice_operator.planning.upgrades import UPGRADE_ALLOWED, UpgradePlaces
from sluice_operator.resources.default_images import DefaultImages, keep_default_images
from sluice_operator.resources.deployments.deployment_status import is_rolling, is_whole
from sluice_operator.resources.rollout_state import went_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice.v1 import control_pb2
    from sluice_operator.api.condition_types import Failure
    from sluice_operator.api.names import ClusterKey
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.autoscaling.capacity_process import RunCapacitySearch
    from sluice_operator.autotune.search_process import RunSearch
    from sluice_operator.autotune.tuner import TunerInputs
    from sluice_operator.controller.observation import ObservedRouters, ObservedState
    from sluice_operator.controller.plan_step import PlanOutcome
    from sluice_operator.controller.preconditions import SpecVerdict
    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.routers.connection_table import Routers
    from sluice_operator.settings import OperatorSettings

# Routers may take so long to answer a new process.
ROUTER_GRACE_S = 5.0
# Rights, names of foreign objects and cert-manager are not watched; they are checked again this often.
DEGRADED_REQUEUE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildrenOutcome:
    """What became of the children of a cluster.

    Args:
        failures: Why some of them, or the plan, are not as they should be.
        waiting_upgrade: What is said of new default images that wait for their turn; empty: none do.
        rollout: How the roll of the engines goes on.
    """

    failures: tuple[Failure, ...]
    waiting_upgrade: str = ""
    rollout: GateDecision = field(default_factory=lambda: GateDecision(state=None))


class Reconciler:
    """Reconciles clusters; each key is reconciled by one worker at a time.

    Args:
        kubernetes: The API server; writes are fenced by the lease.
        routers: Connections to the routers.
        settings: Default images, and where the operator runs.
        now: Monotonic seconds.
        now_text: The time, as Kubernetes writes it.
        wall_s: The time, in seconds since 1970.
        enqueue: Called with a cluster that needs a reconcile.
        run_search: Runs searches for sliders; None: in processes of their own.
        run_capacity_search: Runs searches for what fleets of several sizes serve; None: the same.
        is_edited: Whether a cluster changed since its present reconcile began, so that the next one is waiting.
        own_writes: Records writes whose events need no reconcile.
        notices: What nodes announce; None: they are not watched.
        record_conditions: Takes the conditions of a cluster, for metrics; none when it is gone.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        routers: Routers,
        settings: OperatorSettings,
        *,
        now: Callable[[], float],
        now_text: Callable[[], str],
        wall_s: Callable[[], float] = time.time,
        enqueue: Callable[[ClusterKey], None] | None = None,
        run_search: RunSearch | None = None,
        run_capacity_search: RunCapacitySearch | None = None,
        is_edited: Callable[[ClusterKey], bool] = lambda _: False,
        own_writes: OwnWrites | None = None,
        notices: NodeNotices | None = None,
        record_conditions: RecordConditions = lambda *_: None,
    ) -> None:
        self._kubernetes = kubernetes
        self._routers = routers
        self._settings = settings
        self._now = now
        self._wall_s = wall_s
        self._enqueue = enqueue or (lambda _: None)
        runner = SearchRunner()
        self._run_search: RunSearch = run_search or runner.run
        self._run_capacity_search: RunCapacitySearch = run_capacity_search or partial(
            capacity_process.run_capacity_search, runner
        )
        self._is_edited = is_edited
        self._own_writes = own_writes or OwnWrites()
        self._notices = notices or NodeNotices()
        self._record_conditions = record_conditions
        self._status = StatusWriter(
            kubernetes,
            self._own_writes,
            settings.identity,
            now=now,
            now_text=now_text,
            record_conditions=record_conditions,
        )
        self._states: dict[ClusterKey, ClusterState] = {}
        self._upgrades = UpgradePlaces(settings.max_concurrent_upgrades, now=now, enqueue=self._enqueue)

    async def reconcile(self, key: ClusterKey) -> float | None:
        """Brings a cluster closer to its spec.

        Returns:
            Seconds until the next reconcile, whatever happens before; None: only an event causes one.

        Raises:
            KubernetesError: To be tried again, with back-off.
        """
        body = await self._kubernetes.get(CLUSTERS, key.namespace, key.name)
        if body is None or "deletionTimestamp" in body["metadata"]:
            # Its children go with it, by their owner references.
            self._routers.set_routers(key, {})
            self._forget(key)
            self._record_conditions(key.namespace, key.name, ())
            return None
        state = self._get_state(key, uid_of(body))
        try:
            return await self._reconcile_existing(key, body, state)
        except ForbiddenError as error:
            # A read is denied. The right may come back; until then the status says why nothing happens.
            await self._status.write_forbidden(key, body, str(error))
            raise

    async def _reconcile_existing(self, key: ClusterKey, body: Object, state: ClusterState) -> float | None:
        observed = await observe_plan_inputs(self._kubernetes, key, body)
        reported = observe_routers(self._routers, key, observed)
        router_ids = {status.router_id for status in reported.statuses.values()}
        state.window.keep_routers(router_ids)
        state.scaler.keep_routers(router_ids)
        state.rolling.outcomes.keep({pod.engine_id for pod in observed.engines}, router_ids)
        stored = read_stored_plan(observed)
        verdict = judge_spec(body, stored.accepted_spec, self._settings, has_cert_manager=observed.has_cert_manager)

        # The plan comes first: a slider is in force before any child is read.
        planned = await reconcile_plan(
            self._kubernetes,
            self._own_writes,
            verdict,
            observed,
            reported,
            stored=stored,
            state=state,
            notices=self._notices,
            now=self._now(),
            wall_s=self._wall_s(),
        )
        verdict = replace(verdict, cluster=planned.cluster)
        if planned.stored.plan is not None:
            self._routers.set_plan(key, planned.stored.plan)
        if self._is_deferred(key, planned, reported, state):
            return DEFER_S

        observed = await observe_children(self._kubernetes, key, observed)
        applied = ChildrenOutcome(failures=planned.failures)
        if verdict.cluster and verdict.may_apply:
            applied = await self._apply(key, verdict.cluster, observed, reported, planned, state=state)
        else:
            self._upgrades.withdraw(key)

        inputs = self._collect_status_inputs(
            key, verdict, observed=observed, reported=reported, planned=planned, applied=applied, state=state
        )
        grace_s = state.first_reconcile_s + ROUTER_GRACE_S - self._now()
        if grace_s > 0 and len(inputs.statuses) < inputs.num_workers_ready:
            # A new leader knows nothing of the routers yet: its status would take back what its predecessor wrote.
            return grace_s
        if self._is_deferred(key, planned, reported, state):
            return DEFER_S
        state.deferred_since_s = None
        has_pending_measurements = await self._status.update(key, inputs, state)
        return self._compute_requeue_s(inputs, state, has_pending_measurements=has_pending_measurements)

    def _is_deferred(
        self, key: ClusterKey, planned: PlanOutcome, reported: ObservedRouters, state: ClusterState
    ) -> bool:
        """Whether children and status are left to the next reconcile, which comes in a moment.

        After a new plan they are, so that the status is written once, when routers and engines have taken the plan.
        While an edit waits they are, so that it waits for a short reconcile only.
        """
        is_waiting_for_routers = planned.is_new and bool(reported.statuses)
        if not is_waiting_for_routers and not self._is_edited(key):
            return False
        return state.defer(self._now())

    def _choose_images(
        self, key: ClusterKey, cluster: ServingCluster, observed: ObservedState
    ) -> tuple[DefaultImages, str]:
        """Returns the default images that a cluster runs now, and what is said of those that wait for their turn."""
        settings = self._settings
        newest = DefaultImages(engine=settings.engine_image, router=settings.router_image)
        deployments = {component: observed.deployment(component) for component in (names.ENGINE, names.ROUTER)}
        kept = keep_default_images(cluster, deployments, newest)
        found = [deployment for deployment in deployments.values() if deployment]
        whole = all(is_whole(deployment) and not went_back(deployment) for deployment in found)
        if kept == newest:
            self._upgrades.note_progress(key, is_rolling=any(map(is_rolling, found)), is_whole=whole)
            return newest, ""
        if cluster.spec.rollout.paused:
            self._upgrades.withdraw(key)
        elif self._upgrades.may_upgrade(key, observed.body, is_whole=whole):
            return newest, ""
        changes = [
            f"{old} to {new}" for old, new in ((kept.engine, newest.engine), (kept.router, newest.router)) if old != new
        ]
        limit = settings.max_concurrent_upgrades
        return kept, (
            f"an upgrade waits, of {' and '.join(changes)}: {limit} clusters upgrade at once, those whose pods do "
            "not all serve come last, and one whose rollout is paused does not; annotate this one with "
            f"{UPGRADE_ANNOTATION}={UPGRADE_ALLOWED} to begin now"
        )

    async def _apply(
        self,
        key: ClusterKey,
        cluster: ServingCluster,
        observed: ObservedState,
        reported: ObservedRouters,
        planned: PlanOutcome,
        *,
        state: ClusterState,
    ) -> ChildrenOutcome:
        """Decides the images and how a roll goes on, then applies the children."""
        images, waiting_upgrade = self._choose_images(key, cluster, observed)
        rollout = decide_rollout(
            cluster,
            observed.deployment(names.ENGINE),
            observed,
            reported,
            state,
            default_image=images.engine,
            is_before_switch=planned.models is not None and planned.models.is_before,
            now=self._now(),
            wall_s=self._wall_s(),
        )
        failures = await apply_children(
            self._kubernetes,
            self._own_writes,
            cluster,
            observed,
            settings=self._settings.model_copy(update={"engine_image": images.engine, "router_image": images.router}),
            reported=reported,
            planned=planned,
            rollout=rollout,
            wall_s=self._wall_s(),
        )
        return ChildrenOutcome(
            failures=(*planned.failures, *failures), waiting_upgrade=waiting_upgrade, rollout=rollout
        )

    def _collect_status_inputs(
        self,
        key: ClusterKey,
        verdict: SpecVerdict,
        *,
        observed: ObservedState,
        reported: ObservedRouters,
        planned: PlanOutcome,
        applied: ChildrenOutcome,
        state: ClusterState,
    ) -> StatusInputs:
        deployments = {component: observed.deployment(component) for component in (names.ENGINE, names.ROUTER)}
        return StatusInputs(
            body=observed.body,
            cluster=verdict.cluster,
            refusal=verdict.refusal,
            failures=applied.failures,
            engines=observed.engines,
            routers=observed.routers,
            deployments={component: found for component, found in deployments.items() if found},
            scale=planned.scale,
            leaving=planned.leaving,
            plan=planned.stored.plan,
            reports=reported.reports,
            statuses=reported.statuses,
            refusals=self._routers.refusals(key),
            attainment=state.window.sum_up(self._now()),
            autotune=state.tuner.describe_status() if verdict.cluster else None,
            recommended=state.tuner.result,
            autoscale=state.scaler.describe_status() if verdict.cluster else None,
            wanted=state.scaler.stored,
            waiting_upgrade=applied.waiting_upgrade,
            rollout=applied.rollout,
            switching=planned.models.describe() if planned.models else "",
            runbook_url=self._settings.runbook_url,
        )

    def _compute_requeue_s(
        self, inputs: StatusInputs, state: ClusterState, *, has_pending_measurements: bool
    ) -> float | None:
        waits = []
        # Rights, foreign objects and cert-manager may change without an event for us.
        is_stuck = inputs.refusal is not None and inputs.refusal.reason is Reason.NOT_AVAILABLE
        if inputs.failures or is_stuck:
            waits.append(DEGRADED_REQUEUE_S)
        if inputs.waiting_upgrade and self._upgrades.settles_in_s():
            waits.append(self._upgrades.settles_in_s())
        if inputs.rollout.wake_in_s is not None:
            waits.append(inputs.rollout.wake_in_s)
        if has_pending_measurements or inputs.attainment:
            waits.append(max(0.0, state.measured_s + MEASURE_INTERVAL_S - self._now()))
        if inputs.cluster and inputs.scale.undrained:
            oldest_s = min(state.drain_started_s[engine_id] for engine_id in inputs.scale.undrained)
            left_s = oldest_s + drain_limit_s(inputs.cluster) - self._now()
            # One whose time is over goes with the event of its mark, unless that cannot be written.
            waits.append(left_s if left_s > 0 else DEGRADED_REQUEUE_S)
        return min(waits, default=None)

    # State between reconciles.

    def record_status(self, key: ClusterKey, status: control_pb2.GetStatusResponse) -> None:
        """Records a router's counters, and enqueues the cluster when its tuner would decide something."""
        state = self._states.get(key)
        if state is None:
            return
        state.window.take(self._now(), status)
        state.rolling.outcomes.take(status)
        state.scaler.take(status)

        def read_inputs() -> TunerInputs | None:
            if state.tuner_inputs is None:
                return None
            statuses = list(self._routers.statuses(key).values())
            return replace(state.tuner_inputs, statuses=statuses, counts=state.window.total)

        needs_size = state.scaler.watch(list(self._routers.statuses(key).values()))
        if state.tuner.needs_update(read_inputs) or needs_size:
            self._enqueue(key)

    def is_known(self, key: ClusterKey) -> bool:
        """Whether a cluster existed at its last reconcile."""
        return key in self._states

    def _get_state(self, key: ClusterKey, uid: str) -> ClusterState:
        state = self._states.get(key)
        if state is None or state.uid != uid:
            self._forget(key)
            wake = partial(self._enqueue, key)
            tuner = Tuner(self._run_search, enqueue=wake, now=self._now, wall_s=self._wall_s)
            scaler = Scaler(self._run_capacity_search, enqueue=wake, now=self._now)
            state = self._states[key] = ClusterState(first_reconcile_s=self._now(), tuner=tuner, scaler=scaler, uid=uid)
        return state

    def _forget(self, key: ClusterKey) -> None:
        state = self._states.pop(key, None)
        if state is not None:
            state.tuner.stop()
            state.scaler.stop()
        self._upgrades.forget(key)
