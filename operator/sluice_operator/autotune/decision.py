"""Decides when to search for sliders and when to apply a result. Pure: state and observation give the next state.

New sliders are applied when the search predicts ``MIN_GAIN`` more goodput, attainment of the present ones was measured,
and the cool-down is over. They are then on trial: if measured attainment falls, the former ones return. An edit of a
slider in the spec wins at once and resets the tuner; one of ``replicas`` scales what was found.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from sluice_core.slo import SloCounts
from sluice_core.strategies import DEFAULT_STRATEGY, get_strategy
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.sliders import Sliders, scale_sliders
from sluice_operator.autotune.workload import WINDOW_S

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingClusterSpec
    from sluice_operator.autotune.search_messages import SearchRequest, SearchResult

# Predicted goodput over that of the sliders in force, minus 1.
MIN_GAIN = 0.05
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
# After a search nothing but an edit causes the next one for so many times as long as it took, within these limits.
REST_FACTOR = 1.0
MIN_REST_S, MAX_REST_S = 5.0, 60.0
# A search that failed is tried again.
RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrial:
    """What is stored of a trial; times and counters belong to one process.

    Args:
        former: See ``AutotuneTrial``.
        before: See ``AutotuneTrial``.
    """

    former: Sliders | None
    before: SloCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSliders:
    """The tuned sliders that are stored with the plan. A trial of them is too: a new process goes on with it.

    Args:
        basis: The spec that the sliders belong to (``make_basis``).
        replicas: Engines that they are for.
        sliders: Sliders in force instead of the spec's.
        trial: Their trial; None: they are not on trial.
    """

    basis: str
    replicas: int
    sliders: Sliders
    trial: StoredTrial | None = None

    def to_json(self) -> str:
        """Serializes to JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StoredSliders | None:
        """Reads what ``to_json`` wrote; None: there is nothing, or somebody edited it."""
        try:
            data = json.loads(text)
            trial = data["trial"] and StoredTrial(
                former=data["trial"]["former"] and Sliders(**data["trial"]["former"]),
                before=SloCounts(**data["trial"]["before"]),
            )
            sliders = Sliders(**data["sliders"])
            for each in (sliders, trial and trial.former):
                if each and each.strategy:
                    get_strategy(each.strategy)
            return cls(basis=str(data["basis"]), replicas=int(data["replicas"]), sliders=sliders, trial=trial)
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerObservation:
    """What the tuner observes at one moment.

    Args:
        now: Monotonic seconds.
        mode: ``autotune.mode``.
        basis: See ``make_basis``.
        replicas: Engines that the spec asks for.
        cooldown_s: ``autotune.cooldownSeconds``.
        request: The search to run if the spec's sliders were in force; None: something is missing.
        missing: Why there is no request: reason and message.
        counts: Requests finished so far; only grows.
        is_settled: Every engine has taken the newest plan, and none comes or goes.
        stored: What an earlier process left.
        chooses_strategy: Whether ``spec.strategy`` leaves the strategy to the tuner.
        sized: Sliders that a search for capacity found for so many engines; None: none has.
    """

    now: float
    mode: str
    basis: str
    replicas: int
    cooldown_s: float
    request: SearchRequest | None
    missing: tuple[Reason, str] = (Reason.NO_SAMPLE, "")
    counts: SloCounts = field(default_factory=SloCounts)
    is_settled: bool = True
    stored: StoredSliders | None = None
    chooses_strategy: bool = False
    sized: Sliders | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneTrial:
    """Sliders on trial.

    Args:
        former: Sliders to return to if attainment falls; None: the spec's.
        before: Requests finished under the former ones.
        started_s: When they were put in force.
        start: Requests finished when every engine had them; None: not yet.
    """

    former: Sliders | None
    before: SloCounts
    started_s: float
    start: SloCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerState:
    """The tuner's state of one cluster.

    Args:
        basis: The part of the spec that this state belongs to; empty: nothing was observed yet.
        replicas: Engines that the sliders in it are for.
        tuned: Sliders in force instead of the spec's; None: the spec's.
        home: The size that they were found for, and what they were there: from one engine no mix can be told; None:
            they were found for this one.
        edited_s: When the user edited the sliders last; None: not in this process's time.
        changes_s: When the tuner changed sliders, returns included.
        last_request: Newest search request.
        search_started_s: When its search began.
        is_searching: Whether that search runs.
        search_ended_s: When the newest search ended.
        result: Newest result; while a search with the same constraints runs, that of the request before it.
        failure: Why the newest search failed; empty: it did not.
        baseline: Requests finished when measuring began, of the sliders in force under the newest request.
        trial: See ``AutotuneTrial``; None: nothing is on trial.
        rejected: Sliders whose trial for this request failed.
    """

    basis: str = ""
    replicas: int = 0
    tuned: Sliders | None = None
    home: tuple[int, Sliders] | None = None
    edited_s: float | None = None
    changes_s: tuple[float, ...] = ()
    last_request: SearchRequest | None = None
    search_started_s: float = 0.0
    is_searching: bool = False
    search_ended_s: float = 0.0
    result: SearchResult | None = None
    failure: str = ""
    baseline: SloCounts = field(default_factory=SloCounts)
    trial: AutotuneTrial | None = None
    rejected: frozenset[Sliders] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneStatus:
    """What the condition Autotuned says.

    Args:
        is_true: The sliders in force are those that the search recommends.
        reason: Why.
        message: The same for people.
    """

    is_true: bool
    reason: Reason
    message: str


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
        state = _evaluate_trial(state, state.trial, observation)
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
        and _find_blocker(state, state.result, observation) is None
    ):
        return _start_trial(state, state.result.sliders, observation)
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


def has_attainment_fallen(before: SloCounts, after: SloCounts) -> bool:
    """Whether attainment fell, by more than ``MIN_FALL`` and chance."""
    if min(before.num_finished, after.num_finished) < MIN_MEASURED_REQUESTS:
        return False
    old, new = (counts.num_met_both / counts.num_finished for counts in (before, after))
    share = (before.num_met_both + after.num_met_both) / (before.num_finished + after.num_finished)
    chance = math.sqrt(share * (1.0 - share) * (1.0 / before.num_finished + 1.0 / after.num_finished))
    return new < old - max(MIN_FALL, _CHANCE * chance)


def describe_status(state: TunerState, observation: TunerObservation) -> AutotuneStatus:
    """Describes the state. A message stays the same while the reason and the strategy do: a change is a write."""
    status = _describe_tuning(state, observation)
    if not observation.chooses_strategy:
        return status
    if state.tuned is None:
        chosen = f"{DEFAULT_STRATEGY.title}, the default"
    else:
        chosen = f"{get_strategy(state.tuned.strategy).title}, as a search chose"
    return replace(status, message=f"{status.message}; strategy Auto is {chosen}")


def _describe_tuning(state: TunerState, observation: TunerObservation) -> AutotuneStatus:  # noqa: PLR0911 - a line a reason
    if observation.mode == "Off":
        return AutotuneStatus(is_true=False, reason=Reason.OFF, message="autotune is off")
    result = state.result
    if state.trial is not None:
        message = "the recommended sliders are in force; the former ones return if attainment falls"
        return AutotuneStatus(is_true=True, reason=Reason.ON_TRIAL, message=message)
    if observation.request is None and result is None:
        reason, message = observation.missing
        return AutotuneStatus(is_true=False, reason=reason, message=message)
    if state.failure:
        return AutotuneStatus(is_true=False, reason=Reason.SEARCH_FAILED, message=state.failure)
    if result is None:
        return AutotuneStatus(is_true=False, reason=Reason.SEARCHING, message="a search for better sliders runs")
    in_force = _in_force(state)
    if result.sliders == in_force:
        return AutotuneStatus(is_true=True, reason=Reason.TUNED, message="the sliders in force are those recommended")
    why = _find_blocker(state, result, observation)
    if why is Reason.TUNED:
        message = f"no sliders within the bounds are better by {MIN_GAIN:.0%} or more"
        return AutotuneStatus(is_true=True, reason=why, message=message)
    return AutotuneStatus(is_true=False, reason=why or Reason.MEASURING, message=_MESSAGES[why or Reason.MEASURING])


_MESSAGES = {
    Reason.RECOMMENDED: "better sliders are in status.recommended; put them into the spec, or set autotune.mode: Apply",
    Reason.RETURNED: "the recommended sliders were tried and attainment fell; the former ones are in force again",
    Reason.COOLING_DOWN: "better sliders are known; the last change is too recent",
    Reason.MEASURING: "better sliders are known; attainment is measured first, to compare with",
}


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
    trial = AutotuneTrial(former=stored.trial.former, before=stored.trial.before, started_s=observation.now)
    return replace(fresh, trial=trial)


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
        trial = replace(trial, former=former, start=None, started_s=observation.now)
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


def _evaluate_trial(state: TunerState, trial: AutotuneTrial, observation: TunerObservation) -> TunerState:
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


def _start_trial(state: TunerState, sliders: Sliders, observation: TunerObservation) -> TunerState:
    trial = AutotuneTrial(former=state.tuned, before=observation.counts - state.baseline, started_s=observation.now)
    return replace(state, tuned=sliders, home=None, trial=trial, changes_s=_append_change(state, observation))


def _append_change(state: TunerState, observation: TunerObservation) -> tuple[float, ...]:
    kept = [at_s for at_s in state.changes_s if observation.now - at_s < HISTORY_COOLDOWNS * observation.cooldown_s]
    return (*kept, observation.now)


def _in_force(state: TunerState) -> Sliders | None:
    """Returns the sliders in force, as far as the newest request knows the spec's."""
    if state.tuned is not None or state.last_request is None:
        return state.tuned
    return state.last_request.spec_sliders


def _find_blocker(state: TunerState, result: SearchResult, observation: TunerObservation) -> Reason | None:
    """Finds why the recommended sliders are not applied; None: they are to be."""
    if result.sliders == _in_force(state) or result.gain < MIN_GAIN or result.least_gain <= 0.0:
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
