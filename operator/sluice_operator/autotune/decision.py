"""Decides when to search for sliders and when to apply a result. Pure: state and observation give the next state.

New sliders are applied when the search predicts ``MIN_GAIN`` more goodput, attainment of the present ones was measured,
and the cool-down is over. They are then on trial: if measured attainment falls, the former ones return. An edit of a
slider in the spec wins at once and resets the tuner; one of ``replicas`` scales what was found.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from sluice_operator.api.condition_types import Reason
from sluice_operator.api.sliders import Sliders, scale_sliders
from sluice_operator.autotune.trial import (
    HISTORY_COOLDOWNS,
    MIN_MEASURED_REQUESTS,
    evaluate_trial,
    resume_trial,
    start_trial,
)
from sluice_operator.autotune.tuner_state import TunerObservation, TunerState
from sluice_operator.autotune.workload import WINDOW_S

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingClusterSpec
    from sluice_operator.autotune.search_messages import SearchRequest, SearchResult

# Predicted goodput over that of the sliders in force, minus 1.
MIN_GAIN = 0.05
# After a search nothing but an edit causes the next one for so many times as long as it took, within these limits.
REST_FACTOR = 1.0
MIN_REST_S, MAX_REST_S = 5.0, 60.0
# A search that failed is tried again.
RETRY_S = 60.0


def make_basis(spec: ServingClusterSpec) -> str:
    """Makes the basis: what users decide about sliders. An edit of any of it resets the tuner."""
    parts = [
        spec.autotune.mode,
        spec.strategy,
        spec.prefill_heavy,
        spec.chunk_sizes.model_dump(),
        spec.autotune.bounds.model_dump(),
    ]
    return json.dumps(parts, sort_keys=True)


def decide(state: TunerState, observation: TunerObservation) -> TunerState:
    """Decides the next state; its ``last_request`` and ``is_searching`` say which search is to run."""
    if observation.mode == "Off":
        return TunerState()
    if state.basis != observation.basis:
        state = _reset(state, observation)
    state = _follow_size(state, observation)
    if state.trial is not None:
        # The verdict comes before another search: bad sliders change the workload too, since clients wait.
        state = evaluate_trial(state, state.trial, observation)
    request = observation.request
    if request is None:
        return state
    if _needs_search(state, request, observation):
        return _start_search(state, request, observation)
    if state.is_searching or state.trial is not None or not observation.is_settled:
        return state
    # After a failed search the result belongs to an older request.
    if (
        observation.mode == "Apply"
        and state.result
        and not state.failure
        and find_blocker(state, state.result, observation) is None
    ):
        return start_trial(state, state.result.sliders, observation)
    return state


def record_result(state: TunerState, result: SearchResult, now: float) -> TunerState:
    """Records the result of the newest search."""
    return replace(state, is_searching=False, search_ended_s=now, result=result, failure="")


def record_failure(state: TunerState, failure: str, now: float) -> TunerState:
    """Records that the newest search failed; the result before it stays."""
    return replace(state, is_searching=False, search_ended_s=now, failure=failure)


def compute_wait_s(state: TunerState, observation: TunerObservation) -> float:
    """Seconds until the next change is allowed."""
    recent = [at_s for at_s in state.changes_s if observation.now - at_s < HISTORY_COOLDOWNS * observation.cooldown_s]
    free_s = observation.now if state.edited_s is None else state.edited_s + observation.cooldown_s
    if recent:
        free_s = max(free_s, recent[-1] + observation.cooldown_s * 2 ** (len(recent) - 1))
    return max(0.0, free_s - observation.now)


def _reset(state: TunerState, observation: TunerObservation) -> TunerState:
    """Starts over: with the sliders an earlier process stored, or, after an edit, with the spec's."""
    fresh = TunerState(basis=observation.basis, replicas=observation.replicas)
    if state.basis:
        return replace(fresh, edited_s=observation.now)
    stored = observation.stored
    if observation.mode != "Apply" or stored is None or stored.basis != observation.basis:
        return fresh
    fresh = replace(fresh, replicas=stored.replicas, tuned=stored.sliders)
    if stored.trial is None:
        return fresh
    return replace(fresh, trial=resume_trial(stored.trial, observation))


def _follow_size(state: TunerState, observation: TunerObservation) -> TunerState:
    """Gives another number of engines sliders of its own: those found for it, or those in force, scaled.

    A trial goes on, and is measured anew with the engines that there are then.
    """
    replicas = observation.replicas
    if replicas == state.replicas or not replicas or not state.replicas:
        # A fleet of none has no sliders: those that it had count from where it comes back.
        return state
    # What finished before ran on another fleet.
    state = replace(state, baseline=observation.counts)
    if state.trial is None and observation.sized is not None and observation.sized not in state.rejected:
        return replace(state, replicas=replicas, tuned=observation.sized, home=None)
    home = state.home or (state.tuned and (state.replicas, state.tuned)) or None
    tuned = home and scale_sliders(home[1], home[0], replicas)
    trial = state.trial
    if trial is not None:
        former = trial.former and scale_sliders(trial.former, state.replicas, replicas)
        began_s = observation.whole_wall_s
        trial = replace(trial, former=former, start=None, started_s=observation.now, began_s=began_s)
    return replace(state, replicas=replicas, tuned=tuned, home=home, trial=trial)


def _needs_search(state: TunerState, request: SearchRequest, observation: TunerObservation) -> bool:
    last_request, now = state.last_request, observation.now
    if last_request is None or last_request.constraints != request.constraints:
        return True
    if state.is_searching:
        return False
    if state.failure:
        return now - state.search_ended_s >= RETRY_S
    if now - state.search_ended_s < min(
        max(MIN_REST_S, REST_FACTOR * (state.search_ended_s - state.search_started_s)), MAX_REST_S
    ):
        return False
    # After a return the sample still holds the requests that the bad sliders slowed down.
    is_recovering = state.rejected and now - state.changes_s[-1] < max(observation.cooldown_s, WINDOW_S)
    if state.trial is not None or is_recovering:
        return False
    return last_request.has_shifted(request) or last_request.is_small_beside(request)


def _start_search(state: TunerState, request: SearchRequest, observation: TunerObservation) -> TunerState:
    request = replace(request, in_force=state.tuned or request.spec_sliders)
    last = state.last_request
    is_same = last is not None and last.constraints == request.constraints
    # A fleet of another size serves the same workload under the same objectives.
    has_shifted = last is None or not last.constraints.equals_but_for_size(request.constraints)
    has_shifted = has_shifted or (last is not None and last.has_shifted(request))
    state = replace(
        state,
        last_request=request,
        search_started_s=observation.now,
        is_searching=True,
        failure="",
        result=state.result if is_same else None,
    )
    if not has_shifted:
        return state
    # Earlier measurements belong to another workload.
    # The first request of a process is that of the trial which the last one left.
    trial = state.trial if last is None else None
    return replace(state, baseline=observation.counts, trial=trial, rejected=frozenset())


def find_in_force(state: TunerState) -> Sliders | None:
    """Returns the sliders in force, as far as the newest request knows the spec's."""
    if state.tuned is not None or state.last_request is None:
        return state.tuned
    return state.last_request.spec_sliders


def find_blocker(state: TunerState, result: SearchResult, observation: TunerObservation) -> Reason | None:
    """Finds why the recommended sliders are not applied; None: they are to be."""
    if result.sliders == find_in_force(state) or result.gain < MIN_GAIN or result.least_gain <= 0.0:
        return Reason.TUNED
    if observation.mode != "Apply":
        return Reason.RECOMMENDED
    if result.sliders in state.rejected:
        return Reason.RETURNED
    if compute_wait_s(state, observation) > 0.0:
        return Reason.COOLING_DOWN
    if (observation.counts - state.baseline).num_finished < MIN_MEASURED_REQUESTS:
        return Reason.MEASURING
    return None
