"""What the search tries, what it compares whole, what the plan says binds: on stand-ins for runs, trial by trial."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from planning_harness import EFFORT, Formula, Shares, make_problem, make_space, make_taichi

from sluice_core.planning.bottleneck import find_bottleneck
from sluice_core.planning.candidate_choice import rank_for_rate
from sluice_core.planning.goodput_comparison import Fidelity, GoodputComparison, RankedCandidate
from sluice_core.planning.planner import Goal, Planner, estimate_response_s
from sluice_core.planning.prediction import estimate_interval, predict
from sluice_core.planning.slider_search import MOST_EXPLORED_ENGINES, CandidateSearchResult, Search, SearchEffort
from sluice_core.planning.trials import SearchTrial, TrialEvaluator, TrialResult
from sluice_core.records import Slo
from sluice_core.strategies import STRATEGIES

ROUNDS_S = (0.25 * 20.0, 0.6 * 20.0, 20.0)  # lengths of the runs of a search, with ``EFFORT``
DETAIL = (
    TrialEvaluator(make_problem())
    .evaluate(SearchTrial(candidate=make_taichi(), seed=1, rate_rps=0.5, duration_s=60.0, is_detailed=True))
    .detail
)


class Landscape(Formula):
    """Stands in for runs: ``compute_rps`` gives a candidate's goodput; runs have details, and ends where given."""

    def __init__(self, compute_rps, compute_end_s=None):
        super().__init__({})
        self.compute_rps = compute_rps
        self.compute_end_s = compute_end_s

    def _goodput(self, trial):
        return self.compute_rps(trial.candidate)

    def run(self, trials):
        outcomes = [replace(outcome, detail=DETAIL) for outcome in super().run(trials)]
        if self.compute_end_s is None:
            return outcomes
        return [replace(one, end_s=self.compute_end_s(one.trial.candidate)) for one in outcomes]

    def search(self, space, replicas=4, start_rps=3.0, in_force=None):
        return Search(GoodputComparison(self.run, 0.9), space, EFFORT).find_best(replicas, 1, start_rps, in_force)

    def list_tried(self, duration_s):
        return {trial.candidate for trial in self.trials if trial.duration_s == duration_s}


# --- the search ----------------------------------------------------------------------------------------------------


def test_rounds_take_a_quarter_of_a_whole_run_then_more_then_all():
    landscape = Landscape(lambda candidate: 3.0 + candidate.prefill_heavy_tokens / 1e4)
    found = landscape.search(make_space())
    assert {trial.duration_s for trial in landscape.trials} == set(ROUNDS_S)
    assert {one.candidate for one in found.ranking} == landscape.list_tried(20.0)
    assert landscape.trials[0].rate_rps == 3.0


@pytest.mark.parametrize("replicas", [4, 64])
def test_the_search_begins_at_the_plan_in_force_and_compares_it_however_bad(replicas):
    share = replicas // 4
    in_force = make_taichi(num_prefill_heavy=share, num_decode_heavy=replicas - share, prefill_heavy_tokens=300)
    landscape = Landscape(lambda candidate: replicas / (2.0 if candidate.prefill_heavy_tokens == 300 else 1.0))
    found = landscape.search(make_space(), replicas, float(replicas), in_force)
    assert in_force in {one.candidate for one in found.ranking}
    assert found.best.candidate != in_force
    scouted = min(replicas, MOST_EXPLORED_ENGINES)
    assert {(one.prefill_heavy_tokens, one.replicas) for one in landscape.list_tried(5.0)} >= {(300, scouted)}


def test_large_clusters_are_scouted_at_the_rate_of_a_small_one_and_expected_in_proportion():
    shares = Shares(0.5)
    found = Search(GoodputComparison(shares.run, 0.9), make_space(), EFFORT).find_best(64, 1, 60.0)
    assert (shares.trials[0].candidate.replicas, shares.trials[0].rate_rps) == (16, 15.0)
    for one in found.explored:
        share = one.candidate.num_prefill_heavy / 64
        penalty = 0.8 if one.candidate.strategy == "aggregated" else 1.0
        assert one.goodput_rps == pytest.approx(64 * (1.0 - abs(share - 0.5)) * penalty, rel=0.4)


@pytest.mark.parametrize("best", [22, 34, 38])
def test_numbers_that_a_small_cluster_cannot_have_are_tried_between(best):
    """16 engines scout in steps of four of 64."""
    shares = Shares(best / 64)
    found = Search(GoodputComparison(shares.run, 0.9), make_space(), EFFORT).find_best(64, 1, 60.0)
    assert found.best.candidate.num_prefill_heavy == best


def test_of_a_strategy_far_behind_the_best_is_compared():
    """At the leaders' rate all of its candidates meet nothing, and look alike."""
    penalties = {256: 0.8, 512: 1.0, 1024: 0.7}
    landscape = Landscape(
        lambda one: (0.3 if one.strategy == "aggregated" else 1.0) * 3.0 * penalties.get(one.prefill_heavy_tokens, 0.9)
    )
    found = landscape.search(make_space())
    chosen = {one.candidate.strategy: one.candidate.prefill_heavy_tokens for one in reversed(found.ranking)}
    whole = {"disaggregated": 2048, "dynaserve": 2048, "ecoserve": 2048, "sluice": 2048}
    assert chosen == {"taichi": 512, "aggregated": 512, "flowprefill": 512, **whole}


@pytest.mark.parametrize(("gain", "chosen"), [(1.02, 0.9), (1.003, 0.95)], ids=["more than chance", "chance"])
def test_parameters_change_for_more_than_chance(gain, chosen):
    landscape = Landscape(lambda candidate: 3.0 * (gain if candidate.watermark == 0.9 else 1.0))
    found = landscape.search(make_space(strategies=("taichi",), watermarks=(0.9, 0.95)))
    assert found.best.candidate.watermark == chosen


def test_the_search_goes_on_to_smaller_chunks_until_they_change_something():
    """No prompt fills a chunk of 24 tokens; that of 16 is better, and seven steps off."""
    chunks = (16, 24, 32, 48, 64, 96, 128, 4096)
    landscape = Landscape(
        lambda candidate: 3.6 if candidate.prefill_heavy_tokens == 16 else 3.0,
        lambda candidate: 1.0 if candidate.prefill_heavy_tokens == 16 else 2.0,
    )
    space = make_space(strategies=("taichi",), prefill_heavy_tokens=chunks, decode_heavy_tokens=(0,))
    assert landscape.search(space).best.candidate.prefill_heavy_tokens == 16


def test_neighbours_are_followed_as_far_as_they_gain():
    chunks = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    landscape = Landscape(lambda one: 3.0 - 0.1 * abs(math.log2(one.prefill_heavy_tokens / 384)))
    found = landscape.search(make_space(strategies=("aggregated",), prefill_heavy_tokens=chunks))
    assert found.best.candidate.prefill_heavy_tokens == 384


# --- the comparison ------------------------------------------------------------------------------------------------


def test_runs_give_up_at_twice_the_allowed_misses_and_a_little_later_where_a_goodput_is_measured():
    landscape = Landscape(lambda _: 3.0)
    comparison, fidelity = GoodputComparison(landscape.run, 0.9), Fidelity(seeds=(0,), duration_s=10.0)
    comparison.rank([make_taichi()], fidelity, 3.0, 1.1)
    assert [trial.least_attainment for trial in landscape.trials] == pytest.approx([0.8] * len(landscape.trials))
    landscape.trials.clear()
    comparison.measure_goodputs([make_taichi(watermark=0.9)], fidelity, {make_taichi(watermark=0.9): 3.0})
    assert [trial.least_attainment for trial in landscape.trials] == pytest.approx([0.75] * len(landscape.trials))


def test_others_begin_where_the_leader_was_too_hopeful():
    landscape = Landscape(lambda _: 3.0)
    leader, other = make_taichi(), make_taichi(prefill_heavy_tokens=256)
    GoodputComparison(landscape.run, 0.9).measure_goodputs(
        [leader, other], Fidelity(seeds=(0,), duration_s=10.0), {leader: 6.0, other: 5.0}
    )
    first = next(trial for trial in landscape.trials if trial.candidate == other)
    assert first.rate_rps == pytest.approx(2.5, rel=0.02)


def test_a_run_gives_up_when_its_attainment_cannot_be_reached_any_more():
    evaluator = TrialEvaluator(replace(make_problem(), slo=Slo(ttft_s=0.1, tpot_s=9.0)))
    trial = SearchTrial(candidate=make_taichi(), seed=1, rate_rps=4.0, duration_s=20.0, is_detailed=True)
    whole = evaluator.evaluate(trial)
    num_requests = whole.detail.summary.num_requests
    num_missed = num_requests - whole.detail.summary.num_met
    assert 1 < num_missed < num_requests
    reached = evaluator.evaluate(replace(trial, least_attainment=1.0 - num_missed / num_requests))
    given_up = evaluator.evaluate(replace(trial, least_attainment=1.0 - (num_missed - 1) / num_requests))
    assert (reached.end_s, reached.detail) == (whole.end_s, whole.detail)
    assert given_up.end_s < whole.end_s
    assert given_up.detail is None


@pytest.mark.parametrize(
    ("slo", "misses"),
    [
        (Slo(ttft_s=1e-6, tpot_s=9.0), (1, 0, 0)),
        (Slo(ttft_s=99.0, tpot_s=1e-6), (0, 1, 0)),
        (Slo(ttft_s=1e-6, tpot_s=1e-6), (0, 0, 1)),
    ],
    ids=["ttft", "tpot", "both"],
)
def test_details_count_which_objective_was_missed(slo, misses):
    trial = SearchTrial(candidate=make_taichi(), seed=1, rate_rps=1.0, duration_s=20.0, is_detailed=True)
    detail = TrialEvaluator(replace(make_problem(), slo=slo)).evaluate(trial).detail
    counts = detail.num_missed_ttft, detail.num_missed_tpot, detail.num_missed_both
    assert counts == tuple(share * detail.summary.num_requests for share in misses)


# --- what binds ----------------------------------------------------------------------------------------------------


class Short:
    """Stands in for runs that reach 0.85 from 3.4 requests/s on, and more with more of a resource."""

    def __init__(self, candidate, missed, gains):
        self.candidate, self.gains, self.trials = candidate, gains, []
        numbers = dict(zip(("num_missed_ttft", "num_missed_tpot", "num_missed_both"), missed, strict=True))
        self.detail = replace(DETAIL, summary=replace(DETAIL.summary, num_requests=100), **numbers)

    def run(self, trials):
        self.trials += trials
        return [
            replace(
                Formula({512: 1.0}).run([replace(trial, candidate=make_taichi())])[0],
                trial=trial,
                attainment=0.85 + self.gains.get(self._name(trial), 0.0) if trial.rate_rps > 3.4 else 1.0,
                detail=self.detail,
            )
            for trial in trials
        ]

    def _name(self, trial):
        if trial.candidate.num_prefill_heavy > self.candidate.num_prefill_heavy:
            return "prefill"
        if trial.candidate.num_decode_heavy > self.candidate.num_decode_heavy:
            return "decode"
        return "kv" if trial.kv_scale > 1.0 else ""


@pytest.mark.parametrize(
    ("missed", "gains", "objective", "resource"),
    [
        ((12, 3, 1), {"kv": 0.01, "prefill": 0.1, "decode": 0.02}, "ttft", "prefill"),
        ((3, 12, 1), {"kv": 0.01, "prefill": 0.02, "decode": 0.1}, "tpot", "decode"),
        ((12, 3, 1), {"kv": 0.06, "prefill": 0.1, "decode": 0.02}, "ttft", "kv"),
        ((12, 3, 1), {"kv": 0.04, "prefill": 0.1, "decode": 0.02}, "ttft", "prefill"),
        ((5, 5, 1), {"kv": -0.01, "prefill": 0.0, "decode": -0.02}, "ttft", "none"),
        ((5, 5, 1), {"kv": 0.0, "prefill": 0.0, "decode": 0.0}, "ttft", "none"),
        ((5, 5, 1), {"kv": -0.01, "prefill": -0.05, "decode": -0.04}, "ttft", "none"),
    ],
    ids=["late", "slow", "kv does half", "kv does less", "nothing helps", "nothing does anything", "all do harm"],
)
def test_what_binds_is_what_is_missed_most_and_whose_addition_helps_most(missed, gains, objective, resource):
    candidate = make_taichi(num_prefill_heavy=2, num_decode_heavy=2)
    short = Short(candidate, missed, gains)
    found = find_bottleneck(short.run, candidate, 3.0, 0.9, Fidelity(seeds=(1, 2), duration_s=9.0))
    assert (found.objective, found.resource) == (objective, resource)
    assert found.missed == dict(zip(("ttft", "tpot", "both"), (count / 100 for count in missed), strict=True))
    assert found.attainment_gains == pytest.approx(gains)
    assert found.rate_rps == pytest.approx(3.0 * 1.08**2)
    assert {trial.kv_scale for trial in short.trials} == {1.0, 1.25}


@pytest.mark.parametrize(("missed", "resource"), [((9, 1, 0), "prefill"), ((1, 9, 0), "decode")], ids=["late", "slow"])
def test_engines_that_are_all_alike_lack_what_is_missed(missed, resource):
    candidate = make_space().make_candidate("aggregated", 16, 1, prefill_heavy_tokens=512)
    short = Short(candidate, missed, {"prefill": 0.1})
    found = find_bottleneck(short.run, candidate, 3.0, 0.9, Fidelity(seeds=(1,), duration_s=9.0))
    assert (found.resource, found.attainment_gains) == (resource, {"kv": 0.0, resource: pytest.approx(0.1)})
    # A little more is an engine of eight.
    assert max(trial.candidate.replicas for trial in short.trials) == 18
    assert {trial.kv_scale for trial in short.trials} == {1.0, 1.125}


@pytest.mark.parametrize(("start_rps", "target"), [(0.5, 0.9), (3.0, 0.85)], ids=["low rates", "met just so"])
def test_a_rate_that_nothing_overloads_is_given_up(start_rps, target):
    short = Short(make_taichi(), (1, 0, 0), {})
    found = find_bottleneck(short.run, make_taichi(), start_rps, target, Fidelity(seeds=(1,), duration_s=9.0))
    assert found.rate_rps == pytest.approx(start_rps * 1.08**6)


# --- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate_rps", "order"),
    [(None, (9.0, 4.0, 3.9)), (4.0, (4.0, 9.0, 3.9)), (4.1, (9.0, 4.0, 3.9)), (9.5, (9.0, 4.0, 3.9))],
    ids=["no rate", "a rate that two serve, one of them just so", "a rate that one serves", "a rate that none serves"],
)
def test_of_those_that_serve_a_rate_the_fewest_gpus_win_and_else_the_highest_goodput(rate_rps, order):
    fidelity = Fidelity(seeds=(1,), duration_s=9.0)
    found = []
    for goodput_rps, num_gpus in ((3.9, 1), (4.0, 2), (9.0, 4)):
        candidate = make_taichi(num_prefill_heavy=1, num_decode_heavy=0, tensor_parallel=num_gpus)
        ranked = RankedCandidate(candidate=candidate, goodputs_rps=(goodput_rps,))
        found.append(CandidateSearchResult(ranking=(ranked,), fidelity=fidelity, explored=()))
    found.sort(key=lambda one: rank_for_rate(one, rate_rps))
    assert tuple(one.best.goodput_rps for one in found) == order


def test_an_expected_attainment_is_a_share():
    attainments = {1: 0.99, 2: 0.9, 3: 0.02, 4: 0.3}

    def run(trials):
        return [TrialResult(trial=one, attainment=attainments[one.seed], num_iterations=1) for one in trials]

    high, low = (predict(run, make_taichi(), 2.0, seeds, 9.0).attainment for seeds in ((1, 2), (3, 4)))
    assert (high.mean, high.high) == (pytest.approx(0.945), 1.0)
    assert (low.mean, low.low) == (pytest.approx(0.16), 0.0)


@pytest.mark.parametrize(("number", "quantile"), [(2, 12.706), (16, 2.131), (17, 1.96), (100, 1.96)])
def test_an_interval_is_students_up_to_fifteen_degrees_of_freedom(number, quantile):
    values = [1.0, 3.0] * (number // 2) + [2.0] * (number % 2)
    half = quantile * statistics.stdev(values) / math.sqrt(number)
    interval = estimate_interval(values)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half))


def plan(landscape, goal, in_force=None, space=None, effort=None, problem=None):
    planner = Planner(problem or make_problem(), space or make_space(), effort or EFFORT, landscape.run)
    return planner.plan(goal, in_force)


@pytest.mark.parametrize(
    ("rate_rps", "is_met", "predicted_rps"),
    [(None, True, 4.0), (3.0, True, 3.0), (9.0, False, 4.0)],
    ids=["no rate", "a rate that is met", "a rate that is not"],
)
def test_what_to_expect_is_of_other_seeds_at_the_wanted_rate_or_at_the_goodput(rate_rps, is_met, predicted_rps):
    landscape = Landscape(lambda candidate: float(candidate.replicas))
    goal = Goal(target=0.9, most_replicas=4, least_replicas=4, rate_rps=rate_rps)
    result = plan(landscape, goal)
    assert result.is_met is is_met
    assert result.prediction.rate_rps == pytest.approx(predicted_rps, rel=0.02)
    detailed = [trial for trial in landscape.trials if trial.is_detailed]
    assert {trial.seed for trial in detailed} == {1001}
    assert detailed[0].rate_rps == result.prediction.rate_rps


@pytest.mark.parametrize(
    ("per_engine", "rate_rps", "chosen"),
    [
        ({1: 1.0, 2: 2.5}, None, (4, 2)),
        ({1: 1.5, 2: 2.5}, None, (8, 1)),
        ({1: 1.0, 2: 2.5}, 5.5, (3, 2)),
        ({1: 1.5, 2: 2.5}, 5.5, (4, 1)),
        ({1: 1.0, 2: 1.1}, 8.5, (8, 2)),
    ],
    ids=["larger engines", "smaller engines", "fewest larger", "fewest smaller", "only larger serve it"],
)
def test_engines_have_as_many_gpus_as_serve_best(per_engine, rate_rps, chosen):
    landscape = Landscape(lambda one: one.replicas * per_engine[one.tensor_parallel])
    goal = Goal(target=0.9, most_replicas=8, least_replicas=2, rate_rps=rate_rps, tensor_parallels=(1, 2))
    result = plan(landscape, goal, space=make_space(strategies=("aggregated",)))
    assert result.is_met
    assert (result.chosen.replicas, result.chosen.tensor_parallel) == chosen


def test_alternatives_say_how_far_they_are_behind():
    landscape = Landscape(lambda one: {256: 3.0, 512: 4.0, 1024: 3.6}[one.prefill_heavy_tokens])
    result = plan(
        landscape,
        Goal(target=0.9, most_replicas=4),
        space=make_space(strategies=("aggregated",)),
        effort=replace(EFFORT, seeds=(1, 2)),
    )
    differences = {one.ranked.candidate.prefill_heavy_tokens: one.difference.mean for one in result.alternatives}
    assert differences == {1024: pytest.approx(-0.1, abs=0.01), 256: pytest.approx(-0.25, abs=0.01)}


def test_the_plan_in_force_counts_for_as_many_engines_with_as_many_gpus():
    landscape = Landscape(lambda candidate: float(candidate.replicas))
    goal = Goal(target=0.9, most_replicas=4)
    in_force = make_taichi(prefill_heavy_tokens=300)
    result = plan(landscape, goal, in_force)
    assert result.in_force is not None
    assert result.in_force.goodput_rps == pytest.approx(4.0, rel=0.02)
    assert plan(landscape, goal, replace(in_force, num_decode_heavy=3)).in_force is None


@pytest.mark.parametrize(
    ("ttft_s", "outputs", "compute_s"),
    [
        (2.0, (10, 60), lambda _: 2.0 / 0.04),
        (0.1, (2000, 2000), lambda problem: 4 * estimate_response_s(problem)),
    ],
    ids=["what an overload needs to show", "four answers of full engines"],
)
def test_whole_runs_last_as_long_as_their_result_needs(ttft_s, outputs, compute_s):
    problem = make_problem(lengths=((200, 2000), outputs))
    problem = replace(problem, slo=Slo(ttft_s=ttft_s, tpot_s=problem.slo.tpot_s))
    effort = SearchEffort(
        seeds=(1,), num_requests=1, least_duration_s=1.0, most_duration_s=9e9, most_requests=10**9, num_compared=1
    )
    landscape = Landscape(lambda _: 3.0)
    result = plan(landscape, Goal(target=0.9, most_replicas=2), problem=problem, effort=effort)
    assert result.found.fidelity.duration_s == pytest.approx(compute_s(problem))


def test_every_strategy_is_among_the_alternatives():
    goodputs_rps = {
        "taichi": 4.0,
        "aggregated": 1.0,
        "disaggregated": 2.0,
        "flowprefill": 3.0,
        "dynaserve": 1.1,
        "ecoserve": 1.2,
        "sluice": 1.5,
    }
    landscape = Landscape(lambda one: goodputs_rps[one.strategy])
    result = plan(landscape, Goal(target=0.9, most_replicas=4))
    assert {one.ranked.candidate.strategy for one in result.alternatives} | {result.chosen.strategy} == set(STRATEGIES)
