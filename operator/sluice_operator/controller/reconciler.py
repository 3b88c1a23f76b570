"""Reconciles one ServingCluster: observe, decide, act, write the status.

The plan first: a slider is in force before any child is looked at. After a new plan, and when the next edit is waiting,
children and status are left to the next look, which comes in a moment: so an edit waits for one short look at most, and
its status is written once, when routers and engines have taken it up.

Every look starts from what the API server and the routers say now; nothing that matters lives in this process only.
A look may therefore end anywhere, and the next one finishes what it began. What is kept between looks is timing: when
an engine began to drain, when measurements were written last, and what routers counted in the last five minutes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.conditions import Reason
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.autotune.search_process import SearchRunner
from sluice_operator.autotune.tuner import Tuner, TunerInputs
from sluice_operator.controller.events import render_event
from sluice_operator.controller.observation import observe_children, observe_plan_inputs
from sluice_operator.controller.preconditions import check_cluster
from sluice_operator.controller.status import (
    list_transitions,
    make_patch,
    render_forbidden_status,
    render_status,
    strip_measurements,
)
from sluice_operator.controller.status_inputs import StatusInputs
from sluice_operator.kubernetes.interface import CLUSTERS, CONFIG_MAPS, PODS, ForbiddenError, KubernetesError, uid_of
from sluice_operator.kubernetes.own_writes import OwnWrites
from sluice_operator.planning.plan import StoredPlan, make_plan, read_plan
from sluice_operator.planning.plan_store import store_plan
from sluice_operator.planning.pod_patches import render_pod_patches
from sluice_operator.planning.scale_down import ScaleDecision, decide_scale
from sluice_operator.resources.apply import ChildApplier
from sluice_operator.resources.certificates import find_certificate_failures
from sluice_operator.resources.desired import RenderInputs, key_of, render_children
from sluice_operator.routers.attainment import AttainmentWindow
from sluice_operator.routers.engine_reports import has_acknowledged, merge_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sluice.v1 import control_pb2
    from sluice_core.records import EngineId
    from sluice_operator.api.names import ClusterKey
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.autotune.search_process import RunSearch
    from sluice_operator.controller.observation import ObservedState
    from sluice_operator.kubernetes.interface import Kubernetes, Object
    from sluice_operator.resources.pod_status import Failure
    from sluice_operator.routers.connections import Routers
    from sluice_operator.routers.engine_reports import EngineReport
    from sluice_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

# Measurements are written to the status at most this often (operator.md).
MEASURE_INTERVAL_S = 15.0
# So long may routers take to answer a process that is new.
ROUTER_GRACE_S = 5.0
# A right that was missing or a name that was taken is not watched.
DEGRADED_REQUEUE_S = 30.0
# An engine's own drain ends by then; the routers' reports of it may be late.
DRAIN_MARGIN_S = 5.0
# Routers and engines have taken up a plan by then, or it is worth saying that they have not.
DEFER_S = 0.2
# However fast edits come, children and status are not put off for longer than this.
MAX_DEFER_S = 1.0


@dataclass(slots=True)
class ClusterState:
    """What is kept of a cluster between two looks; only ``Reconciler`` changes it.

    Times are seconds on the operator's monotonic clock: a step of the wall clock moves nothing.
    """

    first_reconcile_s: float
    tuner: Tuner
    uid: str = ""
    drain_started_s: dict[EngineId, float] = field(default_factory=dict)
    measured_s: float = float("-inf")
    window: AttainmentWindow = field(default_factory=AttainmentWindow)
    tuner_inputs: TunerInputs | None = None
    deferred_since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """What was decided about a cluster, and what has come of its plan.

    Args:
        cluster: It, checked; None when it cannot be carried out.
        refusal: Why it cannot.
        statuses: Newest status of each router that answers.
        reports: What routers say of the engines.
        scale: The number of engines.
        stored: The plan that is stored by now.
        is_new: Whether this look has stored it.
        failures: Why it could not be stored.
    """

    cluster: ServingCluster | None
    refusal: Failure | None
    statuses: Mapping[str, control_pb2.GetStatusResponse]
    reports: Mapping[EngineId, EngineReport]
    scale: ScaleDecision
    stored: StoredPlan
    is_new: bool = False
    failures: tuple[Failure, ...] = ()


class Reconciler:
    """Reconciles clusters, one look at a time each.

    Args:
        kubernetes: The API server; writes are fenced by the lease.
        routers: Links to the routers.
        settings: Default images, and where the operator runs.
        now: Monotonic seconds.
        now_text: The time, as Kubernetes writes it.
        enqueue: Called with a cluster that a look would do something for.
        run_search: Answers searches for sliders; None: in processes of their own.
        is_edited: Whether a cluster has changed since the look at it began, and the next one waits for this one's end.
        own_writes: Takes note of our writes that need no look when their events come.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        routers: Routers,
        settings: OperatorSettings,
        *,
        now: Callable[[], float],
        now_text: Callable[[], str],
        enqueue: Callable[[ClusterKey], None] | None = None,
        run_search: RunSearch | None = None,
        is_edited: Callable[[ClusterKey], bool] = lambda _: False,
        own_writes: OwnWrites | None = None,
    ) -> None:
        self._kubernetes = kubernetes
        self._routers = routers
        self._settings = settings
        self._now = now
        self._now_text = now_text
        self._enqueue = enqueue or (lambda _: None)
        self._run_search: RunSearch = run_search or SearchRunner().run
        self._is_edited = is_edited
        self._own_writes = own_writes or OwnWrites()
        self._states: dict[ClusterKey, ClusterState] = {}

    def record_status(self, key: ClusterKey, status: control_pb2.GetStatusResponse) -> None:
        """Takes a router's counters."""
        state = self._states.get(key)
        if state is None:
            return
        state.window.take(self._now(), status)

        def read_inputs() -> TunerInputs | None:
            statuses = list(self._routers.statuses(key).values())
            tuner_inputs = state.tuner_inputs
            return None if tuner_inputs is None else replace(tuner_inputs, statuses=statuses, counts=state.window.total)

        if state.tuner.needs_update(read_inputs):
            self._enqueue(key)

    def is_known(self, key: ClusterKey) -> bool:
        """Whether a cluster existed at the last look."""
        return key in self._states

    async def reconcile(self, key: ClusterKey) -> float | None:
        """Takes one look at a cluster, and does what follows from it.

        Returns:
            Seconds after which to look again, whatever happens until then; None: when something happens.

        Raises:
            KubernetesError: To be tried again.
        """
        body = await self._kubernetes.get(CLUSTERS, key.namespace, key.name)
        if body is None or "deletionTimestamp" in body["metadata"]:
            # What it owns goes with it, by its owner references.
            self._routers.set_routers(key, {})
            self._forget(key)
            return None
        state = self._states.get(key)
        if state is None or state.uid != uid_of(body):
            self._forget(key)
            tuner = Tuner(self._run_search, enqueue=partial(self._enqueue, key), now=self._now)
            state = self._states[key] = ClusterState(first_reconcile_s=self._now(), tuner=tuner, uid=uid_of(body))
        try:
            return await self._reconcile_existing(key, body, state)
        except ForbiddenError as error:
            # A read that is denied. The right may come back; until then people should read why nothing happens.
            await self._write_status(key, body, render_forbidden_status(body, str(error), self._now_text()))
            raise

    async def _reconcile_existing(self, key: ClusterKey, body: Object, state: ClusterState) -> float | None:
        observed = await observe_plan_inputs(self._kubernetes, key, body)
        reachable = [pod for pod in observed.routers if pod.address and not pod.has_ended]
        addresses = {pod.name: pod.address for pod in reachable}
        # By pod: while TLS is turned on or off, routers of both kinds run.
        self._routers.set_routers(key, addresses, {pod.name: pod.control_tls for pod in reachable if pod.control_tls})
        outcome = await self._reconcile_plan(key, observed, state)
        if self._is_deferred(key, outcome, state):
            return DEFER_S
        observed = await observe_children(self._kubernetes, key, observed)
        inputs = await self._apply(key, observed, outcome, state)
        rest_s = state.first_reconcile_s + ROUTER_GRACE_S - self._now()
        if rest_s > 0 and len(inputs.statuses) < inputs.num_routers_ready:
            # A new leader knows nothing of the routers yet; to say so would take back what its predecessor said.
            return rest_s
        if self._is_deferred(key, outcome, state):
            return DEFER_S
        state.deferred_since_s = None
        return self._compute_requeue_s(inputs, state, await self._update_status(key, inputs, state))

    def _is_deferred(self, key: ClusterKey, outcome: PlanOutcome, state: ClusterState) -> bool:
        """Whether what is left to do waits for the next look."""
        is_new = outcome.is_new and bool(outcome.statuses)
        if not is_new and not self._is_edited(key):
            return False
        if state.deferred_since_s is None:
            state.deferred_since_s = self._now()
        return self._now() - state.deferred_since_s < MAX_DEFER_S

    def _forget(self, key: ClusterKey) -> None:
        state = self._states.pop(key, None)
        if state is not None:
            state.tuner.stop()

    # Decide and act.

    async def _reconcile_plan(self, key: ClusterKey, observed: ObservedState, state: ClusterState) -> PlanOutcome:
        """Decides about a cluster; stores its plan, and pushes it."""
        cluster, refusal = check_cluster(observed.body, self._settings, has_cert_manager=observed.has_cert_manager)
        statuses = self._routers.statuses(key)
        state.window.keep_routers(status.router_id for status in statuses.values())
        plan_map = observed.own(CONFIG_MAPS, names.name_plan(key.name))
        outcome = PlanOutcome(
            cluster=cluster,
            refusal=refusal,
            statuses=statuses,
            reports=merge_reports(statuses.values()),
            scale=ScaleDecision(replicas=0),
            stored=read_plan(plan_map, uid_of(observed.body)),
        )
        if cluster is not None:
            outcome = await self._make_plan(cluster, observed, outcome, plan_map, state)
        if outcome.stored.plan is not None:
            self._routers.set_plan(key, outcome.stored.plan)
        return outcome

    async def _make_plan(
        self,
        cluster: ServingCluster,
        observed: ObservedState,
        outcome: PlanOutcome,
        plan_map: Object | None,
        state: ClusterState,
    ) -> PlanOutcome:
        stored, reports, statuses = outcome.stored, outcome.reports, outcome.statuses
        state.tuner_inputs = TunerInputs(
            cluster=cluster,
            statuses=list(statuses.values()),
            counts=state.window.total,
            is_settled=_is_settled(cluster, observed, stored, reports, statuses),
            stored=stored.tuned,
        )
        effective = state.tuner.update(state.tuner_inputs)
        scale = self._decide_scale(effective, observed, stored, reports, state)
        plan = make_plan(
            effective,
            stored,
            observed.engines,
            victims=scale.victims,
            reports=reports,
            statuses=statuses.values(),
        )
        applier = ChildApplier(self._kubernetes, cluster, observed.live)
        is_new = plan != stored.plan and await store_plan(applier, plan_map, plan, state.tuner.stored, self._own_writes)
        if is_new or plan == stored.plan:
            stored = StoredPlan(plan=plan, generation=plan.generation)
        return replace(outcome, scale=scale, stored=stored, is_new=is_new, failures=tuple(applier.failures))

    async def _apply(
        self, key: ClusterKey, observed: ObservedState, outcome: PlanOutcome, state: ClusterState
    ) -> StatusInputs:
        """Makes children as they should be."""
        failures: list[Failure] = []
        if outcome.cluster is not None:
            applier = ChildApplier(self._kubernetes, outcome.cluster, observed.live)
            await self._apply_children(outcome.cluster, observed, outcome, applier)
            failures = [
                *outcome.failures,
                *applier.failures,
                *find_certificate_failures(list(observed.live.values())),
            ]
        return StatusInputs(
            body=observed.body,
            cluster=outcome.cluster,
            refusal=outcome.refusal,
            failures=tuple(failures),
            engines=observed.engines,
            routers=observed.routers,
            deployments={
                component: deployment
                for component in (names.ENGINE, names.ROUTER)
                if (deployment := observed.deployment(component))
            },
            scale=outcome.scale,
            plan=outcome.stored.plan,
            reports=outcome.reports,
            statuses=outcome.statuses,
            refusals=self._routers.refusals(key),
            attainment=state.window.sum_up(self._now()),
            autotune=state.tuner.describe_status() if outcome.cluster else None,
            recommended=state.tuner.result,
        )

    def _decide_scale(
        self,
        cluster: ServingCluster,
        observed: ObservedState,
        stored: StoredPlan,
        reports: Mapping[EngineId, EngineReport],
        state: ClusterState,
    ) -> ScaleDecision:
        deployment = observed.deployment(names.ENGINE)
        limit_s = cluster.spec.engine.drain_timeout_seconds + DRAIN_MARGIN_S
        started = state.drain_started_s
        scale = decide_scale(
            cluster.spec.replicas,
            deployment["spec"]["replicas"] if deployment else None,
            observed.engines,
            roles=stored.roles,
            num_prefill_heavy=resolve_sliders(cluster.spec).num_prefill_heavy,
            reports=reports,
            drain_expired={engine_id for engine_id, since_s in started.items() if self._now() - since_s >= limit_s},
        )
        state.drain_started_s = {engine_id: started.get(engine_id, self._now()) for engine_id in scale.victims}
        return scale

    async def _apply_children(
        self, cluster: ServingCluster, observed: ObservedState, outcome: PlanOutcome, applier: ChildApplier
    ) -> None:
        render_inputs = RenderInputs(
            engine_replicas=outcome.scale.replicas, has_monitors=observed.has_monitors, live=observed.live
        )
        # Marks before replicas: Kubernetes chooses victims at the very moment in which replicas are lowered.
        for patch in render_pod_patches(observed.engines, outcome.scale, outcome.reports):
            await applier.try_write(self._patch_pod(observed, patch), f"pod {patch['metadata']['name']}")
        wanted = render_children(cluster, render_inputs, self._settings)
        for child in wanted:
            await applier.apply_child(child)
        await applier.prune({key_of(child) for child in wanted})

    async def _patch_pod(self, observed: ObservedState, patch: Object) -> None:
        name, namespace = patch["metadata"]["name"], observed.body["metadata"]["namespace"]
        result = await self._kubernetes.patch(PODS, namespace, name, patch)
        if "annotations" not in patch["metadata"]:
            # A role is for people. Who is marked to go first is waited for, and has to be seen.
            self._own_writes.record(observed.pods[name], patch, result)

    # Report.

    async def _update_status(self, key: ClusterKey, inputs: StatusInputs, state: ClusterState) -> bool:
        """Writes the status if it changed; returns whether measurements wait for their turn."""
        old = inputs.body.get("status") or {}
        new = render_status(inputs, self._now_text())
        is_measurement = new != old and strip_measurements(new) == strip_measurements(old)
        if is_measurement and self._now() - state.measured_s < MEASURE_INTERVAL_S:
            return True
        if await self._write_status(key, inputs.body, new):
            state.measured_s = self._now()
        return False

    async def _write_status(self, key: ClusterKey, body: Object, new: Object) -> bool:
        """Writes a status and tells of its transitions; returns whether anything had changed."""
        old = body.get("status") or {}
        patch = make_patch(old, new)
        if patch:
            guarded = {"metadata": {"uid": uid_of(body)}, "status": patch}
            result = await self._kubernetes.patch_status(CLUSTERS, key.namespace, key.name, guarded)
            self._own_writes.record(body, guarded, result)
            for condition in list_transitions(old, new):
                await self._create_event(body, condition)
        return bool(patch)

    async def _create_event(self, body: Object, condition: Object) -> None:
        """Makes an event of a transition; one that is lost is no reason to do anything again."""
        try:
            await self._kubernetes.create(render_event(body, condition, self._settings.identity, self._now_text()))
        except KubernetesError as error:
            logger.warning("an event was not recorded: %s", error)

    def _compute_requeue_s(self, inputs: StatusInputs, state: ClusterState, has_measurements: bool) -> float | None:  # noqa: FBT001
        # What surrounds us may change without a word to us: rights, names, cert-manager.
        is_stuck = inputs.refusal is not None and inputs.refusal.reason is Reason.NOT_AVAILABLE
        waits = [DEGRADED_REQUEUE_S] if inputs.failures or is_stuck else []
        if has_measurements or inputs.attainment:
            waits.append(max(0.0, state.measured_s + MEASURE_INTERVAL_S - self._now()))
        if inputs.cluster and inputs.scale.undrained:
            limit_s = inputs.cluster.spec.engine.drain_timeout_seconds + DRAIN_MARGIN_S
            oldest_s = min(state.drain_started_s[engine_id] for engine_id in inputs.scale.undrained)
            waits.append(max(0.0, oldest_s + limit_s - self._now()))
        return min(waits, default=None)


def _is_settled(
    cluster: ServingCluster,
    observed: ObservedState,
    stored: StoredPlan,
    reports: Mapping[EngineId, EngineReport],
    statuses: Mapping[str, control_pb2.GetStatusResponse],
) -> bool:
    """Whether every engine has the newest plan, and none comes or goes: only then are sliders measured or changed."""
    present = [pod for pod in observed.engines if not pod.is_ending]
    return (
        len(present) == cluster.spec.replicas
        and all(pod.is_ready for pod in present)
        and stored.plan is not None
        and has_acknowledged(stored.plan, reports, statuses.values())
    )
