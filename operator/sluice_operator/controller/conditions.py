"""Decides the conditions of a ServingCluster. Messages name the object concerned.

A message stays the same while its cause does: each change of one is a write of the status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_core.slo_attainment import SloCounts
from sluice_operator.api import names
from sluice_operator.api.condition_types import REASONS, ConditionType, Failure, Reason
from sluice_operator.api.runbook_links import link_runbook, refer_to_runbook
from sluice_operator.routers.engine_reports import find_refused_engines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice.v1 import plan_pb2
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.controller.status_inputs import StatusInputs
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.resources.pods.pod_status import Pod
    from sluice_operator.resources.rollout_state import RolloutState

# The CRD's own limit.
MAX_MESSAGE_CHARACTERS = 4096
# Its changes are measurements, which make no event.
MEASURED_CONDITION = ConditionType.SLO_MET
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
class Condition:
    """One statement.

    Args:
        type: The condition.
        is_true: Whether it is so; None: unknown.
        reason: Why, in one word.
        message: The object concerned, what is wrong with it, what to do.
    """

    type: ConditionType
    is_true: bool | None
    reason: Reason
    message: str

    def __post_init__(self) -> None:
        assert self.reason in REASONS[self.type], f"{self.reason} is no reason of {self.type}"

    @property
    def status(self) -> str:
        """Kubernetes' word for it."""
        return "Unknown" if self.is_true is None else str(self.is_true)


def decide_conditions(inputs: StatusInputs) -> list[Condition]:
    """Decides every condition."""
    return [
        _decide_ready(inputs),
        _decide_progressing(inputs),
        _decide_degraded(inputs),
        _decide_spec_valid(inputs),
        _decide_engines_ready(inputs),
        _decide_pods_ready(ConditionType.ROUTER_READY, inputs.routers, _wanted(inputs, names.ROUTER), "routers"),
        _decide_network(inputs),
        _decide_slo(inputs),
        _decide_autotuned(inputs),
        _decide_autoscaled(inputs),
    ]


def _wanted(inputs: StatusInputs, component: str) -> int:
    if inputs.cluster is None:
        pods = inputs.engines if component == names.ENGINE else inputs.routers
        return sum(pod.is_present for pod in pods)
    spec = inputs.cluster.spec
    return spec.replicas if component == names.ENGINE else spec.router.replicas


def _wants_none(inputs: StatusInputs) -> bool:
    """Whether autoscaling has taken the last engine away."""
    return inputs.cluster is not None and not inputs.cluster.spec.replicas


def _decide_ready(inputs: StatusInputs) -> Condition:
    def condition(*, is_true: bool, reason: Reason, message: str) -> Condition:
        return Condition(type=ConditionType.READY, is_true=is_true, reason=reason, message=message)

    if _wants_none(inputs) and not inputs.num_engines_ready and inputs.num_routers_ready:
        message = "no engine runs; routers hold what arrives until one has started"
        return condition(is_true=True, reason=Reason.IDLE, message=message)
    if inputs.num_engines_ready and inputs.num_routers_ready:
        return condition(is_true=True, reason=Reason.SERVING, message="requests are served")
    if inputs.refusal and not inputs.engines:
        return condition(is_true=False, reason=Reason.SPEC_INVALID, message=inputs.refusal.message)
    old = (inputs.body.get("status") or {}).get("conditions", [])
    was_ready = next((item for item in old if item["type"] == ConditionType.READY), None)
    if was_ready is None or was_ready["reason"] in (Reason.STARTING, Reason.SPEC_INVALID):
        return condition(is_true=False, reason=Reason.STARTING, message="the first engine and router are starting")
    if not inputs.num_engines_ready:
        return condition(is_true=False, reason=Reason.ENGINES_NOT_READY, message="no engine is ready; see EnginesReady")
    return condition(is_true=False, reason=Reason.ROUTER_NOT_READY, message="no router is ready; see RouterReady")


def _decide_progressing(inputs: StatusInputs) -> Condition:
    is_true, reason, message = _describe_progress(inputs)
    return Condition(type=ConditionType.PROGRESSING, is_true=is_true, reason=reason, message=message)


def _describe_progress(inputs: StatusInputs) -> tuple[bool, Reason, str]:  # noqa: PLR0911 - one line per reason
    if inputs.cluster is None:
        return False, Reason.SETTLED, "nothing changes until the spec can be carried out; see SpecValid"
    rolling = [component for component in (names.ENGINE, names.ROUTER) if inputs.is_rolling(component)]
    blockers = [failure for failure in inputs.pod_failures if failure.reason in ROLLOUT_FAILURES]
    if rolling and blockers:
        advice = "the other pods keep serving; revert the spec or fix it"
        return False, Reason.ROLLOUT_STOPPED, f"{blockers[0].message}; {advice}"
    if drains := _describe_drains(inputs):
        return True, Reason.DRAINING, drains
    if (not inputs.num_engines_ready and not _wants_none(inputs)) or not inputs.num_routers_ready:
        return True, Reason.STARTING, "waits for the first engine and router"
    if found := _describe_rollout(rolling, inputs.cluster, inputs.rollout.state):
        is_true, reason, message = found
        return is_true, reason, f"{message}; {inputs.switching}" if inputs.switching else message
    if inputs.switching:
        return True, Reason.ROLLING_OUT, inputs.switching
    wanted = {names.ENGINE: inputs.num_engines_ready, names.ROUTER: inputs.num_routers_ready}
    missing = [
        f"{_wanted(inputs, name)} {name}s wanted, {count} ready"
        for name, count in wanted.items()
        if count != _wanted(inputs, name)
    ]
    if missing:
        return True, Reason.SCALING, "; ".join(missing)
    late, slow = _count_late(inputs, inputs.plan) if inputs.plan else (0, 0)
    if late or slow:
        return True, Reason.APPLYING_PLAN, f"waits for {late} routers and {slow} engines to take the plan"
    if inputs.waiting_upgrade:
        return False, Reason.UPGRADE_WAITING, inputs.waiting_upgrade
    accepted_last = " that was accepted last; see SpecValid" if inputs.refusal else ""
    return False, Reason.SETTLED, f"everything matches the spec{accepted_last}"


def _describe_drains(inputs: StatusInputs) -> str:
    """Describes which engines hand their work over, and why; empty: none does."""
    if inputs.scale.undrained:
        return f"{len(inputs.scale.undrained)} engines hand over their work before they are removed"
    reasons = sorted(set(inputs.leaving.values()))
    return f"{len(inputs.leaving)} engines have no new work until their pods end: {reasons[0]}" if reasons else ""


def _describe_rollout(
    rolling: Sequence[str], cluster: ServingCluster, roll: RolloutState | None
) -> tuple[bool, Reason, str] | None:
    """Describes how engines and routers are replaced; None: they are not."""
    if rolling == [names.ENGINE] and cluster.spec.rollout.paused:
        message = "engines of two templates serve; set rollout.paused to false to replace the old ones"
        return False, Reason.ROLLOUT_PAUSED, message
    if rolling or (roll is not None and not roll.failure):
        return True, Reason.ROLLING_OUT, _describe_roll(rolling, cluster, roll)
    return None if roll is None else (False, Reason.ROLLED_BACK, describe_failed_roll(roll))


def describe_failed_roll(roll: RolloutState) -> str:
    """Says why a roll went back, and what to do."""
    advice = "edit the spec, or take rollout.gate away to roll all the same"
    return f"the engines that served before are back: {roll.failure}; {advice}; {refer_to_runbook(Reason.ROLLED_BACK)}"


def _describe_roll(rolling: Sequence[str], cluster: ServingCluster, roll: RolloutState | None) -> str:
    rollout, text = cluster.spec.rollout, f"{' and '.join(rolling or [names.ENGINE])} pods are replaced"
    if roll is not None and roll.failure:
        return f"{text}, back to those that served before: {roll.failure}"
    if roll is not None:
        text += f"; rollout.gate let {roll.num_passed} of {cluster.spec.replicas} engines pass"
        text += f", {roll.num_unmeasured} batches without enough requests to judge" if roll.num_unmeasured else ""
    if names.ENGINE not in rolling:
        return text
    text += f" (rollout.maxUnavailable {rollout.max_unavailable}, rollout.maxSurge {rollout.max_surge})"
    if cluster.spec.replicas == 1 and rollout.max_surge in (0, "0%"):
        return f"{text}; the only engine does not serve meanwhile, a surge of 1 would keep the old one until then"
    return text


def _count_late(inputs: StatusInputs, plan: plan_pb2.Plan) -> tuple[int, int]:
    """Routers and engines that have not taken the plan yet."""
    named = {engine.engine_id for engine in plan.engines}
    in_force = sum(status.generation >= plan.generation for status in inputs.statuses.values())
    routers = max(0, inputs.num_workers_ready - in_force)
    engines = sum(
        report.acknowledged_generation < plan.generation
        for engine_id, report in inputs.reports.items()
        if engine_id in named
    )
    return routers, engines


def _decide_degraded(inputs: StatusInputs) -> Condition:
    failure = next(iter(_list_failures(inputs)), None)
    if failure is None:
        return Condition(
            type=ConditionType.DEGRADED, is_true=False, reason=Reason.AS_EXPECTED, message="nothing needs attention"
        )
    # A failed preflight has a condition of its own; here it is one fault of an engine's among others.
    reason = Reason.ENGINE_FAULT if failure.reason is Reason.PREFLIGHT_FAILED else failure.reason
    return Condition(type=ConditionType.DEGRADED, is_true=True, reason=reason, message=failure.message)


def _list_failures(inputs: StatusInputs) -> list[Failure]:
    refused = [
        Failure(reason=Reason.PLAN_REFUSED, message=f"router {name} refused the plan: {error}")
        for name, error in sorted(inputs.refusals.items())
    ]
    refused_engines = [
        Failure(reason=Reason.ENGINE_FAULT, message=line) for line in find_refused_engines(dict(inputs.statuses))
    ]
    invalid = []
    if inputs.refusal:
        stays = "the spec that was accepted last stays in force" if inputs.cluster else "nothing is changed"
        invalid = [Failure(reason=Reason.SPEC_INVALID, message=f"{stays}; see SpecValid: {inputs.refusal.message}")]
    roll = inputs.rollout.state
    failed_roll = []
    if roll is not None and roll.failure:
        failed_roll = [Failure(reason=Reason.ROLLED_BACK, message=describe_failed_roll(roll))]
    return [
        *invalid,
        *failed_roll,
        *inputs.failures,
        *inputs.find_deployment_failures(),
        *inputs.pod_failures,
        *refused,
        *refused_engines,
    ]


def _decide_spec_valid(inputs: StatusInputs) -> Condition:
    if inputs.refusal is None:
        return Condition(
            type=ConditionType.SPEC_VALID, is_true=True, reason=Reason.VALID, message="the spec can be carried out"
        )
    return Condition(
        type=ConditionType.SPEC_VALID, is_true=False, reason=inputs.refusal.reason, message=inputs.refusal.message
    )


def _decide_engines_ready(inputs: StatusInputs) -> Condition:
    if _wants_none(inputs) and not inputs.num_engines_ready:
        return Condition(
            type=ConditionType.ENGINES_READY, is_true=True, reason=Reason.ALL_READY, message="no engine is wanted"
        )
    return _decide_pods_ready(ConditionType.ENGINES_READY, inputs.engines, _wanted(inputs, names.ENGINE), "engines")


def _decide_pods_ready(condition_type: ConditionType, pods: Sequence[Pod], wanted: int, what: str) -> Condition:
    num_ready = sum(pod.is_serving for pod in pods)
    if num_ready == 0:
        reason = Reason.NONE_READY
    elif num_ready < wanted:
        reason = Reason.SOME_NOT_READY
    else:
        return Condition(type=condition_type, is_true=True, reason=Reason.ALL_READY, message=f"all {what} are ready")
    waiting = sorted(pod.name for pod in pods if not pod.is_ready and pod.is_present)
    hint = f"; see pod {waiting[0]}" if waiting else ""
    return Condition(
        type=condition_type, is_true=False, reason=reason, message=f"{num_ready} of {wanted} {what} are ready{hint}"
    )


def _decide_network(inputs: StatusInputs) -> Condition:
    def condition(reason: Reason, message: str, *, is_true: bool | None) -> Condition:
        return Condition(type=ConditionType.NETWORK_READY, is_true=is_true, reason=reason, message=message)

    failed = next((item for item in inputs.pod_failures if item.reason is Reason.PREFLIGHT_FAILED), None)
    if failed:
        return condition(Reason.PREFLIGHT_FAILED, failed.message, is_true=False)
    if not inputs.reports:
        return condition(Reason.NO_REPORT, "no engine has reported its KV transport", is_true=None)
    if (inputs.body["spec"].get("network") or {}).get("mode", "TCP") == "TCP":
        return condition(Reason.TCP, "KV is transferred over TCP, as specified", is_true=True)
    transports = {engine: report.transport for engine, report in inputs.reports.items() if report.transport}
    if not transports:
        return condition(Reason.NO_REPORT, "no engine has used its KV transport yet", is_true=None)
    fallen = sorted((str(engine), transport) for engine, transport in transports.items() if is_tcp(transport))
    if fallen:
        (engine, transport), more = fallen[0], len(fallen) - 1
        message = f"engine {engine} and {more} more transfer KV over {transport}; check the devices of its pod"
        return condition(Reason.RDMA_FALLBACK, message, is_true=False)
    return condition(Reason.RDMA, "KV is transferred over RDMA, as specified", is_true=True)


def is_tcp(transport: str) -> bool:
    """Whether a transport that an engine reported is TCP."""
    return "tcp" in transport.lower()


def _decide_slo(inputs: StatusInputs) -> Condition:
    def condition(reason: Reason, message: str, *, is_true: bool | None) -> Condition:
        return Condition(type=ConditionType.SLO_MET, is_true=is_true, reason=reason, message=message)

    total = sum(inputs.attainment.values(), SloCounts())
    if inputs.plan is None or not inputs.statuses:
        return condition(Reason.NO_REPORT, "no router answers", is_true=None)
    wanted = inputs.plan.attainment_percent
    if total.num_finished == 0:
        return condition(Reason.NO_TRAFFIC, "no request finished in the last five minutes", is_true=None)
    if total.num_met_both * 100 >= wanted * total.num_finished:
        return condition(Reason.MET, f"at least {wanted}% of the requests meet their objectives", is_true=True)
    return condition(Reason.MISSED, f"fewer than {wanted}% of the requests meet their objectives", is_true=False)


def _decide_autotuned(inputs: StatusInputs) -> Condition:
    autotune = inputs.autotune
    if autotune is not None:
        return Condition(
            type=ConditionType.AUTOTUNED, is_true=autotune.is_true, reason=autotune.reason, message=autotune.message
        )
    # Read as it is written: the spec was refused as a whole.
    if (inputs.body["spec"].get("autotune") or {}).get("mode", "Off") in ("Disabled", "Off"):
        return Condition(type=ConditionType.AUTOTUNED, is_true=False, reason=Reason.OFF, message="autotune is off")
    message = "no search runs until the spec can be carried out; see SpecValid"
    return Condition(type=ConditionType.AUTOTUNED, is_true=False, reason=Reason.SPEC_INVALID, message=message)


def _decide_autoscaled(inputs: StatusInputs) -> Condition:
    def condition(reason: Reason, message: str, *, is_true: bool = False) -> Condition:
        return Condition(type=ConditionType.AUTOSCALED, is_true=is_true, reason=reason, message=message)

    scale = inputs.autoscale
    if scale is not None:
        return condition(scale.reason, scale.message, is_true=scale.is_true)
    # Read as it is written: the spec was refused as a whole.
    if (inputs.body["spec"].get("autoscaling") or {}).get("mode", "Disabled") == "Disabled":
        return condition(Reason.OFF, "autoscaling is disabled")
    return condition(
        Reason.SPEC_INVALID, "the number of engines stays until the spec can be carried out; see SpecValid"
    )


def render_condition(
    condition: Condition, old: Object, generation: int, now_text: str, runbook_url: str = ""
) -> Object:
    """Renders a condition for the status; its transition time changes only when its status does.

    Args:
        condition: The condition.
        old: The status before.
        generation: The generation of the spec that was observed.
        now_text: The time, as Kubernetes writes it.
        runbook_url: Address of the runbook; empty: there is none.
    """
    before = next((item for item in old.get("conditions", []) if item["type"] == condition.type), None)
    is_same = before is not None and before["status"] == condition.status
    return {
        "type": str(condition.type),
        "status": condition.status,
        "observedGeneration": generation,
        "lastTransitionTime": before["lastTransitionTime"] if before and is_same else now_text,
        "reason": str(condition.reason),
        "message": link_runbook(condition.message, runbook_url)[:MAX_MESSAGE_CHARACTERS],
    }
