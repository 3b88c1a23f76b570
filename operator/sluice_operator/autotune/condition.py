"""What the condition Autotuned says: reason and message."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice_core.strategies import DEFAULT_STRATEGY, get_strategy
from sluice_operator.api.condition_types import Reason
from sluice_operator.autotune.decision import MIN_GAIN, find_blocker, find_in_force

if TYPE_CHECKING:
    from sluice_operator.autotune.tuner_state import TunerObservation, TunerState


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
    in_force = find_in_force(state)
    if result.sliders == in_force:
        return AutotuneStatus(is_true=True, reason=Reason.TUNED, message="the sliders in force are those recommended")
    why = find_blocker(state, result, observation)
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
