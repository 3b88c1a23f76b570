"""Decides whether a roll of the engines goes on: after each batch, the measured figures must hold for a time.

Kubernetes begins no further batch while engines have served for less than ``minReadySeconds``. Within that time the
operator pauses the Deployment, and lets it go on by a verdict. So a roll is slow while nobody leads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice_operator.api.field_types import percent

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.rollout_gate_spec import RolloutGateSpec
    from sluice_operator.resources.rollout_state import RolloutState
    from sluice_operator.routers.engine_outcomes import Outcomes

# Figures come with the routers' statuses; a verdict is tried this often meanwhile.
CHECK_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RollFacts:
    """What is observed of a roll.

    Args:
        num_new: Engines of the new template.
        num_new_ready: Of these, those that serve.
        num_old: Engines of other templates.
        replicas: Engines that there should be.
        refusal: Why an engine of the new template refuses to start; empty: none does.
        figures: Of the batch, of the new engines where they have enough requests; None: no router answers.
        num_ended_on_new: Requests of the batch that ended on the new engines.
        watched_s: For how long this process has seen the batch: it knows nothing of the figures before.
        start_limit_s: Longest time until the engines of a batch serve, drains included.
    """

    num_new: int
    num_new_ready: int
    num_old: int
    replicas: int
    refusal: str
    figures: Outcomes | None
    num_ended_on_new: int
    watched_s: float
    start_limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDecision:
    """What becomes of a roll.

    Args:
        state: What is stored; None: the roll is over, and its template is the good one.
        is_held: Whether no further engine is replaced now.
        wake_in_s: When to decide again; None: an event causes it.
    """

    state: RolloutState | None
    is_held: bool = False
    wake_in_s: float | None = None


def decide_gate(state: RolloutState, facts: RollFacts, gate: RolloutGateSpec, wall_s: float) -> GateDecision:
    """Decides about the present batch.

    Args:
        state: What is stored of the roll.
        facts: What is observed.
        gate: What must hold.
        wall_s: The time, in seconds since 1970.
    """
    if state.failure or facts.refusal:
        return GateDecision(state=replace(state, failure=state.failure or facts.refusal, measured_since_s=None))
    if facts.num_new <= state.num_passed:
        if facts.num_old == 0 and facts.num_new_ready >= facts.replicas:
            return GateDecision(state=None)
        return GateDecision(state=replace(state, num_passed=facts.num_new))
    if state.since_s is None:
        state = replace(state, since_s=int(wall_s))
    if facts.num_new_ready < facts.num_new:
        return _await_start(state, facts, wall_s)
    since_s = state.measured_since_s
    if since_s is None:
        measured = replace(state, measured_since_s=int(wall_s))
        return GateDecision(state=measured, is_held=True, wake_in_s=CHECK_INTERVAL_S)
    return _judge(state, facts, gate, min(wall_s - since_s, facts.watched_s))


def _await_start(state: RolloutState, facts: RollFacts, wall_s: float) -> GateDecision:
    left_s = (wall_s if state.since_s is None else state.since_s) + facts.start_limit_s - wall_s
    if left_s <= 0:
        missing = facts.num_new - facts.num_new_ready
        return _return(state, f"{missing} engines did not serve within {facts.start_limit_s:.0f} s")
    # Those that serve already must not become available one by one meanwhile.
    return GateDecision(state=state, is_held=facts.num_new_ready > state.num_passed, wake_in_s=left_s)


def _judge(state: RolloutState, facts: RollFacts, gate: RolloutGateSpec, measured_s: float) -> GateDecision:
    figures = facts.figures
    passed = replace(state, num_passed=facts.num_new, since_s=None, measured_since_s=None)
    if figures is not None and figures.num_ended >= gate.min_requests:
        is_complete = _is_complete(facts, gate, measured_s)
        fault = _find_fault(figures, gate, is_complete=is_complete)
        if fault:
            return _return(state, fault)
        if is_complete:
            return GateDecision(state=passed)
    elif measured_s >= gate.timeout_seconds:
        if figures is None:
            return _return(state, f"no router reported for {gate.timeout_seconds} s")
        return GateDecision(state=replace(passed, num_unmeasured=state.num_unmeasured + 1))
    return GateDecision(state=state, is_held=True, wake_in_s=CHECK_INTERVAL_S)


def _is_complete(facts: RollFacts, gate: RolloutGateSpec, measured_s: float) -> bool:
    """Whether the batch was measured for long enough, and on the new engines where requests end on them."""
    # A slower engine gets fewer requests: those of the faster ones must not let it pass. On P-heavy ones none may end.
    is_sampled = facts.num_ended_on_new == 0 or facts.num_ended_on_new >= gate.min_requests
    return measured_s >= (gate.duration_seconds if is_sampled else max(gate.duration_seconds, gate.timeout_seconds))


def _find_fault(figures: Outcomes, gate: RolloutGateSpec, *, is_complete: bool) -> str:
    """Says what does not hold: errors at once, attainment once it was measured for the whole time."""
    seen = f"of {figures.num_ended} requests"
    if figures.num_failed * 100 > percent(gate.max_error_rate) * figures.num_ended:
        return f"{figures.num_failed} {seen} failed, more than rollout.gate.maxErrorRate {gate.max_error_rate}"
    if is_complete and figures.num_met * 100 < percent(gate.min_attainment) * figures.num_ended:
        limit = f"rollout.gate.minAttainment {gate.min_attainment}"
        return f"{figures.num_met} {seen} met their objectives, less than {limit}"
    return ""


def _return(state: RolloutState, why: str) -> GateDecision:
    return GateDecision(state=replace(state, failure=why, measured_since_s=None))
