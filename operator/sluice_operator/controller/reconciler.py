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
from sluice_operator.autotune.search_process import Searches
from sluice_operator.autotune.tuner import Circumstances, Tuner
from sluice_operator.controller.events import render_event
from sluice_operator.controller.observation import observe_others, observe_plan
from sluice_operator.controller.preconditions import check_cluster
from sluice_operator.controller.status import degrade, list_transitions, make_patch, render_status, without_measurements
from sluice_operator.controller.status_inputs import Findings
from sluice_operator.kubernetes.interface import CLUSTERS, CONFIG_MAPS, PODS, ForbiddenError, KubernetesError, uid_of
from sluice_operator.kubernetes.own_writes import Echoes
from sluice_operator.planning.plan import StoredPlan, make_plan, read_plan
from sluice_operator.planning.plan_store import store_plan
from sluice_operator.planning.pod_marks import mark_pods
from sluice_operator.planning.scale_down import Scale, decide_scale
from sluice_operator.resources.apply import Children
from sluice_operator.resources.certificates import find_certificate_troubles
from sluice_operator.resources.desired import Facts, key_of, render_children
from sluice_operator.routers.attainment import AttainmentWindow
from sluice_operator.routers.engine_reports import has_taken, merge_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sluice.v1 import control_pb2
    from sluice_core.records import EngineId
    from sluice_operator.api.names import ClusterKey
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.autotune.search_process import Ask
    from sluice_operator.controller.observation import Observed
    from sluice_operator.kubernetes.interface import Kubernetes, Object
    from sluice_operator.resources.pod_status import Trouble
    from sluice_operator.routers.connections import Routers
    from sluice_operator.routers.engine_reports import EngineReport
    from sluice_operator.settings import Settings

logger = logging.getLogger(__name__)

# Measurements are written to the status at most this often (operator.md).
MEASURE_INTERVAL_S = 15.0
# So long may routers take to answer a process that is new.
ACQUAINTANCE_S = 5.0
# A right that was missing or a name that was taken is not watched.
TROUBLE_INTERVAL_S = 30.0
# An engine's own drain ends by then; the routers' reports of it may be late.
DRAIN_MARGIN_S = 5.0
# Routers and engines have taken up a plan by then, or it is worth saying that they have not.
PUT_OFF_S = 0.2
# However fast edits come, children and status are not put off for longer than this.
LONGEST_PUT_OFF_S = 1.0


@dataclass(slots=True)
class Memory:
    """What is kept of a cluster between two looks; only ``Reconciler`` changes it.

    Times are seconds on the operator's monotonic clock: a step of the wall clock moves nothing.
    """

    first_look_s: float
    tuner: Tuner
    uid: str = ""
    drain_started_s: dict[EngineId, float] = field(default_factory=dict)
    measured_s: float = float("-inf")
    window: AttainmentWindow = field(default_factory=AttainmentWindow)
    told: Circumstances | None = None
    put_off_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What was decided about a cluster, and what has come of its plan.

    Args:
        cluster: It, checked; None when it cannot be carried out.
        refusal: Why it cannot.
        statuses: Newest status of each router that answers.
        reports: What routers say of the engines.
        scale: The number of engines.
        stored: The plan that is stored by now.
        is_new: Whether this look has stored it.
        troubles: Why it could not be stored.
    """

    cluster: ServingCluster | None
    refusal: Trouble | None
    statuses: Mapping[str, control_pb2.GetStatusResponse]
    reports: Mapping[EngineId, EngineReport]
    scale: Scale
    stored: StoredPlan
    is_new: bool = False
    troubles: tuple[Trouble, ...] = ()


class Reconciler:
    """Reconciles clusters, one look at a time each.

    Args:
        kubernetes: The API server; writes are fenced by the lease.
        routers: Links to the routers.
        settings: Default images, and where the operator runs.
        now: Monotonic seconds.
        now_text: The time, as Kubernetes writes it.
        wake: Called with a cluster that a look would do something for.
        ask: Answers searches for sliders; None: in processes of their own.
        is_edited: Whether a cluster has changed since the look at it began, and the next one waits for this one's end.
        echoes: Takes note of our writes that need no look when their events come.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        routers: Routers,
        settings: Settings,
        *,
        now: Callable[[], float],
        now_text: Callable[[], str],
        wake: Callable[[ClusterKey], None] | None = None,
        ask: Ask | None = None,
        is_edited: Callable[[ClusterKey], bool] = lambda _: False,
        echoes: Echoes | None = None,
    ) -> None:
        self._kubernetes = kubernetes
        self._routers = routers
        self._settings = settings
        self._now = now
        self._now_text = now_text
        self._wake = wake or (lambda _: None)
        self._ask: Ask = ask or Searches().ask
        self._is_edited = is_edited
        self._echoes = echoes or Echoes()
        self._memories: dict[ClusterKey, Memory] = {}

    def measure(self, key: ClusterKey, status: control_pb2.GetStatusResponse) -> None:
        """Takes a router's counters."""
        memory = self._memories.get(key)
        if memory is None:
            return
        memory.window.take(self._now(), status)

        def tell() -> Circumstances | None:
            statuses = list(self._routers.statuses(key).values())
            told = memory.told
            return None if told is None else replace(told, statuses=statuses, counts=memory.window.total)

        if memory.tuner.is_due(tell):
            self._wake(key)

    def knows(self, key: ClusterKey) -> bool:
        """Whether a cluster existed at the last look."""
        return key in self._memories

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
            self._routers.follow(key, {})
            self._forget(key)
            return None
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid_of(body):
            self._forget(key)
            tuner = Tuner(self._ask, wake=partial(self._wake, key), now=self._now)
            memory = self._memories[key] = Memory(first_look_s=self._now(), tuner=tuner, uid=uid_of(body))
        try:
            return await self._look(key, body, memory)
        except ForbiddenError as error:
            # A read that is denied. The right may come back; until then people should read why nothing happens.
            await self._write_status(key, body, degrade(body, str(error), self._now_text()))
            raise

    async def _look(self, key: ClusterKey, body: Object, memory: Memory) -> float | None:
        observed = await observe_plan(self._kubernetes, key, body)
        reachable = [pod for pod in observed.routers if pod.address and not pod.has_ended]
        addresses = {pod.name: pod.address for pod in reachable}
        # By pod: while TLS is turned on or off, routers of both kinds run.
        self._routers.follow(key, addresses, {pod.name: pod.control_tls for pod in reachable if pod.control_tls})
        course = await self._set_course(key, observed, memory)
        if self._puts_off(key, course, memory):
            return PUT_OFF_S
        observed = await observe_others(self._kubernetes, key, observed)
        found = await self._act(key, observed, course, memory)
        rest_s = memory.first_look_s + ACQUAINTANCE_S - self._now()
        if rest_s > 0 and len(found.statuses) < found.num_routers_ready:
            # A new leader knows nothing of the routers yet; to say so would take back what its predecessor said.
            return rest_s
        if self._puts_off(key, course, memory):
            return PUT_OFF_S
        memory.put_off_s = None
        return self._next_look_s(found, memory, await self._report(key, found, memory))

    def _puts_off(self, key: ClusterKey, course: Course, memory: Memory) -> bool:
        """Whether what is left to do waits for the next look."""
        is_new = course.is_new and bool(course.statuses)
        if not is_new and not self._is_edited(key):
            return False
        if memory.put_off_s is None:
            memory.put_off_s = self._now()
        return self._now() - memory.put_off_s < LONGEST_PUT_OFF_S

    def _forget(self, key: ClusterKey) -> None:
        memory = self._memories.pop(key, None)
        if memory is not None:
            memory.tuner.stop()

    # Decide and act.

    async def _set_course(self, key: ClusterKey, observed: Observed, memory: Memory) -> Course:
        """Decides about a cluster; stores its plan, and pushes it."""
        cluster, refusal = check_cluster(observed.body, self._settings, has_cert_manager=observed.has_cert_manager)
        statuses = self._routers.statuses(key)
        memory.window.keep_routers(status.router_id for status in statuses.values())
        plan_map = observed.own(CONFIG_MAPS, names.name_plan(key.name))
        course = Course(
            cluster=cluster,
            refusal=refusal,
            statuses=statuses,
            reports=merge_reports(statuses.values()),
            scale=Scale(replicas=0),
            stored=read_plan(plan_map, uid_of(observed.body)),
        )
        if cluster is not None:
            course = await self._plan(cluster, observed, course, plan_map, memory)
        if course.stored.plan is not None:
            self._routers.offer(key, course.stored.plan)
        return course

    async def _plan(
        self, cluster: ServingCluster, observed: Observed, course: Course, plan_map: Object | None, memory: Memory
    ) -> Course:
        stored, reports, statuses = course.stored, course.reports, course.statuses
        memory.told = Circumstances(
            cluster=cluster,
            statuses=list(statuses.values()),
            counts=memory.window.total,
            is_settled=_is_settled(cluster, observed, stored, reports, statuses),
            stored=stored.tuned,
        )
        effective = memory.tuner.look(memory.told)
        scale = self._scale(effective, observed, stored, reports, memory)
        plan = make_plan(
            effective,
            stored,
            observed.engines,
            leaving=scale.leaving,
            reports=reports,
            statuses=statuses.values(),
        )
        children = Children(self._kubernetes, cluster, observed.live)
        is_new = plan != stored.plan and await store_plan(children, plan_map, plan, memory.tuner.stored, self._echoes)
        if is_new or plan == stored.plan:
            stored = StoredPlan(plan=plan, generation=plan.generation)
        return replace(course, scale=scale, stored=stored, is_new=is_new, troubles=tuple(children.troubles))

    async def _act(self, key: ClusterKey, observed: Observed, course: Course, memory: Memory) -> Findings:
        """Makes children as they should be."""
        troubles: list[Trouble] = []
        if course.cluster is not None:
            children = Children(self._kubernetes, course.cluster, observed.live)
            await self._converge(course.cluster, observed, course, children)
            troubles = [
                *course.troubles,
                *children.troubles,
                *find_certificate_troubles(list(observed.live.values())),
            ]
        return Findings(
            body=observed.body,
            cluster=course.cluster,
            refusal=course.refusal,
            troubles=tuple(troubles),
            engines=observed.engines,
            routers=observed.routers,
            deployments={
                component: deployment
                for component in (names.ENGINE, names.ROUTER)
                if (deployment := observed.deployment(component))
            },
            scale=course.scale,
            plan=course.stored.plan,
            reports=course.reports,
            statuses=course.statuses,
            refusals=self._routers.refusals(key),
            attainment=memory.window.sum_up(self._now()),
            tuning=memory.tuner.judge() if course.cluster else None,
            recommended=memory.tuner.answer,
        )

    def _scale(
        self,
        cluster: ServingCluster,
        observed: Observed,
        stored: StoredPlan,
        reports: Mapping[EngineId, EngineReport],
        memory: Memory,
    ) -> Scale:
        deployment = observed.deployment(names.ENGINE)
        limit_s = cluster.spec.engine.drain_timeout_seconds + DRAIN_MARGIN_S
        started = memory.drain_started_s
        scale = decide_scale(
            cluster.spec.replicas,
            deployment["spec"]["replicas"] if deployment else None,
            observed.engines,
            roles=stored.roles,
            num_prefill_heavy=resolve_sliders(cluster.spec).num_prefill_heavy,
            reports=reports,
            overdue={engine_id for engine_id, since_s in started.items() if self._now() - since_s >= limit_s},
        )
        memory.drain_started_s = {engine_id: started.get(engine_id, self._now()) for engine_id in scale.leaving}
        return scale

    async def _converge(self, cluster: ServingCluster, observed: Observed, course: Course, children: Children) -> None:
        facts = Facts(engine_replicas=course.scale.replicas, has_monitors=observed.has_monitors, live=observed.live)
        # Marks before replicas: Kubernetes chooses victims at the very moment in which replicas are lowered.
        for patch in mark_pods(observed.engines, course.scale, course.reports):
            await children.attempt(self._mark(observed, patch), f"pod {patch['metadata']['name']}")
        wanted = render_children(cluster, facts, self._settings)
        for child in wanted:
            await children.ensure(child)
        await children.remove_obsolete({key_of(child) for child in wanted})

    async def _mark(self, observed: Observed, patch: Object) -> None:
        name, namespace = patch["metadata"]["name"], observed.body["metadata"]["namespace"]
        answer = await self._kubernetes.patch(PODS, namespace, name, patch)
        if "annotations" not in patch["metadata"]:
            # A role is for people. Who is marked to go first is waited for, and has to be seen.
            self._echoes.note(observed.pods[name], patch, answer)

    # Report.

    async def _report(self, key: ClusterKey, found: Findings, memory: Memory) -> bool:
        """Writes the status if it changed; returns whether measurements wait for their turn."""
        old = found.body.get("status") or {}
        new = render_status(found, self._now_text())
        is_measurement = new != old and without_measurements(new) == without_measurements(old)
        if is_measurement and self._now() - memory.measured_s < MEASURE_INTERVAL_S:
            return True
        if await self._write_status(key, found.body, new):
            memory.measured_s = self._now()
        return False

    async def _write_status(self, key: ClusterKey, body: Object, new: Object) -> bool:
        """Writes a status and tells of its transitions; returns whether anything had changed."""
        old = body.get("status") or {}
        patch = make_patch(old, new)
        if patch:
            guarded = {"metadata": {"uid": uid_of(body)}, "status": patch}
            answer = await self._kubernetes.patch_status(CLUSTERS, key.namespace, key.name, guarded)
            self._echoes.note(body, guarded, answer)
            for condition in list_transitions(old, new):
                await self._tell(body, condition)
        return bool(patch)

    async def _tell(self, body: Object, condition: Object) -> None:
        """Makes an event of a transition; one that is lost is no reason to do anything again."""
        try:
            await self._kubernetes.create(render_event(body, condition, self._settings.identity, self._now_text()))
        except KubernetesError as error:
            logger.warning("an event was not recorded: %s", error)

    def _next_look_s(self, found: Findings, memory: Memory, has_measurements: bool) -> float | None:  # noqa: FBT001
        # What surrounds us may change without a word to us: rights, names, cert-manager.
        is_stuck = found.refusal is not None and found.refusal.reason is Reason.NOT_AVAILABLE
        waits = [TROUBLE_INTERVAL_S] if found.troubles or is_stuck else []
        if has_measurements or found.attainment:
            waits.append(max(0.0, memory.measured_s + MEASURE_INTERVAL_S - self._now()))
        if found.cluster and found.scale.waiting:
            limit_s = found.cluster.spec.engine.drain_timeout_seconds + DRAIN_MARGIN_S
            oldest_s = min(memory.drain_started_s[engine_id] for engine_id in found.scale.waiting)
            waits.append(max(0.0, oldest_s + limit_s - self._now()))
        return min(waits, default=None)


def _is_settled(
    cluster: ServingCluster,
    observed: Observed,
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
        and has_taken(stored.plan, reports, statuses.values())
    )
