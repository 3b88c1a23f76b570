"""What a tuner observes at one moment, and what it remembers of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.condition_types import Reason

if TYPE_CHECKING:
    from sluice_operator.api.sliders import Sliders
    from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
    from sluice_operator.autotune.stored_sliders import StoredSliders


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerObservation:
    """What the tuner observes at one moment.

    Args:
        now: Monotonic seconds.
        wall_s: The time, in seconds since 1970.
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
    wall_s: float
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

    @property
    def whole_wall_s(self) -> float:
        """The time in whole seconds, as trials store it."""
        return float(int(self.wall_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneTrial:
    """Sliders on trial.

    Args:
        former: Sliders to return to if attainment falls; None: the spec's.
        before: Requests finished under the former ones.
        started_s: When they were put in force, in monotonic seconds of this process.
        began_s: The same in whole seconds since 1970, for the next process: a restart does not make a trial longer.
        start: Requests finished when every engine had them; None: not yet.
    """

    former: Sliders | None
    before: SloCounts
    started_s: float
    began_s: float
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
