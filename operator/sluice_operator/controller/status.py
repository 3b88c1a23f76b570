"""Renders the status of a ServingCluster, a pure function of ``StatusInputs``. Its size does not depend on the pods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_core.records import Role
from sluice_core.slo_attainment import SloCounts
from sluice_core.strategies import get_strategy
from sluice_operator.api import names
from sluice_operator.api.condition_types import ConditionType, Reason
from sluice_operator.api.labels import format_selector, select_component
from sluice_operator.controller.conditions import (
    MEASURED_CONDITION,
    Condition,
    decide_conditions,
    render_condition,
)
from sluice_operator.routers.attainment import format_share

if TYPE_CHECKING:
    from sluice_operator.controller.status_inputs import StatusInputs
    from sluice_operator.kubernetes.objects import Object

# Changes of these alone are measurements, written every 15 s at most.
MEASURED_FIELD = "attainment"


def render_status(inputs: StatusInputs, now_text: str) -> Object:
    """Renders the status.

    Args:
        inputs: What one reconcile found.
        now_text: The time, as Kubernetes writes it, for conditions that change.
    """
    old = inputs.body.get("status") or {}
    name = inputs.body["metadata"]["name"]
    generation = inputs.body["metadata"].get("generation", 0)
    conditions = [
        render_condition(item, old, generation, now_text, inputs.runbook_url) for item in decide_conditions(inputs)
    ]
    status: Object = {
        "observedGeneration": generation,
        "conditions": conditions,
        "replicas": sum(pod.is_present for pod in inputs.engines),
        "readyReplicas": inputs.num_engines_ready,
        "selector": format_selector(select_component(name, names.ENGINE)),
        "routerReplicas": sum(pod.is_present for pod in inputs.routers),
        "readyRouterReplicas": inputs.num_routers_ready,
        "effective": _render_effective(inputs, old.get("effective") or {}),
    }
    generations = [item.generation for item in inputs.statuses.values()]
    if generations and len(generations) >= inputs.num_workers_ready:
        status["planGeneration"] = min(generations)
    elif "planGeneration" in old:
        status["planGeneration"] = old["planGeneration"]
    if recommended := _render_recommended(inputs, old.get("recommended"), now_text):
        status["recommended"] = recommended
    if wanted := _render_wanted(inputs, old.get("autoscaling"), now_text):
        status["autoscaling"] = wanted
    if attainment := _render_attainment(inputs):
        status[MEASURED_FIELD] = attainment
    return status


def render_forbidden_status(body: Object, message: str, now_text: str) -> Object:
    """Renders the status of a cluster that may not be read: as it was, with Degraded."""
    old = body.get("status") or {}
    condition = Condition(type=ConditionType.DEGRADED, is_true=True, reason=Reason.FORBIDDEN, message=message)
    others = [item for item in old.get("conditions", []) if item["type"] != ConditionType.DEGRADED]
    written = render_condition(condition, old, body["metadata"].get("generation", 0), now_text)
    return {**old, "conditions": [*others, written]}


def strip_measurements(status: Object) -> Object:
    """Returns a status without its measurements, which change all the time."""
    conditions = [item for item in status.get("conditions", []) if item["type"] != MEASURED_CONDITION]
    return {**status, MEASURED_FIELD: None, "conditions": conditions}


def make_patch(old: Any, new: Object) -> Object:
    """Makes the merge patch that turns one status into another; empty when they are the same."""
    old = old if isinstance(old, dict) else {}
    patch: Object = {name: None for name in old if name not in new}
    for name, value in new.items():
        if isinstance(value, dict):
            inner = make_patch(old.get(name), value)
            if inner or name not in old:
                patch[name] = inner
        elif old.get(name) != value:
            patch[name] = value
    return patch


def _render_effective(inputs: StatusInputs, old: Object) -> Object:
    """What the engines acknowledged; without a report, what was known last."""
    plan = inputs.plan
    if plan is None or not inputs.statuses:
        return old
    gone = inputs.scale.victims | inputs.leaving.keys()
    staying = [report for engine, report in inputs.reports.items() if engine not in gone]
    counts = {role: sum(report.role is role for report in staying) for role in Role}
    effective: Object = {
        "prefillHeavy": counts[Role.PREFILL_HEAVY],
        "decodeHeavy": counts[Role.DECODE_HEAVY],
        "draining": len(gone),
    }
    if all(status.generation >= plan.generation for status in inputs.statuses.values()):
        effective["strategy"] = get_strategy(plan.strategy).title
    elif "strategy" in old:
        effective["strategy"] = old["strategy"]
    sizes = dict(old.get("chunkSizes") or {})
    for role, name in ((Role.PREFILL_HEAVY, "prefillHeavy"), (Role.DECODE_HEAVY, "decodeHeavy")):
        in_force = {report.chunk_size_tokens for report in staying if report.role is role}
        if len(in_force) == 1:
            sizes[name] = in_force.pop()
    if sizes:
        effective["chunkSizes"] = sizes
    return effective


def _render_recommended(inputs: StatusInputs, old: Object | None, now_text: str) -> Object | None:
    """What the newest search found; until there is one, what an earlier process found."""
    if inputs.autotune is not None and inputs.autotune.reason is Reason.OFF:
        return None
    result = inputs.recommended
    if result is None or inputs.cluster is None or not inputs.cluster.spec.replicas:
        return old
    new: Object = {
        "replicas": inputs.cluster.spec.replicas,
        "prefillHeavy": result.sliders.num_prefill_heavy,
        "chunkSizes": {
            "prefillHeavy": result.sliders.prefill_heavy_tokens,
            "decodeHeavy": result.sliders.decode_heavy_tokens,
        },
        "predictedAttainment": format_share(round(result.attainment * 1000), 1000),
    }
    if result.sliders.strategy:
        new["strategy"] = get_strategy(result.sliders.strategy).title
    is_same = old is not None and {**old, "time": ""} == {**new, "time": ""}
    return old if is_same else {**new, "time": now_text}


def _render_wanted(inputs: StatusInputs, old: Object | None, now_text: str) -> Object | None:
    """How many engines autoscaling wants; while the spec is refused as a whole, what it wanted last."""
    if inputs.autoscale is None:
        return old
    if inputs.wanted is None:
        return None
    if old is not None and old.get("replicas") == inputs.wanted.replicas:
        return old
    return {"replicas": inputs.wanted.replicas, "reason": inputs.wanted.reason, "time": now_text}


def _render_attainment(inputs: StatusInputs) -> Object:
    total = sum(inputs.attainment.values(), SloCounts())
    if total.num_finished == 0:
        return {}
    known = {item.name for item in inputs.cluster.spec.slo.classes} if inputs.cluster else set()
    classes = [
        {"name": name, **_render_counts(counts)} for name, counts in sorted(inputs.attainment.items()) if name in known
    ]
    return {**_render_counts(total), **({"classes": classes} if classes else {})}


def _render_counts(counts: SloCounts) -> Object:
    return {
        "requests": counts.num_finished,
        "ttft": format_share(counts.num_met_ttft, counts.num_finished),
        "tpot": format_share(counts.num_met_tpot, counts.num_finished),
        "both": format_share(counts.num_met_both, counts.num_finished),
    }
