"""When to search for sliders, and when to put what was found in force. Pure: a state, what is seen, the next state.

A change of the sliders is made when all of this holds: the search predicts ``LEAST_GAIN`` more goodput, and more on every
seed; the attainment of the sliders in force was measured under the same objectives and workload; the change before it is
over and its wait has passed. Then the new sliders are on trial: if measured attainment falls, the former ones return, and
the refuted ones are not tried again for this question. Each further change within ``MEMORY_COOLDOWNS`` cool-downs doubles
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
    from sluice_operator.autotune.search_messages import Answer, Question

# Predicted goodput over that of the sliders in force, minus 1.
LEAST_GAIN = 0.05
# Fewer finished requests measure nothing.
LEAST_MEASURED = 20
# Of attainment, beyond chance.
LEAST_FALL = 0.02
_CHANCE = 2.0  # standard errors
# Changes within so many cool-downs count for the wait.
MEMORY_COOLDOWNS = 24
# After a search nothing but an edit causes the next one for so many times as long as it took, within these limits.
REST_FACTOR = 1.0
LEAST_REST_S, MOST_REST_S = 5.0, 60.0
# A search that failed is tried again.
RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
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
    def from_json(cls, text: str) -> Stored | None:
        """Reads what ``to_json`` wrote; None: there is nothing, or somebody edited it."""
        try:
            data = json.loads(text)
            return cls(basis=str(data["basis"]), sliders=Sliders(**data["sliders"]))
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is the case at one moment.

    Args:
        now: Monotonic seconds.
        mode: ``autotune.mode``.
        basis: See ``make_basis``.
        cooldown_s: ``autotune.cooldownSeconds``.
        question: What would be asked now, were the spec's sliders in force; None: something is missing.
        missing: Why there is no question, and its reason.
        counts: Requests finished so far; only grows.
        is_settled: Every engine has taken the newest plan, and none comes or goes.
        stored: What an earlier process left.
    """

    now: float
    mode: str
    basis: str
    cooldown_s: float
    question: Question | None
    missing: tuple[Reason, str] = (Reason.NO_SAMPLE, "")
    counts: Counts = field(default_factory=Counts)
    is_settled: bool = True
    stored: Stored | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
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
class State:
    """What is remembered of a cluster.

    Args:
        basis: The spec that all this is about; empty: nothing was seen yet.
        tuned: Sliders in force instead of the spec's; None: the spec's.
        edited_s: When the user edited the sliders last; None: not in this process's time.
        changes_s: When the tuner changed sliders, returns included.
        asked: Newest question.
        asked_s: When it was asked.
        is_searching: It is not answered yet.
        ended_s: When the newest search ended.
        answer: Newest answer; of an older question while one is searched for whose terms are the same.
        failure: Why the newest search failed; empty: it did not.
        baseline: Requests finished when measuring began, of the sliders in force under the newest question.
        trial: See ``Trial``; None: nothing is on trial.
        refuted: Sliders that were tried for this question and failed.
    """

    basis: str = ""
    tuned: Sliders | None = None
    edited_s: float | None = None
    changes_s: tuple[float, ...] = ()
    asked: Question | None = None
    asked_s: float = 0.0
    is_searching: bool = False
    ended_s: float = 0.0
    answer: Answer | None = None
    failure: str = ""
    baseline: Counts = field(default_factory=Counts)
    trial: Trial | None = None
    refuted: frozenset[Sliders] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
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


def decide(state: State, seen: Seen) -> State:  # noqa: PLR0911 - one line per case
    """Takes what is seen; a search is to be begun or ended as ``asked`` and ``is_searching`` of the result say."""
    if seen.mode == "Off":
        return State()
    if state.basis != seen.basis:
        state = _begin(state, seen)
    question = seen.question
    if question is None:
        return state
    if _must_ask(state, question, seen.now):
        return _ask(state, question, seen)
    if state.is_searching or not seen.is_settled:
        return state
    if state.trial is not None:
        return _judge(state, state.trial, seen)
    # While the newest search has failed, the answer is to an older question.
    if seen.mode == "Apply" and state.answer and not state.failure and _why_not(state, state.answer, seen) is None:
        return _change(state, state.answer.sliders, seen)
    return state


def take_answer(state: State, answer: Answer, now: float) -> State:
    """Takes the answer to the newest question."""
    return replace(state, is_searching=False, ended_s=now, answer=answer, failure="")


def take_failure(state: State, failure: str, now: float) -> State:
    """Takes the failure of the newest search; what was found before it stays known."""
    return replace(state, is_searching=False, ended_s=now, failure=failure)


def count_wait_s(state: State, seen: Seen) -> float:
    """Seconds until the next change is allowed."""
    recent = [at_s for at_s in state.changes_s if seen.now - at_s < MEMORY_COOLDOWNS * seen.cooldown_s]
    free_s = seen.now if state.edited_s is None else state.edited_s + seen.cooldown_s
    if recent:
        free_s = max(free_s, recent[-1] + seen.cooldown_s * 2 ** (len(recent) - 1))
    return max(0.0, free_s - seen.now)


def judge_fall(before: Counts, after: Counts) -> bool:
    """Whether attainment fell, by more than ``LEAST_FALL`` and chance."""
    if min(before.num_finished, after.num_finished) < LEAST_MEASURED:
        return False
    old, new = (counts.num_met_both / counts.num_finished for counts in (before, after))
    share = (before.num_met_both + after.num_met_both) / (before.num_finished + after.num_finished)
    chance = math.sqrt(share * (1.0 - share) * (1.0 / before.num_finished + 1.0 / after.num_finished))
    return new < old - max(LEAST_FALL, _CHANCE * chance)


def judge(state: State, seen: Seen) -> Verdict:  # noqa: PLR0911 - one line per reason
    """Says what is the case; a message says the same as long as the matter is the same."""
    if seen.mode == "Off":
        return Verdict(is_true=False, reason=Reason.OFF, message="autotune is off")
    answer = state.answer
    if seen.question is None and answer is None:
        reason, message = seen.missing
        return Verdict(is_true=False, reason=reason, message=message)
    if state.trial is not None:
        message = "the recommended sliders are in force; the former ones return if attainment falls"
        return Verdict(is_true=True, reason=Reason.ON_TRIAL, message=message)
    if state.failure:
        return Verdict(is_true=False, reason=Reason.SEARCH_FAILED, message=state.failure)
    if answer is None:
        return Verdict(is_true=False, reason=Reason.SEARCHING, message="looks for the best sliders")
    in_force = _in_force(state)
    if answer.sliders == in_force:
        return Verdict(is_true=True, reason=Reason.TUNED, message="the sliders in force are those recommended")
    why = _why_not(state, answer, seen)
    if why is Reason.TUNED:
        message = f"no sliders within the bounds are better by {LEAST_GAIN:.0%} or more"
        return Verdict(is_true=True, reason=why, message=message)
    return Verdict(is_true=False, reason=why or Reason.MEASURING, message=_MESSAGES[why or Reason.MEASURING])


_MESSAGES = {
    Reason.RECOMMENDED: "better sliders are in status.recommended; put them into the spec, or set autotune.mode: Apply",
    Reason.RETURNED: "the recommended sliders were tried and attainment fell; the former ones are in force again",
    Reason.COOLING_DOWN: "better sliders are known; the last change is too recent",
    Reason.MEASURING: "better sliders are known; attainment is measured first, to compare with",
}


def _begin(state: State, seen: Seen) -> State:
    """Begins anew: with what an earlier process left, or, after an edit, with the spec's own sliders."""
    if state.basis:
        return State(basis=seen.basis, edited_s=seen.now)
    is_same = seen.mode == "Apply" and seen.stored is not None and seen.stored.basis == seen.basis
    return State(basis=seen.basis, tuned=seen.stored.sliders if is_same and seen.stored else None)


def _must_ask(state: State, question: Question, now: float) -> bool:
    asked = state.asked
    if asked is None or asked.terms != question.terms:
        return True
    if state.is_searching:
        return False
    if state.failure:
        return now - state.ended_s >= RETRY_S
    if now - state.ended_s < min(max(LEAST_REST_S, REST_FACTOR * (state.ended_s - state.asked_s)), MOST_REST_S):
        return False
    # A larger sample is no other workload: what is on trial is judged first.
    return asked.has_shifted(question) or (state.trial is None and asked.is_small_beside(question))


def _ask(state: State, question: Question, seen: Seen) -> State:
    question = replace(question, in_force=state.tuned or question.spec_sliders)
    is_same = state.asked is not None and state.asked.terms == question.terms
    has_shifted = state.asked is None or not is_same or state.asked.has_shifted(question)
    state = replace(
        state, asked=question, asked_s=seen.now, is_searching=True, failure="", answer=state.answer if is_same else None
    )
    if not has_shifted:
        return state
    # What was measured before was measured under something else.
    return replace(state, baseline=seen.counts, trial=None, refuted=frozenset())


def _judge(state: State, trial: Trial, seen: Seen) -> State:
    if trial.start is None:
        return replace(state, trial=replace(trial, start=seen.counts))
    after = seen.counts - trial.start
    if judge_fall(trial.before, after):
        refuted = state.refuted | ({state.tuned} if state.tuned is not None else set())
        return replace(
            state,
            tuned=trial.former,
            trial=None,
            refuted=refuted,
            baseline=seen.counts,
            changes_s=_remember(state, seen),
        )
    if after.num_finished >= LEAST_MEASURED and seen.now - trial.started_s >= seen.cooldown_s:
        return replace(state, trial=None, baseline=trial.start)
    return state


def _change(state: State, sliders: Sliders, seen: Seen) -> State:
    trial = Trial(former=state.tuned, before=seen.counts - state.baseline, started_s=seen.now)
    return replace(state, tuned=sliders, trial=trial, changes_s=_remember(state, seen))


def _remember(state: State, seen: Seen) -> tuple[float, ...]:
    kept = [at_s for at_s in state.changes_s if seen.now - at_s < MEMORY_COOLDOWNS * seen.cooldown_s]
    return (*kept, seen.now)


def _in_force(state: State) -> Sliders | None:
    """Sliders in force, as far as the newest question knows the spec's."""
    if state.tuned is not None or state.asked is None:
        return state.tuned
    return state.asked.spec_sliders


def _why_not(state: State, answer: Answer, seen: Seen) -> Reason | None:
    """Why the recommended sliders are not put in force; None: they are to be."""
    if answer.sliders == _in_force(state) or answer.gain < LEAST_GAIN or answer.least_gain <= 0.0:
        return Reason.TUNED
    if seen.mode != "Apply":
        return Reason.RECOMMENDED
    if answer.sliders in state.refuted:
        return Reason.RETURNED
    if count_wait_s(state, seen) > 0.0:
        return Reason.COOLING_DOWN
    if (seen.counts - state.baseline).num_finished < LEAST_MEASURED:
        return Reason.MEASURING
    return None
