"""What a search is asked, and what it makes of that: workload, engines, problem, space, candidate, effort."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest
from tuner_harness import APPLY, BOUNDS, FOUND, make_answer, make_question, make_samples, make_spec

from sluice.v1 import control_pb2
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.latency.transfer import find_link
from sluice_core.planning.search import SearchEffort
from sluice_core.planning.trials import TrialResult
from sluice_core.records import EarlyRejection, FlowParameters, IterationShape, Role
from sluice_core.sim.cell import BLOCK_SIZE_TOKENS, MAX_NUM_SEQS
from sluice_core.slo import ROUTER_WAIT_LIMIT_S, SloCounts
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autotune import search as searching
from sluice_operator.autotune.engine_facts import (
    CHANGED_RATIO,
    COEFFICIENTS,
    MAX_ITERATIONS,
    MIN_ITERATIONS,
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
from sluice_operator.autotune.search_messages import SearchResult, make_constraints
from sluice_operator.autotune.search_process import SearchError
from sluice_operator.autotune.tuner import CHECK_INTERVAL_S, Tuner, TunerInputs, apply_sliders
from sluice_operator.autotune.workload import (
    MAX_REQUESTS,
    MIN_REQUESTS,
    SAMPLE_GROWTH,
    SHIFT_RATIO,
    WINDOW_S,
    MeanEstimate,
    WorkloadSample,
    read_workload,
)

if TYPE_CHECKING:
    from sluice_core.planning.trials import SearchTrial
    from sluice_operator.autotune.search_messages import SearchRequest

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
        "num_fitted_iterations": MIN_ITERATIONS,
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
    samples = [*make_samples(9, 5, 0.1), *make_samples(100, MAX_REQUESTS, 0.1)]
    workload = read_workload([make_status(samples=samples)])
    assert workload is not None
    assert {row[0] for row in workload.rows} == {100}
    assert len(workload.rows) == MAX_REQUESTS
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
    half = MIN_REQUESTS // 2
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
    one, other = MeanEstimate(mean=100.0 * ratio, error=errors[0]), MeanEstimate(mean=100.0, error=errors[1])
    assert one.differs(other) is differs
    assert other.differs(one) is differs


def test_a_sample_is_small_beside_one_that_grew_so_many_times() -> None:
    question = make_question(50)
    for count, is_small in ((50 * SAMPLE_GROWTH, True), (50 * SAMPLE_GROWTH - 1, False)):
        assert question.is_small_beside(make_question(count)) is is_small


# --- the engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("views", "is_known"),
    [
        ([make_view()], True),
        ([make_view(state=DRAINING)], True),
        ([make_view(state=STARTING)], False),
        ([make_view(latency=None)], False),
        ([make_view(num_fitted_iterations=MIN_ITERATIONS - 1)], False),
        ([make_view(num_fitted_iterations=MIN_ITERATIONS - 1), make_view(num_fitted_iterations=1)], True),
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
            make_status(make_view(num_fitted_iterations=MAX_ITERATIONS // 2)),
            make_status(make_view(latency=other, num_fitted_iterations=9 * MAX_ITERATIONS)),
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
    assert measured.profile.num_observations == MIN_ITERATIONS
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
    defaults = FlowParameters()
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


# --- the tuner -----------------------------------------------------------------------------------------------------


class Tuned:
    """A tuner with a clock, and searches that end when told."""

    def __init__(self) -> None:
        self.now = 50.0
        self.questions: list[object] = []
        self.num_enqueued = self.num_cancelled = 0
        self.answers: asyncio.Queue[object] = asyncio.Queue()
        self.samples = make_samples(2000)
        self.spec = {"autotune": APPLY, "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64}}
        self.counts = SloCounts()
        self.tuner = Tuner(self.search, enqueue=self.enqueue, now=lambda: self.now)

    def enqueue(self) -> None:
        self.num_enqueued += 1

    async def search(self, request: object) -> SearchResult:
        self.questions.append(request)
        try:
            answer = await self.answers.get()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read_inputs(self) -> TunerInputs:
        emulation = {"emulation": {"gpu": "a100-80g", "model": "qwen2.5-14b"}}
        body = {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "ServingCluster",
            "metadata": {"name": "m"},
            "spec": {
                "replicas": 4,
                "slo": {"ttftMilliseconds": 4000, "tpotMilliseconds": 70},
                "model": {"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models"}}},
                "engine": emulation,
                **self.spec,
            },
        }
        return TunerInputs(
            cluster=check_manifest(body),
            statuses=[make_status(samples=self.samples)],
            counts=self.counts,
            is_settled=True,
        )

    def update(self) -> Sliders:
        return resolve_sliders(self.tuner.update(self.read_inputs()).spec)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_search_runs_once_and_its_result_wakes_a_reconcile() -> None:
    tuned = Tuned()
    assert tuned.tuner.describe_status() is None
    assert tuned.tuner.stored is None
    assert tuned.update() == Sliders(num_prefill_heavy=2, prefill_heavy_tokens=512, decode_heavy_tokens=64)
    tuned.update()
    await tuned.settle()
    tuned.update()
    assert (len(tuned.questions), tuned.num_enqueued, tuned.tuner.result) == (1, 0, None)
    await tuned.answers.put(make_answer())
    await tuned.settle()
    assert (tuned.num_enqueued, tuned.tuner.result) == (1, make_answer())
    tuned.counts = SloCounts(num_finished=100, num_met_both=100)
    assert tuned.update() == FOUND
    stored = tuned.tuner.stored
    assert stored is not None
    assert (stored.sliders, stored.replicas, stored.trial.former, stored.trial.before) == (FOUND, 4, None, tuned.counts)
    assert tuned.tuner.describe_status().reason is Reason.ON_TRIAL
    assert tuned.num_cancelled == 0


@pytest.mark.parametrize(
    ("failure", "message"),
    [(SearchError("bounds are too wide"), "bounds are too wide"), (OSError("disk"), "the search failed: disk")],
)
async def test_a_search_that_fails_is_told_and_wakes_a_reconcile(failure, message) -> None:
    tuned = Tuned()
    tuned.update()
    await tuned.answers.put(failure)
    await tuned.settle()
    status = tuned.tuner.describe_status()
    assert status is not None
    assert (status.reason, status.message, tuned.num_enqueued) == (Reason.SEARCH_FAILED, message, 1)


async def test_an_edit_ends_the_search_under_way_and_off_ends_all() -> None:
    tuned = Tuned()
    tuned.update()
    await tuned.settle()
    tuned.spec = {**tuned.spec, "slo": {"ttftMilliseconds": 9, "tpotMilliseconds": 9}}
    tuned.update()
    await tuned.settle()
    assert (tuned.num_cancelled, len(tuned.questions)) == (1, 2)
    tuned.spec = {**tuned.spec, "autotune": {"mode": "Off"}}
    tuned.update()
    await tuned.settle()
    assert (tuned.num_cancelled, tuned.num_enqueued) == (2, 0)
    assert tuned.tuner.describe_status().reason is Reason.OFF


async def test_stop_ends_the_search() -> None:
    tuned = Tuned()
    tuned.update()
    await tuned.settle()
    tuned.tuner.stop()
    await tuned.settle()
    assert (tuned.num_cancelled, tuned.num_enqueued) == (1, 0)
    tuned.tuner.stop()


async def test_an_update_is_needed_when_it_would_decide_or_say_something_else() -> None:
    tuned = Tuned()
    assert not tuned.tuner.needs_update(tuned.read_inputs)  # nothing has been decided yet
    tuned.samples = []
    tuned.update()
    assert not tuned.tuner.needs_update(tuned.read_inputs)
    tuned.samples = make_samples(2000)
    assert not tuned.tuner.needs_update(tuned.read_inputs)  # it was asked just now
    tuned.now += CHECK_INTERVAL_S
    assert not tuned.tuner.needs_update(lambda: None)
    assert not tuned.tuner.needs_update(tuned.read_inputs)
    tuned.now += CHECK_INTERVAL_S
    assert tuned.tuner.needs_update(tuned.read_inputs)
    tuned.update()
    tuned.now += CHECK_INTERVAL_S
    assert not tuned.tuner.needs_update(tuned.read_inputs)
    await tuned.answers.put(make_answer())
    await tuned.settle()
    tuned.update()
    assert tuned.tuner.describe_status().reason is Reason.MEASURING
    tuned.counts = SloCounts(num_finished=100, num_met_both=100)
    tuned.now += CHECK_INTERVAL_S
    assert tuned.tuner.needs_update(tuned.read_inputs)
    tuned.spec = {**tuned.spec, "autotune": {"mode": "Off"}}
    tuned.update()
    tuned.now += CHECK_INTERVAL_S
    assert not tuned.tuner.needs_update(tuned.read_inputs)


@pytest.mark.parametrize(
    ("spec", "samples", "reason", "part"),
    [
        ({"autotune": {"mode": "Off"}}, 100, Reason.OFF, "off"),
        ({"autotune": {**APPLY, "bounds": {}}}, 100, Reason.NOTHING_TO_TUNE, "no slider a choice"),
        ({}, MIN_REQUESTS - 1, Reason.NO_SAMPLE, "fewer than 30 requests"),
        ({"engine": {}}, 100, Reason.NO_LATENCY_MODEL, "fewer than 200 iterations"),
        ({}, 100, Reason.SEARCHING, "search"),
    ],
)
async def test_the_condition_says_what_is_missing(spec, samples, reason, part) -> None:
    tuned = Tuned()
    tuned.spec = {**tuned.spec, **spec}
    tuned.samples = make_samples(2000, samples)
    tuned.update()
    status = tuned.tuner.describe_status()
    assert status is not None
    assert status.reason is reason
    assert part in status.message
    tuned.tuner.stop()


def test_sliders_take_the_place_of_the_specs_and_nothing_else_changes() -> None:
    cluster = Tuned().read_inputs().cluster
    assert apply_sliders(cluster, None) is cluster
    tuned = apply_sliders(cluster, FOUND)
    assert resolve_sliders(tuned.spec) == FOUND
    back = {"prefill_heavy": cluster.spec.prefill_heavy, "chunk_sizes": cluster.spec.chunk_sizes}
    assert tuned.spec.model_copy(update=back) == cluster.spec
    assert tuned.model_copy(update={"spec": cluster.spec}) == cluster


# --- the search, its runs stood in for by a formula ----------------------------------------------------------------


class Formula:
    """Attainment is ``target`` at a candidate's goodput, which its share of P-heavy engines and its seed decide."""

    best_rps = 4.0
    trials: list[SearchTrial]

    def __init__(self, problem: object) -> None:
        del problem

    @classmethod
    def find_goodput_rps(cls, trial: SearchTrial) -> float:
        candidate = trial.candidate
        distance = abs(candidate.num_prefill_heavy - 3) + abs(math.log2(candidate.prefill_heavy_tokens / 1024))
        distance += abs(candidate.decode_heavy_tokens - 128) / 512
        return cls.best_rps * (1.0 - 0.1 * distance) * (1.0 + 0.01 * (trial.seed % 1000))

    def evaluate(self, trial: SearchTrial) -> TrialResult:
        self.trials.append(trial)
        over = math.log(trial.rate_rps / self.find_goodput_rps(trial))
        return TrialResult(trial=trial, attainment=min(1.0, max(0.0, 0.9 - 4.0 * over)), num_iterations=1)


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> type[Formula]:
    class Fresh(Formula):
        trials: ClassVar[list[SearchTrial]] = []

    monkeypatch.setattr(searching, "TrialEvaluator", Fresh)
    return Fresh


def ask(rate_rps: float = 2.0, **changes: object) -> SearchRequest:
    question = make_question(replicas=4, chunkSizes={"prefillHeavy": 256, "decodeHeavy": 128}, **changes)
    return replace(question, workload=replace(question.workload, rate_rps=rate_rps))


@pytest.mark.parametrize(
    ("rate_rps", "predicted_rps", "in_force_rps"),
    [(2.0, 2.0, 2.0), (4.5, 4.5, None), (40.0, None, None)],
    ids=["little", "a little too much", "far too much"],
)
def test_a_search_says_what_it_found_and_what_to_expect(formula, rate_rps, predicted_rps, in_force_rps) -> None:
    request = ask(rate_rps)
    result = searching.search(request)
    assert result.sliders == Sliders(num_prefill_heavy=3, prefill_heavy_tokens=1024, decode_heavy_tokens=128)
    # Seeds 1 and 2 of the search; the sliders in force are one engine and two halvings away.
    assert result.goodput_rps == pytest.approx(4.0 * 1.015, rel=0.01)
    assert result.in_force_goodput_rps == pytest.approx(0.7 * 4.0 * 1.015, rel=0.01)
    assert result.gain == pytest.approx(1 / 0.7 - 1, rel=0.03)
    assert result.least_gain == pytest.approx(1 / 0.7 - 1, rel=0.05)
    fresh = [trial for trial in formula.trials if trial.seed in searching.FRESH_SEEDS]
    assert [trial.seed for trial in fresh] == [*searching.FRESH_SEEDS] * 2
    best, present = fresh[:2], fresh[2:]
    assert best[0].candidate.prefill_heavy_tokens == 1024
    assert present[0].candidate == make_candidate(request)
    # Far above the goodput nothing is simulated: 1.3 times it, or of half of the best one's.
    most_rps = searching.MAX_OVERLOAD * result.goodput_rps
    assert best[0].rate_rps == pytest.approx(predicted_rps or most_rps)
    most_rps = searching.MAX_OVERLOAD * result.in_force_goodput_rps
    assert present[0].rate_rps == pytest.approx(in_force_rps or most_rps)
    effort = replace(make_effort(make_problem(request)), most_requests=searching.MAX_PREDICTED_REQUESTS)
    assert [trial.duration_s for trial in fresh] == [effort.choose_duration_s(trial.rate_rps) for trial in fresh]
    for trials, attainment in ((best, result.attainment), (present, result.in_force_attainment)):
        expected = [min(1.0, max(0.0, 0.9 - 4.0 * math.log(t.rate_rps / formula.find_goodput_rps(t)))) for t in trials]
        assert attainment == pytest.approx(sum(expected) / 2)


def test_a_search_is_as_long_as_it_is_told(formula) -> None:
    effort = SearchEffort(seeds=(5,), duration_s=33.0, num_compared=1)
    searching.search(ask(), effort)
    assert {trial.seed for trial in formula.trials} == {5, *searching.FRESH_SEEDS}
    assert max(trial.duration_s for trial in formula.trials) == 33.0


def test_less_than_a_request_in_a_whole_run_is_nothing_and_has_an_attainment(formula) -> None:
    formula.best_rps = 1e-5
    effort = SearchEffort(seeds=(1,), duration_s=100.0, most_duration_s=100.0, num_compared=1)
    result = searching.search(ask(), effort)
    assert (result.goodput_rps, result.in_force_goodput_rps, result.gain, result.least_gain) == (0.0, 0.0, 0.0, 0.0)
    fresh = [trial.rate_rps for trial in formula.trials if trial.seed in searching.FRESH_SEEDS]
    assert fresh == [pytest.approx(searching.MIN_PREDICTED_REQUESTS / 100.0)] * 4
    assert result.attainment == 0.0


def test_what_counts_as_something_is_one_request(formula) -> None:
    formula.best_rps = 0.05
    effort = SearchEffort(seeds=(1,), duration_s=100.0, most_duration_s=100.0, num_compared=1)
    result = searching.search(ask(), effort)
    assert result.goodput_rps == pytest.approx(0.05, rel=0.05)
    assert result.in_force_goodput_rps == pytest.approx(0.035, rel=0.05)
    short = searching.search(ask(), replace(effort, most_duration_s=21.0))
    assert short.goodput_rps == pytest.approx(0.05, rel=0.05)
    assert (short.in_force_goodput_rps, short.gain) == (0.0, math.inf)
