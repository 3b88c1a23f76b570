"""When to search for sliders, and when to put what was found in force. Pure: a state, what is seen, the next state.

A change of the sliders is made when all of this holds: the search predicts ``MIN_GAIN`` more goodput, and more on every
seed; the attainment of the sliders in force was measured under the same objectives and workload; the change before it is
over and its wait has passed. Then the new sliders are on trial: if measured attainment falls, the former ones return, and
the refuted ones are not tried again for this question. Each further change within ``HISTORY_COOLDOWNS`` cool-downs doubles
the wait, so that a workload that flaps does not flap the sliders.

An edit of a slider in the spec wins at once, and begins anew.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from sluice_operator.api.conditions import Reason
from sluice_operator.api.sliders import Sliders
from sluice_operator.routers.attainment import Counts

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
# Changes within so many cool-downs count for the wait.
HISTORY_COOLDOWNS = 24
# After a search nothing but an edit causes the next one for so many times as long as it took, within these limits.
REST_FACTOR = 1.0
MIN_REST_S, MAX_REST_S = 5.0, 60.0
# A search that failed is tried again.
RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSliders:
    """What outlives a process: it is kept with the plan. A trial is not: sliders that a process finds are no longer tried.

    Args:
        basis: The spec that the sliders belong to (``make_basis``).
        sliders: Sliders in force instead of the spec's.
    """

    basis: str
    sliders: Sliders

    def to_json(self) -> str:
        """Writes it."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StoredSliders | None:
        """Reads what ``to_json`` wrote; None: there is nothing, or somebody edited it."""
        try:
            data = json.loads(text)
            return cls(basis=str(data["basis"]), sliders=Sliders(**data["sliders"]))
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerObservation:
    """What is the case at one moment.

    Args:
        now: Monotonic seconds.
        mode: ``autotune.mode``.
        basis: See ``make_basis``.
        cooldown_s: ``autotune.cooldownSeconds``.
        request: What would be asked now, were the spec's sliders in force; None: something is missing.
        missing: Why there is no question, and its reason.
        counts: Requests finished so far; only grows.
        is_settled: Every engine has taken the newest plan, and none comes or goes.
        stored: What an earlier process left.
    """

    now: float
    mode: str
    basis: str
    cooldown_s: float
    request: SearchRequest | None
    missing: tuple[Reason, str] = (Reason.NO_SAMPLE, "")
    counts: Counts = field(default_factory=Counts)
    is_settled: bool = True
    stored: StoredSliders | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneTrial:
    """Sliders that have to prove themselves.

    Args:
        former: What returns if they fail; None: the spec's.
        before: Requests finished under the former ones.
        started_s: When they were put in force.
        start: Requests finished when every engine had them; None: not yet.
    """

    former: Sliders | None
    before: Counts
    started_s: float
    start: Counts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerState:
    """What is remembered of a cluster.

    Args:
        basis: The spec that all this is about; empty: nothing was seen yet.
        tuned: Sliders in force instead of the spec's; None: the spec's.
        edited_s: When the user edited the sliders last; None: not in this process's time.
        changes_s: When the tuner changed sliders, returns included.
        last_request: Newest question.
        search_started_s: When it was asked.
        is_searching: It is not answered yet.
        search_ended_s: When the newest search ended.
        result: Newest answer; of an older question while one is searched for whose terms are the same.
        failure: Why the newest search failed; empty: it did not.
        baseline: Requests finished when measuring began, of the sliders in force under the newest question.
        trial: See ``AutotuneTrial``; None: nothing is on trial.
        rejected: Sliders that were tried for this question and failed.
    """

    basis: str = ""
    tuned: Sliders | None = None
    edited_s: float | None = None
    changes_s: tuple[float, ...] = ()
    last_request: SearchRequest | None = None
    search_started_s: float = 0.0
    is_searching: bool = False
    search_ended_s: float = 0.0
    result: SearchResult | None = None
    failure: str = ""
    baseline: Counts = field(default_factory=Counts)
    trial: AutotuneTrial | None = None
    rejected: frozenset[Sliders] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneStatus:
    """What is to be said about the tuning.

    Args:
        is_true: The sliders in force are those that the search recommends.
        reason: Why.
        message: The same for people.
    """

    is_true: bool
    reason: Reason
    message: str


def make_basis(spec: ServingClusterSpec) -> str:
    """What the user decides about sliders: an edit of any of it begins anew."""
    parts = [
        spec.autotune.mode,
        spec.strategy,
        spec.replicas,
        spec.prefill_heavy,
        spec.chunk_sizes.model_dump(),
        spec.autotune.bounds.model_dump(),
    ]
    return json.dumps(parts, sort_keys=True)


def decide(state: TunerState, observation: TunerObservation) -> TunerState:  # noqa: PLR0911 - one line per case
    """Takes what is seen; a search is to be begun or ended as ``last_request`` and ``is_searching`` of the result say."""
    if observation.mode == "Off":
        return TunerState()
    if state.basis != observation.basis:
        state = _reset(state, observation)
    request = observation.request
    if request is None:
        return state
    if _needs_search(state, request, observation.now):
        return _start_search(state, request, observation)
    if state.is_searching or not observation.is_settled:
        return state
    if state.trial is not None:
        return _evaluate_trial(state, state.trial, observation)
    # While the newest search has failed, the answer is to an older question.
    if (
        observation.mode == "Apply"
        and state.result
        and not state.failure
        and _find_blocker(state, state.result, observation) is None
    ):
        return _start_trial(state, state.result.sliders, observation)
    return state


def record_result(state: TunerState, result: SearchResult, now: float) -> TunerState:
    """Takes the answer to the newest question."""
    return replace(state, is_searching=False, search_ended_s=now, result=result, failure="")


def record_failure(state: TunerState, failure: str, now: float) -> TunerState:
    """Takes the failure of the newest search; what was found before it stays known."""
    return replace(state, is_searching=False, search_ended_s=now, failure=failure)


def compute_wait_s(state: TunerState, observation: TunerObservation) -> float:
    """Seconds until the next change is allowed."""
    recent = [at_s for at_s in state.changes_s if observation.now - at_s < HISTORY_COOLDOWNS * observation.cooldown_s]
    free_s = observation.now if state.edited_s is None else state.edited_s + observation.cooldown_s
    if recent:
        free_s = max(free_s, recent[-1] + observation.cooldown_s * 2 ** (len(recent) - 1))
    return max(0.0, free_s - observation.now)


def has_attainment_fallen(before: Counts, after: Counts) -> bool:
    """Whether attainment fell, by more than ``MIN_FALL`` and chance."""
    if min(before.num_finished, after.num_finished) < MIN_MEASURED_REQUESTS:
        return False
    old, new = (counts.num_met_both / counts.num_finished for counts in (before, after))
    share = (before.num_met_both + after.num_met_both) / (before.num_finished + after.num_finished)
    chance = math.sqrt(share * (1.0 - share) * (1.0 / before.num_finished + 1.0 / after.num_finished))
    return new < old - max(MIN_FALL, _CHANCE * chance)


def describe_status(state: TunerState, observation: TunerObservation) -> AutotuneStatus:  # noqa: PLR0911 - one line per reason
    """Says what is the case; a message says the same as long as the matter is the same."""
    if observation.mode == "Off":
        return AutotuneStatus(is_true=False, reason=Reason.OFF, message="autotune is off")
    result = state.result
    if observation.request is None and result is None:
        reason, message = observation.missing
        return AutotuneStatus(is_true=False, reason=reason, message=message)
    if state.trial is not None:
        message = "the recommended sliders are in force; the former ones return if attainment falls"
        return AutotuneStatus(is_true=True, reason=Reason.ON_TRIAL, message=message)
    if state.failure:
        return AutotuneStatus(is_true=False, reason=Reason.SEARCH_FAILED, message=state.failure)
    if result is None:
        return AutotuneStatus(is_true=False, reason=Reason.SEARCHING, message="looks for the best sliders")
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
    """Begins anew: with what an earlier process left, or, after an edit, with the spec's own sliders."""
    if state.basis:
        return TunerState(basis=observation.basis, edited_s=observation.now)
    is_same = (
        observation.mode == "Apply" and observation.stored is not None and observation.stored.basis == observation.basis
    )
    return TunerState(
        basis=observation.basis, tuned=observation.stored.sliders if is_same and observation.stored else None
    )


def _needs_search(state: TunerState, request: SearchRequest, now: float) -> bool:
    last_request = state.last_request
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
    # A larger sample is no other workload: what is on trial is judged first.
    return last_request.has_shifted(request) or (state.trial is None and last_request.is_small_beside(request))


def _start_search(state: TunerState, request: SearchRequest, observation: TunerObservation) -> TunerState:
    request = replace(request, in_force=state.tuned or request.spec_sliders)
    is_same = state.last_request is not None and state.last_request.constraints == request.constraints
    has_shifted = state.last_request is None or not is_same or state.last_request.has_shifted(request)
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
    # What was measured before was measured under something else.
    return replace(state, baseline=observation.counts, trial=None, rejected=frozenset())


def _evaluate_trial(state: TunerState, trial: AutotuneTrial, observation: TunerObservation) -> TunerState:
    if trial.start is None:
        return replace(state, trial=replace(trial, start=observation.counts))
    after = observation.counts - trial.start
    if has_attainment_fallen(trial.before, after):
        rejected = state.rejected | ({state.tuned} if state.tuned is not None else set())
        return replace(
            state,
            tuned=trial.former,
            trial=None,
            rejected=rejected,
            baseline=observation.counts,
            changes_s=_append_change(state, observation),
        )
    if after.num_finished >= MIN_MEASURED_REQUESTS and observation.now - trial.started_s >= observation.cooldown_s:
        return replace(state, trial=None, baseline=trial.start)
    return state


def _start_trial(state: TunerState, sliders: Sliders, observation: TunerObservation) -> TunerState:
    trial = AutotuneTrial(former=state.tuned, before=observation.counts - state.baseline, started_s=observation.now)
    return replace(state, tuned=sliders, trial=trial, changes_s=_append_change(state, observation))


def _append_change(state: TunerState, observation: TunerObservation) -> tuple[float, ...]:
    kept = [at_s for at_s in state.changes_s if observation.now - at_s < HISTORY_COOLDOWNS * observation.cooldown_s]
    return (*kept, observation.now)


def _in_force(state: TunerState) -> Sliders | None:
    """Sliders in force, as far as the newest question knows the spec's."""
    if state.tuned is not None or state.last_request is None:
        return state.tuned
    return state.last_request.spec_sliders


def _find_blocker(state: TunerState, result: SearchResult, observation: TunerObservation) -> Reason | None:
    """Why the recommended sliders are not put in force; None: they are to be."""
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
