"""The planner: what it may choose, how it compares, and that it finds what an exhaustive search finds."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
from planning_harness import EFFORT, PROFILE, Formula, Shares, make_problem, make_space, make_taichi

from sluice_core.planning.attainment_curve import AttainmentCurve
from sluice_core.planning.bottleneck import find_bottleneck
from sluice_core.planning.goodput_comparison import Fidelity, GoodputComparison
from sluice_core.planning.planner import Goal, Planner, estimate_response_s, estimate_start_rps
from sluice_core.planning.prediction import estimate_interval
from sluice_core.planning.slider_candidates import (
    PrefillHeavyBounds,
    SearchSpace,
    SliderCandidate,
)
from sluice_core.planning.slider_search import Search, SearchEffort
from sluice_core.planning.trials import PlanningProblem, SearchTrial, TrialEvaluator, TrialResult, build_cell
from sluice_core.records import Role, Slo

CHATS = ((10, 60), (20, 60))


def make_comparison(problem: PlanningProblem, target: float = 0.9) -> GoodputComparison:
    evaluator = TrialEvaluator(problem)
    return GoodputComparison(lambda trials: [evaluator.evaluate(trial) for trial in trials], target)


# --- curves and intervals ------------------------------------------------------------------------------------------


def test_goodput_is_where_a_line_between_the_rates_crosses_the_target() -> None:
    assert AttainmentCurve([(1.0, 0.95), (1.1, 0.85)]).estimate_goodput_rps(0.9) == pytest.approx(math.sqrt(1.1))
    assert AttainmentCurve([(1.0, 0.9), (1.1, 0.2)]).estimate_goodput_rps(0.9) == pytest.approx(1.0)
    # A rate that passes counts, whatever failed below it.
    assert 1.2 <= AttainmentCurve([(1.0, 0.95), (1.1, 0.85), (1.2, 0.91), (1.3, 0.1)]).estimate_goodput_rps(0.9) < 1.3
    assert AttainmentCurve().estimate_goodput_rps(0.9) == 0.0


def test_one_sided_knowledge_is_extended_towards_the_target() -> None:
    assert 0.85 < AttainmentCurve([(1.0, 0.5)]).estimate_goodput_rps(0.9) < 1.0
    assert 1.0 < AttainmentCurve([(1.0, 1.0)]).estimate_goodput_rps(0.9) < 1.1


def test_intervals_are_students() -> None:
    interval = estimate_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.high - 2.0) == (2.0, pytest.approx(4.303 / math.sqrt(3), rel=1e-3))
    assert estimate_interval([0.9], 0.0, 1.0).low == 0.0
    assert estimate_interval([0.99, 0.9], 0.0, 1.0).high == 1.0


ONE = Fidelity(seeds=(0,), duration_s=10.0)


@pytest.mark.parametrize("start_rps", [0.3, 3.0, 30.0], ids=["below", "near", "above"])
def test_climbing_finds_the_order_from_any_start(start_rps) -> None:
    formula = Formula({256: 2.0, 512: 3.0, 1024: 2.8})
    candidates = [make_taichi(prefill_heavy_tokens=tokens) for tokens in formula.goodputs]
    ranking = GoodputComparison(formula.run, 0.9).rank(candidates, ONE, start_rps, 1.1)
    assert [ranked.candidate.prefill_heavy_tokens for ranked in ranking] == [512, 1024, 256]
    assert ranking[0].goodput_rps == pytest.approx(3.0, rel=0.04)


def test_those_that_fall_behind_cost_one_run_each() -> None:
    formula = Formula({256: 2.0, 512: 3.0, 1024: 2.8})
    candidates = [make_taichi(prefill_heavy_tokens=tokens) for tokens in formula.goodputs]
    GoodputComparison(formula.run, 0.9).rank(candidates, ONE, 2.9, 1.1)
    assert [trial.candidate.prefill_heavy_tokens for trial in formula.trials] == [256, 512, 1024, 512]


class Unfilled(Formula):
    """Stands in for runs of prompts that fill no chunk of 512 tokens."""

    def run(self, trials):
        return [
            replace(outcome, end_s=min(512.0, outcome.trial.candidate.prefill_heavy_tokens))
            for outcome in super().run(trials)
        ]


def test_candidates_that_have_done_the_same_share_a_run() -> None:
    formula = Unfilled({256: 3.0, 512: 3.0, 1024: 3.0})
    candidates = [make_taichi(prefill_heavy_tokens=tokens) for tokens in formula.goodputs]
    comparison = GoodputComparison(formula.run, 0.9)
    ranking = comparison.rank(candidates, ONE, 2.9, 1.1)
    # At the first rate nothing is known of them yet.
    assert [trial.candidate.prefill_heavy_tokens for trial in formula.trials] == [256, 512, 1024, 256, 512]
    assert len({ranked.goodput_rps for ranked in ranking}) == 1
    assert comparison.behave_alike(candidates[1], candidates[2], ONE)
    assert not comparison.behave_alike(candidates[0], candidates[1], ONE)
    assert not comparison.behave_alike(candidates[1], make_taichi(prefill_heavy_tokens=64), ONE)


def test_candidates_behave_alike_where_all_their_runs_ended_at_the_same_moments() -> None:
    one, other = (make_taichi(prefill_heavy_tokens=tokens) for tokens in (256, 512))
    ends_s = {(256, 1.0): 9.0, (512, 1.0): 9.0, (256, 2.0): 8.0, (512, 2.0): 7.0}

    def run(trials):
        return [
            TrialResult(
                trial=trial,
                attainment=1.0,
                num_iterations=1,
                end_s=ends_s[trial.candidate.prefill_heavy_tokens, trial.rate_rps],
            )
            for trial in trials
        ]

    comparison = GoodputComparison(run, 0.9)
    for rate_rps, are_alike in ((1.0, True), (2.0, False)):
        assert comparison.behave_alike(one, other, ONE) == (rate_rps > 1.0), "so far"
        trials = [SearchTrial(candidate=each, seed=0, rate_rps=rate_rps, duration_s=10.0) for each in (one, other)]
        comparison.run(trials)
        assert comparison.behave_alike(one, other, ONE) == are_alike


@pytest.mark.parametrize(("kv_scale", "kv_blocks"), [(1.0, 4001), (2.0, 8002), (0.5, 2000), (1e-9, 1)])
def test_a_cell_has_its_share_of_the_kv_blocks(kv_scale, kv_blocks) -> None:
    cell = build_cell(make_problem(kv_blocks=4001), make_taichi(), 3, kv_scale)
    assert {engine.kv_blocks_total for engine in cell.engines} == {kv_blocks}
    assert cell.seed == 3
    assert [engine.role for engine in cell.engines].count(Role.PREFILL_HEAVY) == make_taichi().num_prefill_heavy


def test_where_to_begin_is_found_by_one_candidate() -> None:
    formula = Formula({512: 3.0})
    assert 2.8 < GoodputComparison(formula.run, 0.9).locate_goodput(make_taichi(), ONE, 6.0) <= 3.0
    assert len(formula.trials) < 10


def test_a_leader_that_never_passes_does_not_move_the_others() -> None:
    never = Never({})
    assert GoodputComparison(never.run, 0.9).locate_goodput(make_taichi(), ONE, 6.0) == 6.0
    formula = Formula({256: 1e-9, 512: 3.0})
    leader, other = (make_taichi(prefill_heavy_tokens=tokens) for tokens in (256, 512))
    (best, worst) = GoodputComparison(formula.run, 0.9).measure_goodputs(
        [leader, other], ONE, {leader: 4.0, other: 3.5}
    )
    assert (best.candidate, worst.candidate) == (other, leader)
    assert best.goodput_rps == pytest.approx(3.0, rel=0.01)


NEXT_RATES = {
    "nothing is known": (0.9, {}, 7.0),
    "it passes by far": (0.9, {1.0: 1.0}, 1.08),
    "it passes twice: steps grow": (0.9, {1.0: 1.0, 1.08: 0.95}, 1.08 * 1.16),
    "it passes just so": (0.9, {1.0: 0.92}, 1.04),
    "it passes a low target by far": (0.5, {1.0: 1.0}, math.exp(0.1 / 0.45 * 0.5) * 1.02),
    "it fails by far": (0.9, {1.0: 0.0}, math.exp(-0.1 / 0.45 * 0.9) / 1.02),
    "it fails clearly": (0.9, {1.0: 0.8}, 1 / 1.08),
    "it fails just so": (0.9, {1.0: 0.85}, 1 / 1.04),
    "the line crosses between": (0.9, {1.0: 0.94, 1.2: 0.82}, 1.2 ** (1 / 3)),
    "the line crosses near the lower": (0.9, {1.0: 0.91, 1.2: 0.5}, 1.02),
    "the line crosses near the upper": (0.9, {1.0: 1.0, 1.2: 0.89}, 1.2 / 1.02),
    "it is level far below": (0.9, {1.0: 0.95, 1.2: 0.5}, math.sqrt(1.2)),
    "it is level, and near": (0.9, {1.0: 0.96, 1.12: 0.5}, 1.02),
    "close enough": (0.9, {1.0: 0.95, 1.06: 0.85}, None),
    "not quite": (0.9, {1.0: 0.92, 1.061: 0.88}, math.sqrt(1.061)),
}


@pytest.mark.parametrize(("target", "points", "rate_rps"), NEXT_RATES.values(), ids=NEXT_RATES)
def test_the_next_rate_follows_from_what_is_known(target, points, rate_rps) -> None:
    chosen = make_comparison(make_problem(), target)._choose_rate(AttainmentCurve(points.items()), 7.0)
    assert chosen == (None if rate_rps is None else pytest.approx(rate_rps))


@pytest.mark.parametrize("start_rps", [0.05, 2.0, 90.0], ids=["far below", "near", "far above"])
def test_sharpening_finds_the_goodput_of_each_seed(start_rps) -> None:
    formula = Formula({512: 3.0})
    fidelity = Fidelity(seeds=(1, 2), duration_s=10.0)
    (ranked,) = GoodputComparison(formula.run, 0.9).measure_goodputs(
        [make_taichi()], fidelity, {make_taichi(): start_rps}
    )
    assert ranked.goodputs_rps == pytest.approx((3.03, 3.06), rel=0.01)


class Never(Formula):
    """Stands in for runs in which a share of the requests misses, whatever the rate."""

    def run(self, trials):
        self.trials += trials
        return [TrialResult(trial=trial, attainment=0.7, num_iterations=1) for trial in trials]


@pytest.mark.parametrize("start_rps", [3.0, 0.0], ids=["near", "known to be hopeless"])
def test_what_misses_the_target_at_any_rate_has_no_goodput(start_rps) -> None:
    formula = Never({512: 3.0})
    fidelity = Fidelity(seeds=(1, 2), duration_s=10.0)
    (ranked,) = GoodputComparison(formula.run, 0.9).measure_goodputs(
        [make_taichi()], fidelity, {make_taichi(): start_rps}
    )
    assert ranked.goodput_rps < 0.01
    assert all(trial.rate_rps > 1e-5 for trial in formula.trials)


# --- the search ----------------------------------------------------------------------------------------------------


def test_many_requests_shorten_runs_but_not_below_what_fills_the_engines() -> None:
    effort = SearchEffort(
        num_requests=1000, least_duration_s=100.0, most_duration_s=500.0, most_requests=3000, filled_s=40.0
    )
    assert [effort.choose_duration_s(rate_rps) for rate_rps in (1.0, 5.0, 50.0, 1000.0)] == [500.0, 200.0, 60.0, 24.0]
    assert [effort.choose_ranking_s(rate_rps, 0.5) for rate_rps in (1.0, 5.0, 50.0, 1000.0)] == [
        250.0,
        100.0,
        20.0,
        12.0,
    ]
    fixed = SearchEffort(duration_s=8.0)
    assert (fixed.choose_duration_s(1e3), fixed.choose_ranking_s(1e3, 0.5)) == (8.0, 4.0)


def test_an_answer_takes_as_long_as_on_a_full_engine_or_as_it_may() -> None:
    chats = make_problem(lengths=((40, 40), (200, 200)), max_num_seqs=100)
    # An iteration of 100 decodes and 20 tokens of prompts.
    full_s = PROFILE.estimate_iteration_s(120, 1, 20, 20 * 20.0, 100, 100 * 140)
    assert estimate_response_s(replace(chats, slo=Slo(ttft_s=1.0, tpot_s=0.2))) == pytest.approx(200 * full_s)
    assert estimate_response_s(replace(chats, slo=Slo(ttft_s=1.0, tpot_s=0.01))) == pytest.approx(200 * 0.01)


def list_everything(space: SearchSpace) -> list[SliderCandidate]:
    """Every candidate of three engines."""
    return [
        *(space.make_candidate("aggregated", 3, 1, prefill_heavy_tokens=n) for n in space.prefill_heavy_tokens),
        *(space.make_candidate("disaggregated", 3, 1, num_prefill_heavy=count) for count in (1, 2)),
        space.make_candidate("sluice", 3, 1),
        *(
            space.make_candidate(
                "taichi", 3, 1, num_prefill_heavy=count, prefill_heavy_tokens=prefill, decode_heavy_tokens=decode
            )
            for count in (1, 2)
            for prefill in space.prefill_heavy_tokens
            for decode in space.decode_heavy_tokens
        ),
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("problem", "prefill_heavy_tokens", "effort"),
    [
        (make_problem(), (256, 1024), replace(EFFORT, duration_s=10.0)),
        # Answers of half a second, 200 requests/s.
        (
            make_problem(lengths=CHATS, max_num_seqs=32),
            (64, 1024),
            SearchEffort(seeds=(1,), num_requests=150, most_requests=450),
        ),
    ],
    ids=["reports", "chats"],
)
def test_the_search_is_as_good_as_trying_everything(
    problem: PlanningProblem, prefill_heavy_tokens: tuple[int, ...], effort: SearchEffort
) -> None:
    space, start_rps = make_space(prefill_heavy_tokens=prefill_heavy_tokens), estimate_start_rps(problem, 3, 1)
    effort = replace(effort, filled_s=3.0 * estimate_response_s(problem))
    found = Search(make_comparison(problem), space, effort).find_best(3, 1, start_rps)
    everything = list_everything(space)
    ranking = make_comparison(problem).measure_goodputs(
        everything, found.fidelity, dict.fromkeys(everything, start_rps)
    )
    exhaustive = {ranked.candidate: ranked.goodput_rps for ranked in ranking}
    assert exhaustive[found.best.candidate] >= 0.98 * max(exhaustive.values())
    assert max(exhaustive.values()) > 1.2 * min(exhaustive.values())


@pytest.mark.parametrize(
    "bounds",
    [PrefillHeavyBounds(), PrefillHeavyBounds(low=10, high=40, is_percent=False)],
    ids=["any number", "a number at most"],
)
@pytest.mark.parametrize("best", [20, 38, 45])
def test_large_clusters_are_scouted_small_and_compared_whole(bounds, best) -> None:
    formula = Shares(best / 64)
    found = Search(GoodputComparison(formula.run, 0.9), make_space(prefill_heavy=bounds), EFFORT).find_best(64, 1, 30.0)
    wanted = min(best, 40) if not bounds.is_percent else best
    assert abs(found.best.candidate.num_prefill_heavy - wanted) <= 2
    assert {ranked.candidate.replicas for ranked in [*found.ranking, *found.explored]} == {64}
    num_whole = sum(trial.candidate.replicas == 64 for trial in formula.trials)
    assert 0 < num_whole < len(formula.trials) / 2


@pytest.mark.timeout(600)
def test_the_plan_in_force_is_compared_even_out_of_bounds() -> None:
    problem, space = make_problem(), make_space(strategies=("aggregated",), prefill_heavy_tokens=(256, 512))
    in_force = make_taichi(num_prefill_heavy=1, num_decode_heavy=1, prefill_heavy_tokens=300)
    evaluator = TrialEvaluator(problem)
    stages: list[float] = []
    planner = Planner(
        problem,
        space,
        SearchEffort(seeds=(1, 2), duration_s=8.0),
        lambda trials: [evaluator.evaluate(trial) for trial in trials],
        lambda share, _: stages.append(share),
    )
    result = planner.plan(Goal(target=0.9, most_replicas=2), in_force)
    assert result.in_force is not None
    assert result.in_force.candidate == in_force
    assert stages == sorted(stages)
    assert stages[-1] == 1.0
    assert 0.0 < result.prediction.attainment.low <= result.prediction.attainment.high <= 1.0


@pytest.mark.timeout(600)
def test_a_rate_takes_the_fewest_engines_that_serve_it() -> None:
    problem = make_problem()
    space = make_space(strategies=("aggregated",), prefill_heavy_tokens=(256, 512))
    evaluator = TrialEvaluator(problem)

    def plan(rate_rps: float, most: int):
        effort = SearchEffort(seeds=(1, 2), duration_s=8.0)
        planner = Planner(problem, space, effort, lambda trials: [evaluator.evaluate(trial) for trial in trials])
        return planner.plan(Goal(target=0.9, rate_rps=rate_rps, most_replicas=most))

    result = plan(10.0, 8)
    assert result.is_met
    replicas = result.chosen.replicas
    assert result.goodput_rps.mean >= 10.0
    assert replicas > 1
    fewer = plan(10.0, replicas - 1)
    assert not fewer.is_met
    assert fewer.chosen.replicas == replicas - 1


@pytest.mark.timeout(600)
def test_kv_binds_where_there_is_little_and_prefill_where_there_is_much() -> None:
    candidate = make_taichi(num_prefill_heavy=1, num_decode_heavy=2, prefill_heavy_tokens=1024, decode_heavy_tokens=0)
    resources = {}
    for kv_blocks in (160, 4000):
        evaluator = TrialEvaluator(make_problem(kv_blocks))

        def run(trials, evaluator=evaluator):
            return [evaluator.evaluate(trial) for trial in trials]

        fidelity = Fidelity(seeds=(1,), duration_s=12.0)
        (ranked,) = GoodputComparison(run, 0.9).measure_goodputs([candidate], fidelity, {candidate: 4.0})
        bottleneck = find_bottleneck(run, candidate, ranked.goodput_rps, 0.9, replace(fidelity, seeds=(1, 2)))
        assert sum(bottleneck.missed.values()) > 0.1
        resources[kv_blocks] = bottleneck.resource
    assert resources == {160: "kv", 4000: "prefill"}


def test_problems_trials_and_outcomes_survive_the_way_between_processes():
    problem = make_problem()
    trial = SearchTrial(candidate=make_taichi(), seed=1, rate_rps=0.5, duration_s=60.0, is_detailed=True)
    outcome = TrialEvaluator(problem).evaluate(trial)
    assert outcome.detail is not None
    assert pickle.loads(pickle.dumps((problem, trial, outcome))) == (problem, trial, outcome)
