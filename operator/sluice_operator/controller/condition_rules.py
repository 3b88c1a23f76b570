"""Decides the conditions of a ServingCluster from what one look found. Messages name the object to look at.

A message says the same as long as the matter is the same: each change of one is a write of the status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.conditions import REASONS, ConditionType, Reason
from sluice_operator.controller.status_inputs import ROLLOUT_TROUBLES
from sluice_operator.resources.pod_status import Trouble
from sluice_operator.routers.attainment import Counts
from sluice_operator.routers.engine_reports import find_refused_engines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice.v1 import plan_pb2
    from sluice_operator.controller.status_inputs import Findings
    from sluice_operator.resources.pod_status import Pod

# The CRD's own limit.
MAX_MESSAGE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One statement.

    Args:
        subject: What it is about.
        is_true: Whether it is so; None: unknown.
        reason: Why, in one word.
        message: The object to look at, what is wrong with it, what to do.
    """

    subject: ConditionType
    is_true: bool | None
    reason: Reason
    message: str

    def __post_init__(self) -> None:
        assert self.reason in REASONS[self.subject], f"{self.reason} is no reason of {self.subject}"

    @property
    def status(self) -> str:
        """Kubernetes' word for it."""
        return "Unknown" if self.is_true is None else str(self.is_true)


def decide_conditions(found: Findings) -> list[Condition]:
    """Decides every condition."""
    return [
        _decide_ready(found),
        _decide_progressing(found),
        _decide_degraded(found),
        _decide_spec_valid(found),
        _decide_pods_ready(ConditionType.ENGINES_READY, found.engines, _wanted(found, names.ENGINE), "engines"),
        _decide_pods_ready(ConditionType.ROUTER_READY, found.routers, _wanted(found, names.ROUTER), "routers"),
        _decide_network(found),
        _decide_slo(found),
        _decide_autotuned(found),
    ]


def _wanted(found: Findings, component: str) -> int:
    if found.cluster is None:
        pods = found.engines if component == names.ENGINE else found.routers
        return sum(pod.is_present for pod in pods)
    spec = found.cluster.spec
    return spec.replicas if component == names.ENGINE else spec.router.replicas


def _decide_ready(found: Findings) -> Condition:
    def say(*, is_true: bool, reason: Reason, message: str) -> Condition:
        return Condition(subject=ConditionType.READY, is_true=is_true, reason=reason, message=message)

    if found.num_engines_ready and found.num_routers_ready:
        return say(is_true=True, reason=Reason.SERVING, message="requests are served")
    if found.refusal and not found.engines:
        return say(is_true=False, reason=Reason.SPEC_INVALID, message=found.refusal.message)
    old = (found.body.get("status") or {}).get("conditions", [])
    was_ready = next((item for item in old if item["type"] == ConditionType.READY), None)
    if was_ready is None or was_ready["reason"] in (Reason.STARTING, Reason.SPEC_INVALID):
        return say(is_true=False, reason=Reason.STARTING, message="the first engine and router are on their way")
    if not found.num_engines_ready:
        return say(is_true=False, reason=Reason.ENGINES_NOT_READY, message="no engine is ready; see EnginesReady")
    return say(is_true=False, reason=Reason.ROUTER_NOT_READY, message="no router is ready; see RouterReady")


def _decide_progressing(found: Findings) -> Condition:
    is_true, reason, message = _describe_progress(found)
    return Condition(subject=ConditionType.PROGRESSING, is_true=is_true, reason=reason, message=message)


def _describe_progress(found: Findings) -> tuple[bool, Reason, str]:  # noqa: PLR0911 - one line per reason
    if found.cluster is None:
        return False, Reason.SETTLED, "nothing changes until the spec can be carried out; see SpecValid"
    rolling = [component for component in (names.ENGINE, names.ROUTER) if found.is_rolling(component)]
    stoppers = [trouble for trouble in found.pod_troubles if trouble.reason in ROLLOUT_TROUBLES]
    if rolling and stoppers:
        advice = "the other pods serve on; edit the spec back, or repair it"
        return False, Reason.ROLLOUT_STOPPED, f"{stoppers[0].message}; {advice}"
    if found.scale.waiting:
        return True, Reason.DRAINING, f"{len(found.scale.waiting)} engines hand their work over before they go"
    if not found.num_engines_ready or not found.num_routers_ready:
        return True, Reason.STARTING, "waits for the first engine and router"
    if rolling:
        return True, Reason.ROLLING_OUT, f"{' and '.join(rolling)} pods are replaced one at a time"
    wanted = {names.ENGINE: found.num_engines_ready, names.ROUTER: found.num_routers_ready}
    missing = [
        f"{_wanted(found, name)} {name}s wanted, {count} ready"
        for name, count in wanted.items()
        if count != _wanted(found, name)
    ]
    if missing:
        return True, Reason.SCALING, "; ".join(missing)
    late, slow = _count_late(found, found.plan) if found.plan else (0, 0)
    if late or slow:
        return True, Reason.APPLYING_PLAN, f"waits for {late} routers and {slow} engines to take the plan"
    return False, Reason.SETTLED, "everything is as the spec asks for"


def _count_late(found: Findings, plan: plan_pb2.Plan) -> tuple[int, int]:
    """Routers and engines that have not taken the plan yet."""
    named = {engine.engine_id for engine in plan.engines}
    in_force = sum(status.generation >= plan.generation for status in found.statuses.values())
    routers = max(0, found.num_routers_ready - in_force)
    engines = sum(
        report.acknowledged_generation < plan.generation
        for engine_id, report in found.reports.items()
        if engine_id in named
    )
    return routers, engines


def _decide_degraded(found: Findings) -> Condition:
    trouble = next(iter(_list_troubles(found)), None)
    if trouble is None:
        return Condition(
            subject=ConditionType.DEGRADED, is_true=False, reason=Reason.AS_EXPECTED, message="nothing needs a look"
        )
    # A failed preflight has a condition of its own; here it is one fault of an engine's among others.
    reason = Reason.ENGINE_FAULT if trouble.reason is Reason.PREFLIGHT_FAILED else trouble.reason
    return Condition(subject=ConditionType.DEGRADED, is_true=True, reason=reason, message=trouble.message)


def _list_troubles(found: Findings) -> list[Trouble]:
    refused = [
        Trouble(reason=Reason.PLAN_REFUSED, message=f"router {name} refused the plan: {error}")
        for name, error in sorted(found.refusals.items())
    ]
    strangers = [
        Trouble(reason=Reason.ENGINE_FAULT, message=line) for line in find_refused_engines(dict(found.statuses))
    ]
    return [*found.troubles, *found.find_deployment_troubles(), *found.pod_troubles, *refused, *strangers]


def _decide_spec_valid(found: Findings) -> Condition:
    if found.refusal is None:
        return Condition(
            subject=ConditionType.SPEC_VALID, is_true=True, reason=Reason.VALID, message="the spec can be carried out"
        )
    return Condition(
        subject=ConditionType.SPEC_VALID, is_true=False, reason=found.refusal.reason, message=found.refusal.message
    )


def _decide_pods_ready(subject: ConditionType, pods: Sequence[Pod], wanted: int, what: str) -> Condition:
    num_ready = sum(pod.is_ready and pod.is_present for pod in pods)
    if num_ready == 0:
        reason = Reason.NONE_READY
    elif num_ready < wanted:
        reason = Reason.SOME_NOT_READY
    else:
        return Condition(subject=subject, is_true=True, reason=Reason.ALL_READY, message=f"all {what} are ready")
    waiting = sorted(pod.name for pod in pods if not pod.is_ready and pod.is_present)
    look = f"; look at pod {waiting[0]}" if waiting else ""
    return Condition(
        subject=subject, is_true=False, reason=reason, message=f"{num_ready} of {wanted} {what} are ready{look}"
    )


def _decide_network(found: Findings) -> Condition:
    def say(reason: Reason, message: str, *, is_true: bool | None) -> Condition:
        return Condition(subject=ConditionType.NETWORK_READY, is_true=is_true, reason=reason, message=message)

    failed = next((item for item in found.pod_troubles if item.reason is Reason.PREFLIGHT_FAILED), None)
    if failed:
        return say(Reason.PREFLIGHT_FAILED, failed.message, is_true=False)
    if not found.reports:
        return say(Reason.NO_REPORT, "no engine has reported how its KV goes", is_true=None)
    if (found.body["spec"].get("network") or {}).get("mode", "TCP") == "TCP":
        return say(Reason.TCP, "KV goes over TCP, as the spec asks for", is_true=True)
    transports = {engine: report.transport for engine, report in found.reports.items() if report.transport}
    if not transports:
        return say(Reason.NO_REPORT, "no engine knows yet how its KV goes", is_true=None)
    fallen = sorted((str(engine), transport) for engine, transport in transports.items() if is_tcp(transport))
    if fallen:
        (engine, transport), more = fallen[0], len(fallen) - 1
        message = f"KV of engine {engine} and {more} more goes over {transport}; look at its pod's devices"
        return say(Reason.RDMA_FALLBACK, message, is_true=False)
    return say(Reason.RDMA, "KV goes over RDMA, as the spec asks for", is_true=True)


def is_tcp(transport: str) -> bool:
    """Whether a transport that an engine reported is TCP."""
    return "tcp" in transport.lower()


def _decide_slo(found: Findings) -> Condition:
    def say(reason: Reason, message: str, *, is_true: bool | None) -> Condition:
        return Condition(subject=ConditionType.SLO_MET, is_true=is_true, reason=reason, message=message)

    total = sum(found.attainment.values(), Counts())
    if found.plan is None or not found.statuses:
        return say(Reason.NO_REPORT, "no router answers", is_true=None)
    wanted = found.plan.attainment_percent
    if total.num_finished == 0:
        return say(Reason.NO_TRAFFIC, "no request finished in the last five minutes", is_true=None)
    if total.num_met_both * 100 >= wanted * total.num_finished:
        return say(Reason.MET, f"at least {wanted}% of the requests meet their objectives", is_true=True)
    return say(Reason.MISSED, f"fewer than {wanted}% of the requests meet their objectives", is_true=False)


def _decide_autotuned(found: Findings) -> Condition:
    tuning = found.tuning
    if tuning is not None:
        return Condition(
            subject=ConditionType.AUTOTUNED, is_true=tuning.is_true, reason=tuning.reason, message=tuning.message
        )
    # Read as it is written: the spec was refused as a whole.
    if (found.body["spec"].get("autotune") or {}).get("mode", "Off") == "Off":
        return Condition(subject=ConditionType.AUTOTUNED, is_true=False, reason=Reason.OFF, message="autotune is off")
    message = "nothing is searched for until the spec can be carried out; see SpecValid"
    return Condition(subject=ConditionType.AUTOTUNED, is_true=False, reason=Reason.SPEC_INVALID, message=message)
