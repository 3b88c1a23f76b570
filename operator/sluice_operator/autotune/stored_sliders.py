"""What is stored of a tuner with the plan: the sliders in force, and their trial."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from sluice_core.slo_attainment import SloCounts
from sluice_core.strategies import get_strategy
from sluice_operator.api.sliders import Sliders


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrial:
    """What is stored of a trial; counters and monotonic times belong to one process.

    Args:
        former: See ``AutotuneTrial``.
        before: See ``AutotuneTrial``.
        began_s: See ``AutotuneTrial``; infinite: an operator that did not store it began the trial.
    """

    former: Sliders | None
    before: SloCounts
    began_s: float


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
                began_s=float(data["trial"].get("began_s", math.inf)),
            )
            sliders = Sliders(**data["sliders"])
            for each in (sliders, trial and trial.former):
                if each and each.strategy:
                    get_strategy(each.strategy)
            return cls(basis=str(data["basis"]), replicas=int(data["replicas"]), sliders=sliders, trial=trial)
        except (ValueError, TypeError, KeyError):
            return None
