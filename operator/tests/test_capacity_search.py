"""What fleets of several sizes serve: requests and results of a search, and the search itself."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest
from formula_harness import FormulaEvaluator
from tuner_harness import BOUNDS, make_spec

from sluice_core.planning.planner import estimate_start_rps
from sluice_core.planning.slider_search import SearchEffort
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autoscaling import capacity_process, capacity_search
from sluice_operator.autoscaling.capacity_messages import (
    CapacityPoint,
    CapacityRequest,
    CapacityResult,
    list_sizes,
    make_capacity_request,
)
from sluice_operator.autoscaling.capacity_search import search_capacity
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts
from sluice_operator.autotune.search import make_candidate, make_effort, make_problem
from sluice_operator.autotune.search_process import SearchError, SearchRunner, compute_limit_s
from sluice_operator.autotune.workload import WorkloadSample

if TYPE_CHECKING:
    from sluice_core.planning.trials import SearchTrial

ENGINE = EmulatedEngineFacts(gpu="a100-80g", model="qwen2.5-14b")
EFFORT = SearchEffort(seeds=(1,), num_requests=150, least_duration_s=5.0, most_duration_s=60.0, num_compared=1)
SHARES = {"autotune": {"mode": "Apply", "bounds": {**BOUNDS, "prefillHeavy": {"min": "25%", "max": "75%"}}}}


def make_request(sizes: tuple[int, ...] = (1, 2), prompt_tokens: int = 500, **changes: object) -> CapacityRequest:
    spec = (
        make_spec(replicas=2, autotune={"mode": "Off"}, **changes)
        if "autotune" not in changes
        else make_spec(**changes)
    )
    rows = tuple((prompt_tokens + 37 * number % 100, 20 + 13 * number % 100, "") for number in range(60))
    return make_capacity_request(spec, sizes, resolve_sliders, WorkloadSample(rows=rows, rate_rps=2.0), ENGINE)


@pytest.mark.parametrize(
    ("least", "most", "sizes"),
    [
        (1, 1, (1,)),
        (1, 3, (1, 2, 3)),
        (1, 8, (1, 2, 4, 8)),
        (2, 12, (2, 4, 8, 12)),
        (1, 1000, (1, 2, 4, 8, 16)),
        (2, 2, (2,)),
    ],
)
def test_sizes_are_powers_of_two_and_the_largest(least: int, most: int, sizes: tuple[int, ...]) -> None:
    assert list_sizes(least, most) == sizes


def test_a_request_survives_json() -> None:
    request = make_request()
    assert CapacityRequest.from_json(request.to_json()) == request
    assert request.to_json().count("[537") <= 1, "the workload is written once"


def test_the_rate_alone_is_no_news_and_lengths_objectives_and_sliders_are() -> None:
    request = make_request()
    faster = replace(
        request,
        requests=tuple([replace(item, workload=replace(item.workload, rate_rps=50.0)) for item in request.requests]),
    )
    assert not request.differs(faster)
    assert not request.has_shifted(faster)
    assert request.has_shifted(make_request(prompt_tokens=5000))
    assert request.differs(make_request(slo={"ttftMilliseconds": 900, "tpotMilliseconds": 70}))
    assert request.differs(make_request(chunkSizes={"prefillHeavy": 4096, "decodeHeavy": 512}))
    assert request.differs(make_request(sizes=(1, 2, 4)))


def test_sliders_of_a_size_are_those_of_the_nearest_one_scaled() -> None:
    sliders = Sliders(num_prefill_heavy=2, prefill_heavy_tokens=1024, decode_heavy_tokens=256)
    one = replace(sliders, num_prefill_heavy=1, prefill_heavy_tokens=512)
    points = (
        CapacityPoint(replicas=1, goodput_rps=2.0, sliders=one),
        CapacityPoint(replicas=8, goodput_rps=18.0, sliders=sliders),
    )
    result = CapacityResult(points=points)
    assert CapacityResult.from_json(result.to_json()) == result
    assert result.find_sliders(1) == one
    assert result.find_sliders(12) == replace(sliders, num_prefill_heavy=3)
    assert result.curve.count_engines(4.5, 1, 8) == 3
    # Of two that are as near, the smaller one.
    between = CapacityResult(points=(replace(points[0], replicas=2), replace(points[1], replicas=4)))
    assert between.find_sliders(3) == replace(one, num_prefill_heavy=2)


@pytest.mark.parametrize("text", ["{}", "[]", '{"points": []}', '{"points": [{"replicas": 0}]}'])
def test_something_else_is_no_result(text: str) -> None:
    with pytest.raises(ValueError, match=r"capacity|engines"):
        CapacityResult.from_json(text)


def test_more_engines_serve_more_with_the_sliders_in_force() -> None:
    request = make_request(sizes=(1, 2))
    result = search_capacity(request, EFFORT)
    one, two = result.points
    assert (one.replicas, two.replicas) == (1, 2)
    assert one.goodput_rps > 1.0
    assert two.goodput_rps > 1.5 * one.goodput_rps
    assert [point.sliders for point in result.points] == [item.in_force for item in request.requests]


def test_where_they_may_be_applied_better_sliders_are_found_for_each_size() -> None:
    request = make_request(
        sizes=(2,), prompt_tokens=3000, chunkSizes={"prefillHeavy": 2048, "decodeHeavy": 16}, **SHARES
    )
    (found,) = search_capacity(request, EFFORT).points
    kept = replace(request, may_tune=False)
    assert found.goodput_rps >= search_capacity(kept, EFFORT).points[0].goodput_rps
    assert 256 <= found.sliders.prefill_heavy_tokens <= 2048


async def test_a_search_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = (
        "import json, sys; request = json.load(sys.stdin); sliders = request['requests'][0]['in_force']; "
        "print(json.dumps({'points': [{'replicas': 2, 'goodput_rps': 3.5, 'sliders': sliders}]}))"
    )
    monkeypatch.setattr(capacity_process, "COMMAND", (sys.executable, "-c", echo))
    result = await capacity_process.run_capacity_search(SearchRunner(), make_request())
    assert result.curve.points == ((2, 3.5),)
    monkeypatch.setattr(capacity_process, "COMMAND", (sys.executable, "-c", "raise SystemExit('no chunk size fits')"))
    with pytest.raises(SearchError, match="no chunk size fits"):
        await capacity_process.run_capacity_search(SearchRunner(), make_request())


# A whole search, its runs stood in for by a formula.


class Formula(FormulaEvaluator):
    """Attainment is 0.9 at so many requests/s per engine and seed; that of better chunk sizes is ``gain`` times it."""

    each_rps = 3.0
    gain = 1.0
    worse_seed: int | None = None

    @classmethod
    def find_goodput_rps(cls, trial: SearchTrial) -> float:
        candidate = trial.candidate
        gain = 0.97 if trial.seed == cls.worse_seed else cls.gain
        gain = gain if candidate.prefill_heavy_tokens == 512 else 1.0
        return cls.each_rps * candidate.replicas * gain * (1.0 + 0.1 * (trial.seed - 1))


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> type[Formula]:
    class Fresh(Formula):
        trials: ClassVar[list[SearchTrial]] = []

    monkeypatch.setattr(capacity_search, "TrialEvaluator", Fresh)
    return Fresh


QUICK = SearchEffort(seeds=(1, 2), num_requests=700, most_duration_s=1200.0, num_compared=2)


def test_each_size_is_measured_from_what_the_size_below_serves(formula) -> None:
    request = make_request(sizes=(1, 2, 8))
    points = search_capacity(request, QUICK).points
    sizes = [point.replicas for point in points]
    assert sizes == [1, 2, 8]
    # Seeds 1 and 2 serve 1 and 1.1 times as much.
    assert [point.goodput_rps for point in points] == pytest.approx([3.15, 6.3, 25.2], rel=0.01)
    assert {trial.candidate for trial in formula.trials} == {make_candidate(sized) for sized in request.requests}
    first = {size: next(trial for trial in formula.trials if trial.candidate.replicas == size) for size in sizes}
    guesses = [estimate_start_rps(make_problem(request.largest), 1, 1), points[0].goodput_rps * 2]
    guesses.append(points[1].goodput_rps * 8 / 2)
    assert [trial.rate_rps for trial in first.values()] == pytest.approx(guesses)
    assert [trial.duration_s for trial in first.values()] == pytest.approx(
        [QUICK.choose_duration_s(rate) for rate in guesses]
    )
    assert {trial.seed for trial in formula.trials} == {1, 2}
    assert {trial.duration_s for trial in formula.trials} == {trial.duration_s for trial in first.values()}


@pytest.mark.parametrize(
    ("gain", "worse_seed", "tokens"),
    [(1.04, None, 2048), (1.07, None, 512), (1.5, 2, 2048)],
    ids=["by chance", "more than chance", "on one seed only"],
)
def test_sliders_give_way_to_those_that_serve_more_on_every_seed(formula, gain, worse_seed, tokens) -> None:
    formula.gain, formula.worse_seed = gain, worse_seed
    chunks = {"prefillHeavy": 2048, "decodeHeavy": 128}
    request = make_request(sizes=(1, 2), prefillHeavy="50%", chunkSizes=chunks, **SHARES)
    one, two = search_capacity(request, QUICK).points
    assert one.sliders == request.requests[0].in_force, "one engine has no other half to be tuned"
    assert one.goodput_rps == pytest.approx(3.15, rel=0.01)
    assert {trial.candidate.prefill_heavy_tokens for trial in formula.trials if trial.candidate.replicas == 1} == {2048}
    assert two.sliders.prefill_heavy_tokens == tokens
    each_rps = 3.15 * (gain if tokens == 512 else 1.0)
    assert two.goodput_rps == pytest.approx(2 * each_rps, rel=0.01)
    explored = [trial for trial in formula.trials if trial.candidate.replicas == 2]
    assert explored[0].rate_rps == pytest.approx(2 * one.goodput_rps)
    assert all(trial.candidate.tensor_parallel == 1 for trial in formula.trials)


def test_bounds_that_leave_no_choice_are_measured(formula) -> None:
    formula.gain = 2.0
    chunks = {"prefillHeavy": {"min": 1024, "max": 1024}, "decodeHeavy": {"min": 128, "max": 128}}
    bounds = {"prefillHeavy": {"min": "50%", "max": "50%"}, "chunkSizes": chunks}
    request = make_request(
        sizes=(4,),
        prefillHeavy="50%",
        chunkSizes={"prefillHeavy": 1024, "decodeHeavy": 128},
        autotune={"mode": "Apply", "bounds": bounds},
    )
    assert request.may_tune
    (point,) = search_capacity(request, QUICK).points
    assert point.sliders == request.largest.in_force
    assert {trial.candidate for trial in formula.trials} == {make_candidate(request.largest)}


def test_a_search_simulates_as_much_as_the_objectives_ask_for(formula) -> None:
    request = make_request(sizes=(1,))
    search_capacity(request)
    effort = make_effort(make_problem(request.largest))
    assert {trial.seed for trial in formula.trials} == set(effort.seeds)
    assert formula.trials[0].duration_s == effort.choose_duration_s(formula.trials[0].rate_rps)


def test_the_program_answers_the_request_on_its_input(monkeypatch, formula) -> None:
    """By the limits of a search for sliders, which a process of its own sets."""
    del formula
    request, answers = make_request(sizes=(1,)), []
    monkeypatch.setattr(capacity_search, "serve_request", lambda answer: answers.append(answer(request.to_json())))
    capacity_search.main()
    (point,) = CapacityResult.from_json(answers[0]).points
    assert (point.replicas, point.sliders) == (1, request.largest.in_force)


@pytest.mark.parametrize(
    ("size", "strategy", "limit_s"), [(4, "taichi", 80.0), (4, "auto", 560.0), (16, "auto", 600.0)]
)
def test_a_search_that_chooses_the_strategy_has_the_time_of_a_search_for_each(
    size: int, strategy: str, limit_s: float
) -> None:
    """On two cores that pods keep busy, all seven took four engines longer than the 80 s of one."""
    constraints = replace(make_request(sizes=(size,)).largest.constraints, strategy=strategy)
    assert compute_limit_s(constraints) == limit_s


def test_a_search_may_take_as_long_as_one_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Runner:
        async def call(self, *arguments: object) -> None:
            asked.append(arguments)

    for sizes in ((1, 2), (1, 2, 4, 8, 16)):
        asyncio.run(capacity_process.run_capacity_search(Runner(), request := make_request(sizes=sizes)))
        limit_s = min(sum(compute_limit_s(item.constraints) for item in request.requests), 600.0)
        assert asked.pop() == (capacity_process.COMMAND, request.to_json(), limit_s, CapacityResult.from_json)
