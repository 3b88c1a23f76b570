"""What is stored of a gated roll, on the engines' Deployment: it is written together with the template it is about."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sluice_operator.api.labels import RESTART_HASH_ANNOTATION, ROLLOUT_ANNOTATION
from sluice_operator.kubernetes.objects import annotations_of
from sluice_operator.resources.rollout_hash import read_kept_template

if TYPE_CHECKING:
    from sluice_operator.kubernetes.objects import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """A roll between two pod templates.

    Args:
        target_hash: Restart hash of the template that the spec asks for.
        good_template: The template that served before, to which the roll goes back.
        since_s: When the present batch began, in seconds since 1970; None: the next one has not begun.
        num_passed: Engines of the new template that a verdict let pass.
        measured_since_s: Since when the present batch is measured; None: it does not serve yet.
        num_unmeasured: Batches that passed because too few requests came.
        failure: Why the roll went back; empty: it did not.
    """

    target_hash: str
    good_template: Object
    since_s: int | None = None
    num_passed: int = 0
    measured_since_s: int | None = None
    num_unmeasured: int = 0
    failure: str = ""

    def to_json(self) -> str:
        """Serializes to JSON; ``find_roll`` reads it."""
        return json.dumps(asdict(self), sort_keys=True)


def hash_of(template: Object) -> str:
    """Restart hash that a pod template carries."""
    return annotations_of(template).get(RESTART_HASH_ANNOTATION, "")


def find_roll(live: Object | None, target_hash: str) -> RolloutState | None:
    """Finds the roll that a Deployment is in, or begins.

    Args:
        live: The Deployment as it is; None before it exists.
        target_hash: Restart hash of the template that the spec asks for.

    Returns:
        The roll; None: what runs is what the spec asks for, and good.
    """
    running = read_kept_template(live)
    if running is None:
        return None
    stored = _read_state(annotations_of(live).get(ROLLOUT_ANNOTATION, "")) if live else None
    return continue_roll(stored, running, target_hash)


def continue_roll(stored: RolloutState | None, running: Object, target_hash: str) -> RolloutState | None:
    """Finds the roll that engines are in, or begin.

    Args:
        stored: The roll that they were in; None: they were in none.
        running: The template that they run; it carries its restart hash.
        target_hash: Restart hash of the template that the spec asks for.

    Returns:
        The roll; None: what runs is what the spec asks for, and good.
    """
    if stored is not None and stored.target_hash == target_hash:
        return stored
    # A roll that an edit overtakes never became good: what served before it still is.
    good = stored.good_template if stored else running
    if hash_of(good) == target_hash:
        return None
    return RolloutState(target_hash=target_hash, good_template=good)


def went_back(live: Object) -> bool:
    """Whether a Deployment runs the template from before a roll that failed."""
    stored = _read_state(annotations_of(live).get(ROLLOUT_ANNOTATION, ""))
    return stored is not None and bool(stored.failure)


def _read_state(text: str) -> RolloutState | None:
    """Reads what is stored; None when there is nothing, or somebody edited it."""
    try:
        found: Any = json.loads(text)
        state = RolloutState(**found)
    except (ValueError, TypeError):
        return None
    return state if isinstance(state.good_template, dict) and "spec" in state.good_template else None
