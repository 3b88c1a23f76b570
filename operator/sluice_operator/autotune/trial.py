"""Sliders on trial: measured against the former ones, which return if attainment falls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from sluice_operator.autotune.tuner_state import AutotuneTrial, TunerObservation, TunerState

if TYPE_CHECKING:
    from sluice_core.slo_attainment import SloCounts
    from sluice_operator.api.sliders import Sliders
    from sluice_operator.autotune.stored_sliders import StoredTrial

# Fewer finished requests measure nothing.
MIN_MEASURED_REQUESTS = 20
# Of attainment, beyond chance.
MIN_FALL = 0.02
_CHANCE = 2.0  # standard errors
# A trial that has no verdict after so many cool-downs, and so many seconds, is lost.
MAX_TRIAL_COOLDOWNS = 4
MIN_TRIAL_S = 30.0
# Each change within so many cool-downs doubles the wait, so that a flapping workload does not flap the sliders.
HISTORY_COOLDOWNS = 24


def has_attainment_fallen(before: SloCounts, after: SloCounts) -> bool:
    """Whether attainment fell, by more than ``MIN_FALL`` and chance."""
    if min(before.num_finished, after.num_finished) < MIN_MEASURED_REQUESTS:
        return False
    old, new = (counts.num_met_both / counts.num_finished for counts in (before, after))
    share = (before.num_met_both + after.num_met_both) / (before.num_finished + after.num_finished)
    chance = math.sqrt(share * (1.0 - share) * (1.0 / before.num_finished + 1.0 / after.num_finished))
    return new < old - max(MIN_FALL, _CHANCE * chance)


def evaluate_trial(state: TunerState, trial: AutotuneTrial, observation: TunerObservation) -> TunerState:
    """Ends a trial whose verdict is known; otherwise it goes on."""
    age_s = observation.now - trial.started_s
    is_late = age_s >= max(MAX_TRIAL_COOLDOWNS * observation.cooldown_s, MIN_TRIAL_S)
    if observation.is_settled and trial.start is not None:
        after = observation.counts - trial.start
        if has_attainment_fallen(trial.before, after):
            return _take_back(state, trial, observation)
        if after.num_finished >= MIN_MEASURED_REQUESTS and age_s >= observation.cooldown_s:
            return replace(state, trial=None, baseline=trial.start)
    if is_late:
        # Too few requests finished, or engines never came to rest: nothing speaks for these sliders.
        return _take_back(state, trial, observation)
    if observation.is_settled and trial.start is None:
        return replace(state, trial=replace(trial, start=observation.counts))
    return state


def _take_back(state: TunerState, trial: AutotuneTrial, observation: TunerObservation) -> TunerState:
    rejected = state.rejected | ({state.tuned} if state.tuned is not None else set())
    return replace(
        state,
        tuned=trial.former,
        home=None,
        trial=None,
        rejected=rejected,
        baseline=observation.counts,
        changes_s=_append_change(state, observation),
    )


def start_trial(state: TunerState, sliders: Sliders, observation: TunerObservation) -> TunerState:
    """Puts sliders in force, on trial."""
    trial = AutotuneTrial(
        former=state.tuned,
        before=observation.counts - state.baseline,
        started_s=observation.now,
        began_s=observation.whole_wall_s,
    )
    return replace(state, tuned=sliders, home=None, trial=trial, changes_s=_append_change(state, observation))


def resume_trial(stored: StoredTrial, observation: TunerObservation) -> AutotuneTrial:
    """Goes on with a trial that an earlier process began; what finished under it is counted anew."""
    # Clocks of nodes differ: a trial never began later than now.
    began_s = min(stored.began_s, observation.whole_wall_s)
    return AutotuneTrial(
        former=stored.former,
        before=stored.before,
        started_s=observation.now - max(0.0, observation.wall_s - began_s),
        began_s=began_s,
    )


def _append_change(state: TunerState, observation: TunerObservation) -> tuple[float, ...]:
    kept = [at_s for at_s in state.changes_s if observation.now - at_s < HISTORY_COOLDOWNS * observation.cooldown_s]
    return (*kept, observation.now)
