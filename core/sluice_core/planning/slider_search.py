"""The search: successive halving over runs of growing length.

Rounds: the order of magnitude of the rate; candidates all over the space, on short runs; the neighbours of the best, on
longer ones; M and alpha; and the best few of each strategy on whole runs over several seeds. A round starts at the rate
at which the best candidate so far is about to fail, which is where candidates differ; shorter runs flatter, so with
longer ones that is found anew. Of candidates that did the same one is simulated.

Engines of a large cluster do what those of a smaller one do, so all rounds but the last are run on
``MOST_EXPLORED_ENGINES`` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sluice_core.planning.goodput_comparison import Fidelity, GoodputComparison, RankedCandidate
from sluice_core.planning.slider_candidates import SearchSpace, SliderCandidate, resize
from sluice_core.planning.slider_steps import list_coarse, list_neighbours, list_parameter_neighbours, list_smaller

# The clock of a search: which share of it each round takes, as measured on examples.
STAGES = {"rate": 0.03, "explore": 0.30, "refine": 0.65, "parameters": 0.75, "compare": 1.0}

MOST_EXPLORED_ENGINES = (
    16  # more engines even bursts out a little more: a few percent of goodput, alike for all candidates
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """How much is simulated.

    Args:
        seeds: Of whole runs.
        duration_s: Length of whole runs; None: as many requests as ``num_requests``.
        num_requests: Requests of a whole run, and of one that ranks before it is shortened.
        least_duration_s: Least length of a whole run: what an overload needs to show.
        most_duration_s: Most length of a whole run.
        most_requests: Whole runs have no more for the sake of ``least_duration_s``: where so many come sooner, a
            smaller overload may stay unseen.
        filled_s: Least length of a whole run, and of one that ranks before it is shortened: what engines need to be
            full most of the time; down to 0.6 of it where that is more than ``most_requests``. Of engines that are
            still filling up the goodput is up to twice what it is in the long run.
        num_compared: Candidates of the last round.
    """

    seeds: tuple[int, ...] = (1, 2, 3)
    duration_s: float | None = None
    num_requests: int = 2400
    least_duration_s: float = 60.0
    most_duration_s: float = 600.0
    most_requests: int = 4500
    filled_s: float = 0.0
    num_compared: int = 4

    def choose_duration_s(self, rate_rps: float) -> float:
        """Choose the length of a whole run."""
        if self.duration_s is not None:
            return self.duration_s
        least_s = min(self.least_duration_s, self.most_requests / rate_rps)
        return min(max(self.num_requests / rate_rps, least_s, self._choose_filled_s(rate_rps)), self.most_duration_s)

    def choose_ranking_s(self, rate_rps: float, share: float) -> float:
        """Choose the length of a run that only ranks: a share of one that need not last until a small overload shows.

        All candidates are ranked by runs of one length, which flatters them alike.
        """
        if self.duration_s is not None:
            return share * self.duration_s
        enough_s = min(max(self.num_requests / rate_rps, self._choose_filled_s(rate_rps)), self.most_duration_s)
        return min(share * enough_s, self.choose_duration_s(rate_rps))

    def _choose_filled_s(self, rate_rps: float) -> float:
        return min(self.filled_s, max(self.most_requests / rate_rps, _LEAST_FILLED * self.filled_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSearchResult:
    """What a search found.

    Args:
        ranking: Whole runs of the best, best first.
        fidelity: Of these runs.
        explored: Every candidate that was tried, with the goodput that short runs gave it; in a large cluster what that
            of fewer engines makes one expect.
    """

    ranking: tuple[RankedCandidate, ...]
    fidelity: Fidelity
    explored: tuple[RankedCandidate, ...]

    @property
    def best(self) -> RankedCandidate:
        """The best candidate."""
        return self.ranking[0]


class Search:
    """Looks for the best candidate of a number of engines.

    Args:
        comparison: Compares.
        space: What may be chosen.
        effort: How much is simulated.
        report: Called with the progress, from 0 to 1, and the round.
    """

    def __init__(
        self,
        comparison: GoodputComparison,
        space: SearchSpace,
        effort: SearchEffort,
        report: Callable[[float, str], None] | None = None,
    ) -> None:
        self._comparison = comparison
        self._space = space
        self._effort = effort
        self._report = report

    def find_best(
        self, replicas: int, tensor_parallel: int, start_rps: float, in_force: SliderCandidate | None = None
    ) -> CandidateSearchResult:
        """Find the best candidate.

        Args:
            replicas: Engines.
            tensor_parallel: GPUs of each.
            start_rps: A guess of the goodput.
            in_force: The plan in force, which is compared whether or not it is within the bounds.

        Raises:
            ValueError: There is no candidate within the bounds.
        """
        initial = [] if in_force is None else [in_force]
        if replicas <= MOST_EXPLORED_ENGINES:
            explored, refined = self._explore_and_refine(replicas, tensor_parallel, start_rps, initial)
            return self._compare(refined, explored, initial)
        space = replace(self._space, prefill_heavy=self._space.prefill_heavy.scale(replicas))
        small = Search(self._comparison, space, self._effort, self._report)
        small_initial = [
            one for one in (resize(candidate, MOST_EXPLORED_ENGINES, space) for candidate in initial) if one is not None
        ]
        explored, refined = small._explore_and_refine(
            MOST_EXPLORED_ENGINES, tensor_parallel, start_rps * MOST_EXPLORED_ENGINES / replicas, small_initial
        )
        refined = self._scale_up(refined, replicas)
        return self._compare(self._add_between(refined, replicas), self._scale_up(explored, replicas), initial)

    def _explore_and_refine(
        self, replicas: int, tensor_parallel: int, start_rps: float, initial: Sequence[SliderCandidate]
    ) -> tuple[list[RankedCandidate], list[RankedCandidate]]:
        """Run all rounds but the last; returns what was explored, and the best of it refined."""
        coarse = list(dict.fromkeys([*initial, *list_coarse(self._space, replicas, tensor_parallel)]))
        if not coarse:
            raise ValueError(f"no plan of {replicas} engines is within the bounds")
        rate_rps = self._find_rate(coarse, start_rps)
        fidelity = self._choose_short_fidelity(rate_rps, _SHORT)
        explored = self._explore(coarse, rate_rps, fidelity)
        centres = self._drop_duplicates(explored, _NUM_CENTRES, fidelity)
        fidelity = self._choose_short_fidelity(explored[0].goodput_rps, _MIDDLE)
        refined = self._tune_parameters(
            self._refine(_select(centres, _NUM_CENTRES, initial), explored[0].goodput_rps, fidelity), fidelity
        )
        return explored, self._drop_duplicates(refined, len(refined), fidelity)

    def _scale_up(self, ranking: Sequence[RankedCandidate], replicas: int) -> list[RankedCandidate]:
        """Give candidates more engines at the same share, and as much more goodput; leave out those out of bounds."""
        enlarged: dict[SliderCandidate, RankedCandidate] = {}
        for ranked in ranking:
            candidate = resize(ranked.candidate, replicas, self._space)
            if candidate is not None and candidate not in enlarged:
                factor = replicas / ranked.candidate.replicas
                goodputs_rps = tuple([factor * goodput_rps for goodput_rps in ranked.goodputs_rps])
                enlarged[candidate] = RankedCandidate(candidate=candidate, goodputs_rps=goodputs_rps)
        return list(enlarged.values())

    def _add_between(self, ranking: Sequence[RankedCandidate], replicas: int) -> list[RankedCandidate]:
        """Put the numbers of P-heavy engines behind the best one that a smaller cluster could not have."""
        best = ranking[0]
        step = max(1, replicas // MOST_EXPLORED_ENGINES // 2)
        known = {ranked.candidate for ranked in ranking}
        between = [
            replace(best, candidate=moved)
            for moved in list_neighbours(self._space, best.candidate, step)
            if moved not in known
            and moved.prefill_heavy_tokens == best.candidate.prefill_heavy_tokens
            and moved.decode_heavy_tokens == best.candidate.decode_heavy_tokens
        ]
        return [best, *between, *ranking[1:]]

    def _report_stage(self, stage: str) -> None:
        if self._report is not None:
            self._report(STAGES[stage], stage)

    def _choose_short_fidelity(self, rate_rps: float, share: float) -> Fidelity:
        """Make runs of one seed that are a share of a whole one."""
        return Fidelity(seeds=self._effort.seeds[:1], duration_s=self._effort.choose_ranking_s(rate_rps, share))

    def _find_rate(self, coarse: Sequence[SliderCandidate], start_rps: float) -> float:
        """Find the order of magnitude of the goodput, by a few different candidates."""
        few = list(coarse[:1]) + list(coarse[1 :: max(1, len(coarse) // 3)])
        ranking = self._comparison.rank(few, self._choose_short_fidelity(start_rps, _SHORT), start_rps, _COARSE_FACTOR)
        self._report_stage("rate")
        return ranking[0].goodput_rps

    def _explore(self, coarse: Sequence[SliderCandidate], rate_rps: float, fidelity: Fidelity) -> list[RankedCandidate]:
        """Try candidates all over the space; strategies that are far behind at a lower rate, where theirs differ."""
        ranking = self._comparison.rank(coarse, fidelity, rate_rps, _FACTOR)
        for strategy in self._space.strategies:
            of_it = [ranked for ranked in ranking if ranked.candidate.strategy == strategy]
            if of_it and all(self._comparison.find_passing_rate(one.candidate, fidelity) is None for one in of_it):
                few = [ranked.candidate for ranked in of_it[:_MOST_BEHIND]]
                reranked = self._comparison.rank(few, fidelity, of_it[0].goodput_rps, _FACTOR)
                known = {ranked.candidate: ranked for ranked in [*ranking, *reranked]}
                ranking = sorted(known.values(), key=_negate_goodput)
        self._report_stage("explore")
        return ranking

    def _refine(self, centres: Sequence[SliderCandidate], rate_rps: float, fidelity: Fidelity) -> list[RankedCandidate]:
        """Go from the best to their neighbours while that gains something, or any of the first few was not expanded."""
        rate_rps = self._comparison.locate_goodput(centres[0], fidelity, rate_rps)
        ranking = self._comparison.rank(centres, fidelity, rate_rps, _FINE_FACTOR)
        expanded: list[SliderCandidate] = []
        num_idle = 0
        while len(ranking) < _MOST_REFINED and num_idle < _MOST_IDLE:
            centre = self._choose_centre(ranking, expanded, fidelity)
            if centre is None:
                break
            expanded.append(centre)
            known = {ranked.candidate for ranked in ranking}
            new = [moved for moved in list_neighbours(self._space, centre) if moved not in known]
            best_rps = ranking[0].goodput_rps
            ranking = self._rank_with_best(ranking, new, fidelity)
            ranking = self._cross_plateaus(ranking, centre, fidelity)
            num_idle = 0 if ranking[0].goodput_rps > best_rps * _WORTHWHILE else num_idle + 1
        self._report_stage("refine")
        return ranking

    def _choose_centre(
        self, ranking: Sequence[RankedCandidate], expanded: Sequence[SliderCandidate], fidelity: Fidelity
    ) -> SliderCandidate | None:
        """Choose whose neighbours to try: of the first few, near the best, the first that was not expanded yet."""
        least_rps = ranking[0].goodput_rps * _NEAR
        for ranked in self._drop_duplicates(ranking, _NUM_CENTRES, fidelity):
            candidate = ranked.candidate
            if ranked.goodput_rps < least_rps:
                break
            if not any(candidate == one or self._comparison.behave_alike(candidate, one, fidelity) for one in expanded):
                return candidate
        return None

    def _cross_plateaus(
        self, ranking: Sequence[RankedCandidate], centre: SliderCandidate, fidelity: Fidelity
    ) -> list[RankedCandidate]:
        """Go on to smaller chunks where the next smaller ones change nothing, as far as the first that do."""
        ranking = list(ranking)
        for of_prefill_heavy in (True, False):
            nearest, *farther = list_smaller(self._space, centre, of_prefill_heavy=of_prefill_heavy) or [centre]
            while farther and self._comparison.behave_alike(nearest, centre, fidelity):
                nearest, *farther = farther
                known = {ranked.candidate for ranked in ranking}
                if nearest not in known:
                    ranking = self._rank_with_best(ranking, [nearest], fidelity)
        return ranking

    def _drop_duplicates(
        self, ranking: Iterable[RankedCandidate], number: int, fidelity: Fidelity
    ) -> list[RankedCandidate]:
        """List the first few that do not do the same as one before them."""
        found: list[RankedCandidate] = []
        for ranked in ranking:
            if len(found) == number:
                break
            if not any(self._comparison.behave_alike(ranked.candidate, one.candidate, fidelity) for one in found):
                found.append(ranked)
        return found

    def _rank_with_best(
        self, ranking: Sequence[RankedCandidate], new: Sequence[SliderCandidate], fidelity: Fidelity
    ) -> list[RankedCandidate]:
        """Rank new candidates among those that were compared, from the rate on that the best one reached."""
        if not new:
            return list(ranking)
        best = ranking[0]
        rate_rps = self._comparison.find_passing_rate(best.candidate, fidelity) or best.goodput_rps
        reranked = self._comparison.rank([best.candidate, *new], fidelity, rate_rps, _FINE_FACTOR)
        known = {ranked.candidate: ranked for ranked in [*ranking, *reranked]}
        return sorted(known.values(), key=_negate_goodput)

    def _tune_parameters(self, refined: Sequence[RankedCandidate], fidelity: Fidelity) -> list[RankedCandidate]:
        """Try other M and alpha for the best; one is taken that gains more than chance would."""
        neighbours = list_parameter_neighbours(self._space, refined[0].candidate)
        tried = self._rank_with_best(refined, neighbours, fidelity)
        self._report_stage("parameters")
        best = next((one for one in tried if one.candidate in neighbours), None)
        default = next(one for one in tried if one.candidate == refined[0].candidate)
        if best is None or best.goodput_rps < default.goodput_rps * _WORTHWHILE:
            return list(refined)
        return [best, *refined]

    def _compare(
        self,
        refined: Sequence[RankedCandidate],
        explored: Sequence[RankedCandidate],
        initial: Sequence[SliderCandidate],
    ) -> CandidateSearchResult:
        """Look closely at the best few, at the best of each strategy, and at the plan in force."""
        best = _select(refined, self._effort.num_compared, initial)
        for strategy in self._space.strategies:
            of_it = [ranked for ranked in refined if ranked.candidate.strategy == strategy]
            of_it = of_it or [ranked for ranked in explored if ranked.candidate.strategy == strategy]
            best += [ranked.candidate for ranked in of_it[:1]]
        rate_rps = refined[0].goodput_rps
        starts_rps = dict.fromkeys(initial, rate_rps) | {
            one.candidate: one.goodput_rps for one in [*explored, *refined]
        }
        fidelity = Fidelity(seeds=self._effort.seeds, duration_s=self._effort.choose_duration_s(rate_rps))
        ranking = self._comparison.measure_goodputs(list(dict.fromkeys(best)), fidelity, starts_rps)
        self._report_stage("compare")
        everything = {ranked.candidate: ranked for ranked in [*ranking, *explored, *refined]}
        return CandidateSearchResult(
            ranking=tuple(ranking), fidelity=fidelity, explored=tuple(sorted(everything.values(), key=_negate_goodput))
        )


_LEAST_FILLED = 0.6  # of what engines need to be full most of the time
_SHORT, _MIDDLE = 0.25, 0.6  # lengths of the first rounds' runs
_COARSE_FACTOR, _FACTOR, _FINE_FACTOR = 1.5, 1.15, 1.06  # between rates of a round
_NUM_CENTRES = 3
_MOST_IDLE = 2  # centres one after the other whose neighbours are no better
_WORTHWHILE = 1.005  # of a goodput: a gain that is more than chance
_NEAR = 0.98  # of the best's goodput: what may still turn out to be better
_MOST_REFINED = 70
_MOST_BEHIND = 6  # candidates of a strategy that is far behind


def _select(
    ranking: Iterable[RankedCandidate], number: int, always: Iterable[SliderCandidate]
) -> list[SliderCandidate]:
    """Pick the first few, and what is always there."""
    first = [ranked.candidate for ranked in ranking][:number]
    return list(dict.fromkeys([*first, *always]))


def _negate_goodput(ranked: RankedCandidate) -> float:
    return -ranked.goodput_rps
