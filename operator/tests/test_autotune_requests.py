"""What a search is asked, and what it makes of that: workload, engines, problem, space, candidate, effort."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tuner_harness import APPLY, BOUNDS, make_answer, make_question, make_samples, make_spec

from sluice.v1 import control_pb2
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.latency.transfer import find_link
from sluice_core.planning.workload_shift import SHIFT_RATIO, MeanEstimate
from sluice_core.records import IterationShape, Role
from sluice_core.scheduling.router_wait_limit import ROUTER_WAIT_LIMIT_S
from sluice_core.sim.sim_setup import BLOCK_SIZE_TOKENS, MAX_NUM_SEQS
from sluice_core.strategy_parameters import EarlyRejection, StrategyParameters
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune import search as searching
from sluice_operator.autotune.engine_facts import (
    CHANGED_RATIO,
    COEFFICIENTS,
    EmulatedEngineFacts,
    MeasuredEngineFacts,
    find_engine_facts,
)
from sluice_operator.autotune.search import (
    make_candidate,
    make_effort,
    make_engine,
    make_problem,
    make_sliders,
    make_space,
)
from sluice_operator.autotune.search_constraints import make_constraints
from sluice_operator.autotune.search_messages import SearchResult
from sluice_operator.autotune.workload import (
    WINDOW_S,
    WorkloadSample,
    read_workload,
)

READY, STARTING, DRAINING = (
    control_pb2.ENGINE_STATE_READY,
    control_pb2.ENGINE_STATE_CONNECTING,
    control_pb2.ENGINE_STATE_DRAINING,
)
LATENCY = control_pb2.LatencyCoefficients(**{name: 1e-4 * number for number, name in enumerate(COEFFICIENTS, 1)})


def make_view(**changes: object) -> control_pb2.EngineStatus:
    fields = {
        "engine_id": "e",
        "state": READY,
        "latency": LATENCY,
        "num_fitted_iterations": 200,
        "kv_blocks_total": 10,
        "block_size_tokens": 16,
        "kv_bytes_per_token": 1024,
        "max_num_seqs": 8,
        **changes,
    }
    return control_pb2.EngineStatus(**{name: value for name, value in fields.items() if value is not None})


def make_status(*views: control_pb2.EngineStatus, samples: list | None = None) -> control_pb2.GetStatusResponse:
    return control_pb2.GetStatusResponse(engines=views, samples=samples or [])


# --- the workload --------------------------------------------------------------------------------------------------


def test_the_newest_requests_of_each_router_count_up_to_a_number() -> None:
    samples = [*make_samples(9, 5, 0.1), *make_samples(100, 1024, 0.1)]
    workload = read_workload([make_status(samples=samples)])
    assert workload is not None
    assert {row[0] for row in workload.rows} == {100}
    assert len(workload.rows) == 1024
    assert workload.rate_rps == pytest.approx(10.0)


def test_a_window_ends_at_the_last_request_within_it() -> None:
    """The gap of a sample is the time since the one before it."""
    for gap_s, count in ((10.0, 31), (9.9, 31), (10.1, 30)):
        workload = read_workload([make_status(samples=make_samples(100, 100, gap_s))])
        assert workload is not None
        assert (len(workload.rows), workload.rate_rps) == (count, pytest.approx(1.0 / gap_s))
    assert WINDOW_S == 300.0


def test_requests_without_an_answer_take_time_and_do_not_count() -> None:
    unanswered = [control_pb2.RequestSample(gap_s=1.0, prompt_tokens=10)] * 10
    empty = [control_pb2.RequestSample(gap_s=1.0, output_tokens=10)] * 10
    samples = [*make_samples(100, 20, 1.0), *unanswered, *empty, *make_samples(100, 20, 1.0)]
    workload = read_workload([make_status(samples=samples)])
    assert workload is not None
    assert (len(workload.rows), workload.rate_rps) == (40, pytest.approx(39 / 59))


def test_as_few_requests_as_are_needed_over_all_routers() -> None:
    half = 15
    assert read_workload([make_status(samples=make_samples(100, half))] * 2) is not None
    assert (
        read_workload([make_status(samples=make_samples(100, half)), make_status(samples=make_samples(9, half - 1))])
        is None
    )
    at_once = make_samples(100, 100, 0.0)
    assert read_workload([make_status(samples=at_once)]) is None
    mixed = read_workload([make_status(samples=at_once), make_status(samples=make_samples(100, 11, 1.0))])
    assert mixed is not None
    assert mixed.rate_rps == pytest.approx(1.0)


def test_means_have_their_errors() -> None:
    rows = tuple((100 + 100 * (number % 2), 7, "") for number in range(100))
    rate, prompt, output = WorkloadSample(rows=rows, rate_rps=3.0).means
    assert (rate.mean, rate.error) == (3.0, 0.1)
    assert (prompt.mean, prompt.error) == (150.0, pytest.approx(50.0 / 150.0 / 10.0))
    assert (output.mean, output.error) == (7.0, 0.0)


@pytest.mark.parametrize(
    ("ratio", "errors", "differs"),
    [
        (SHIFT_RATIO - 1e-6, (0.0, 0.0), False),
        (SHIFT_RATIO + 1e-6, (0.0, 0.0), True),
        (1.0 / SHIFT_RATIO - 1e-6, (0.0, 0.0), True),
        # Errors of 3 % and 4 % are one of 5 %, and two of these are chance: e^0.1.
        (SHIFT_RATIO * math.exp(0.0999), (0.03, 0.04), False),
        (SHIFT_RATIO * math.exp(0.1001), (0.03, 0.04), True),
    ],
)
def test_means_differ_beyond_a_ratio_and_chance(ratio, errors, differs) -> None:
    for mean in (100.0, 0.01):
        one, other = MeanEstimate(mean=mean * ratio, error=errors[0]), MeanEstimate(mean=mean, error=errors[1])
        assert one.differs(other) is differs
        assert other.differs(one) is differs


def test_nothing_differs_from_something_and_not_from_nothing() -> None:
    nothing, something = MeanEstimate(mean=0.0, error=9.0), MeanEstimate(mean=1e-6, error=9.0)
    assert nothing.differs(something)
    assert something.differs(nothing)
    assert not nothing.differs(nothing)


def test_a_sample_is_small_beside_one_that_grew_so_many_times() -> None:
    question = make_question(50)
    for count, is_small in ((200, True), (199, False)):
        assert question.is_small_beside(make_question(count)) is is_small


# --- the engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("views", "is_known"),
    [
        ([make_view()], True),
        ([make_view(state=DRAINING)], True),
        ([make_view(state=STARTING)], False),
        ([make_view(latency=None)], False),
        ([make_view(num_fitted_iterations=199)], False),
        ([make_view(num_fitted_iterations=199), make_view(num_fitted_iterations=1)], True),
        ([make_view(), make_view(kv_blocks_total=0)], False),
        ([make_view(), make_view(kv_blocks_total=0, state=STARTING)], True),
        ([], False),
    ],
)
def test_engines_are_known_by_what_serving_ones_have_measured(views, is_known) -> None:
    facts, missing = find_engine_facts(make_spec(), [make_status(view) for view in views])
    assert (facts is not None) is is_known
    assert (missing == "") is is_known


def test_an_emulated_gpu_is_known_without_measurements() -> None:
    spec = make_spec(engine={"emulation": {"gpu": "h100-80gx2", "model": "qwen2.5-14b"}})
    assert find_engine_facts(spec, []) == (EmulatedEngineFacts(gpu="h100-80gx2", model="qwen2.5-14b"), "")


def test_measured_engines_are_averaged_by_what_they_have_seen_up_to_a_limit() -> None:
    other = control_pb2.LatencyCoefficients(**{name: 3e-4 * number for number, name in enumerate(COEFFICIENTS, 1)})
    facts, _ = find_engine_facts(
        make_spec(),
        [
            make_status(make_view(num_fitted_iterations=250)),
            make_status(make_view(latency=other, num_fitted_iterations=4500)),
        ],
    )
    assert isinstance(facts, MeasuredEngineFacts)
    assert facts.coefficients == pytest.approx([1e-4 * number * 7 / 3 for number in range(1, 7)])


def test_engines_that_take_just_the_ratio_longer_are_the_same() -> None:
    two, three = (
        MeasuredEngineFacts(
            coefficients=(base_s, 0.0, 0.0, 0.0, 0.0, 0.0),
            kv_blocks_total=10,
            block_size_tokens=16,
            kv_bytes_per_token=1024,
            max_num_seqs=8,
        )
        for base_s in (2.0, 3.0)
    )
    assert CHANGED_RATIO == 1.5
    assert not three.differs(two)


def test_any_goodput_over_none_is_a_gain() -> None:
    assert searching.compute_least_gain((0.5, 0.5), (0.0, 0.25)) == 1.0
    assert searching.compute_least_gain((0.0, 0.5), (0.0, 0.25)) == 0.0


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, False),
        ({"coefficients": (0.02 * CHANGED_RATIO * 0.99, 0.0, 0.0, 0.0, 0.0, 0.0)}, False),
        ({"coefficients": (0.02 * CHANGED_RATIO * 1.01, 0.0, 0.0, 0.0, 0.0, 0.0)}, True),
        ({"coefficients": (0.02 / CHANGED_RATIO * 0.99, 0.0, 0.0, 0.0, 0.0, 0.0)}, True),
        ({"kv_blocks_total": 99}, False),
        ({"kv_bytes_per_token": 99}, False),
        ({"block_size_tokens": 32}, True),
        ({"max_num_seqs": 9}, True),
    ],
)
def test_engines_are_others_when_typical_iterations_take_another_time(changes, differs) -> None:
    facts = MeasuredEngineFacts(
        coefficients=(0.02, 0.0, 0.0, 0.0, 0.0, 0.0),
        kv_blocks_total=10,
        block_size_tokens=16,
        kv_bytes_per_token=1024,
        max_num_seqs=8,
    )
    changed = replace(facts, **changes)
    assert facts.differs(changed) is differs
    assert changed.differs(facts) is differs
    emulated = EmulatedEngineFacts(gpu="a100-80g", model="qwen2.5-14b")
    assert facts.differs(emulated)
    assert emulated.differs(facts)
    assert not emulated.differs(replace(emulated))
    assert emulated.differs(replace(emulated, gpu="h100-80g"))
    question = make_question()
    assert question.has_shifted(replace(question, engine=facts))
    assert not question.has_shifted(question)


def test_the_engine_of_a_search_is_the_emulated_gpu_or_the_measured_one() -> None:
    question = make_question(engine={"maxBatchTokens": 4096}, chunkSizes={"prefillHeavy": 4096, "decodeHeavy": 512})
    emulated = make_engine(question)
    target = load_model_on_gpu("qwen2.5-14b", "a100-80g", 1)
    assert (emulated.profile, emulated.kv_bytes_per_token) == (target.profile, target.kv_bytes_per_token)
    assert emulated.kv_blocks_total == target.kv_capacity_tokens // BLOCK_SIZE_TOKENS
    assert (emulated.block_size_tokens, emulated.max_num_seqs) == (BLOCK_SIZE_TOKENS, MAX_NUM_SEQS)
    assert (emulated.role, emulated.chunk_size_tokens, emulated.max_batch_tokens) == (Role.DECODE_HEAVY, 0, 4096)
    assert emulated.link.speed == find_link("tcp")
    facts = MeasuredEngineFacts(
        coefficients=(0.02, 1e-5, 0.0, 0.0, 0.0, 0.0),
        kv_blocks_total=10,
        block_size_tokens=32,
        kv_bytes_per_token=1024,
        max_num_seqs=8,
    )
    measured = make_engine(replace(question, engine=facts))
    assert measured.profile.num_observations == 200
    assert measured.profile.estimate_shape_s(IterationShape(prefill_tokens=100, num_chunks=1)) == pytest.approx(0.021)
    found = (measured.kv_blocks_total, measured.block_size_tokens, measured.kv_bytes_per_token, measured.max_num_seqs)
    assert found == (10, 32, 1024, 8)


# --- the question --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "mode", "bounds", "expected"),
    [
        ("TaiChi", "Recommend", {}, (("0%", "100%"), (64, 8192), (0, 8192))),
        ("TaiChi", "Recommend", BOUNDS, (("1", "3"), (256, 2048), (0, 256))),
        ("TaiChi", "Apply", {"prefillHeavy": {"min": 1, "max": 2}}, (("1", "2"), (4096, 4096), (512, 512))),
        ("TaiChi", "Apply", BOUNDS, (("1", "3"), (256, 2048), (0, 256))),
        ("Aggregated", "Recommend", {}, (("3", "3"), (64, 8192), (64, 8192))),
        ("Aggregated", "Apply", BOUNDS, (("3", "3"), (256, 2048), (256, 2048))),
        ("Disaggregated", "Recommend", {}, (("0%", "100%"), (8192, 8192), (0, 0))),
        ("Disaggregated", "Apply", BOUNDS, (("1", "3"), (8192, 8192), (0, 0))),
        ("Sluice", "Recommend", {}, (("3", "3"), (8192, 8192), (8192, 8192))),
        ("DynaServe", "Apply", BOUNDS, (("3", "3"), (8192, 8192), (8192, 8192))),
        ("FlowPrefill", "Recommend", {}, (("0%", "100%"), (64, 8192), (0, 8192))),
    ],
)
def test_a_search_varies_what_the_strategy_uses_within_bounds(strategy, mode, bounds, expected) -> None:
    spec = make_spec(
        replicas=6,
        prefillHeavy="50%",
        strategy=strategy,
        chunkSizes={"prefillHeavy": 4096, "decodeHeavy": 512},
        autotune={"mode": mode, "bounds": bounds, "cooldownSeconds": 10},
    )
    constraints = make_constraints(spec)
    assert (constraints.prefill_heavy, constraints.prefill_tokens, constraints.decode_tokens) == expected
    assert constraints.is_fixed is all(low == high for low, high in expected)
    assert (constraints.replicas, constraints.strategy, constraints.max_batch_tokens) == (6, strategy.lower(), 8192)


def test_a_search_has_the_objectives_and_parameters_of_the_spec() -> None:
    spec = make_spec(
        slo={
            "ttftMilliseconds": 1000,
            "tpotMilliseconds": 50,
            "attainment": "95%",
            "classes": [{"name": "chat", "ttftMilliseconds": 300, "tpotMilliseconds": 30, "priority": 2}],
        },
        parameters={
            "watermarkPercent": 90,
            "approachingFactorPercent": 80,
            "earlyRejection": "Reject",
            "minTokensBetweenMoves": 7,
            "tpotSharePercent": 75,
            "creditMilliseconds": 40,
            "macroInstanceMost": 5,
            "tbtTargetMilliseconds": 60,
        },
    )
    constraints = make_constraints(spec)
    assert [
        (each.name, each.ttft_milliseconds, each.tpot_milliseconds, each.priority) for each in constraints.classes
    ] == [("", 1000, 50, 0), ("chat", 300, 30, 2)]
    assert constraints.target == 0.95
    problem = make_problem(replace(make_question(), constraints=constraints))
    assert (problem.slo.ttft_s, problem.slo.tpot_s) == (1.0, 0.05)
    assert [(each.name, each.slo.ttft_s, each.slo.tpot_s, each.priority) for each in problem.classes] == [
        ("chat", 0.3, 0.03, 2)
    ]
    parameters = problem.parameters
    assert (parameters.early_rejection, parameters.min_tokens_between_moves) == (EarlyRejection.REJECT, 7)
    assert (parameters.watermark, parameters.approaching_factor) == (0.9, 0.8)
    # Those of strategies that have other parameters than TaiChi count too.
    assert (parameters.tpot_share, parameters.credit_s) == (0.75, 0.04)
    assert (parameters.macro_instance_most, parameters.tbt_target_s) == (5, 0.06)
    defaults = StrategyParameters()
    assert (parameters.prefill_batch_tokens, parameters.grant_wait_s, parameters.batch_token_budget) == (
        defaults.prefill_batch_tokens,
        defaults.grant_wait_s,
        defaults.batch_token_budget,
    )
    assert (problem.options.schedules_ahead, problem.options.wait_limit_s) == (True, ROUTER_WAIT_LIMIT_S)
    assert list(problem.engines) == [1]
    row, first = problem.rows[3], make_question().workload.rows[3]
    assert (row.prompt_tokens, row.output_tokens, row.slo_class) == first


@pytest.mark.parametrize(("mode", "link"), [("RDMA", "infiniband"), ("TCP", "tcp")])
def test_kv_moves_over_the_network_of_the_spec(mode, link) -> None:
    spec = make_spec()
    spec = spec.model_copy(update={"network": spec.network.model_copy(update={"mode": mode})})
    assert make_constraints(spec).link == link


def test_constraints_equal_but_for_size() -> None:
    one = make_constraints(make_spec(replicas=2, autotune={"mode": "Recommend"}))
    other = make_constraints(
        make_spec(replicas=8, autotune={**APPLY, "bounds": {**BOUNDS, "prefillHeavy": {"min": 2, "max": 4}}})
    )
    assert one.equals_but_for_size(replace(one, replicas=8, prefill_heavy=("1", "2")))
    assert not one.equals_but_for_size(other)
    assert not one.equals_but_for_size(replace(one, target=0.5))


def test_the_space_is_what_the_bounds_leave_and_what_is_in_force() -> None:
    question = make_question(
        replicas=4, autotune={**APPLY, "bounds": {**BOUNDS, "prefillHeavy": {"min": "25%", "max": "75%"}}}
    )
    space = make_space(
        replace(question, in_force=Sliders(num_prefill_heavy=1, prefill_heavy_tokens=1000, decode_heavy_tokens=77))
    )
    assert space.strategies == ("taichi",)
    assert 1000 in space.prefill_heavy_tokens
    assert (space.prefill_heavy_tokens[0], space.prefill_heavy_tokens[-1]) == (256, 2048)
    assert 77 in space.decode_heavy_tokens
    assert (space.decode_heavy_tokens[0], space.decode_heavy_tokens[-1]) == (0, 256)
    assert (space.prefill_heavy.low, space.prefill_heavy.high, space.prefill_heavy.is_percent) == (25, 75, True)
    assert (space.watermarks, space.approaching_factors, space.max_batch_tokens) == ((0.95,), (0.96,), 8192)
    counts = make_space(make_question(replicas=4)).prefill_heavy
    assert (counts.low, counts.high, counts.is_percent) == (1, 3, False)


@pytest.mark.parametrize(
    ("strategy", "sliders", "expected"),
    [
        ("TaiChi", (1, 512, 64), ("taichi", 1, 3, 512, 64)),
        ("TaiChi", (1, 512, 512), ("aggregated", 4, 0, 512, 0)),
        ("Sluice", (1, 8192, 8192), ("sluice", 4, 0, 8192, 0)),
    ],
)
def test_what_is_in_force_is_a_candidate_and_a_candidate_is_sliders(strategy, sliders, expected) -> None:
    names = ("num_prefill_heavy", "prefill_heavy_tokens", "decode_heavy_tokens")
    in_force = Sliders(**dict(zip(names, sliders, strict=True)))
    question = replace(make_question(replicas=4, strategy=strategy), in_force=in_force)
    candidate = make_candidate(question)
    assert (
        candidate.strategy,
        candidate.num_prefill_heavy,
        candidate.num_decode_heavy,
        candidate.prefill_heavy_tokens,
        candidate.decode_heavy_tokens,
    ) == expected
    assert (candidate.watermark, candidate.approaching_factor) == (0.95, 0.96)
    assert make_sliders(question, candidate) == in_force


@pytest.mark.parametrize(
    ("ttft_ms", "least_s"), [(1000, 20.0), (1333, 20.0), (2000, 30.0), (3900, 58.5), (4100, 60.0), (60_000, 60.0)]
)
def test_whole_runs_last_fifteen_objectives_within_limits(ttft_ms, least_s) -> None:
    question = make_question(slo={"ttftMilliseconds": ttft_ms, "tpotMilliseconds": 70})
    effort = make_effort(make_problem(question))
    assert effort.least_duration_s == pytest.approx(least_s)
    assert effort.seeds == searching.EFFORT.seeds


def test_a_result_reads_what_was_written_and_nothing_else() -> None:
    answer = make_answer()
    assert SearchResult.from_json(answer.to_json()) == answer
    for text in ("[]", "{}", '{"sliders": {}}', "3", answer.to_json().replace("goodput_rps", "goodput", 1)):
        with pytest.raises(ValueError, match="search result"):
            SearchResult.from_json(text)
