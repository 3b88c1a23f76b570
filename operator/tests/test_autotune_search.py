"""Searches for sliders: what they are asked, what they answer, and the processes that they run in."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import replace

import psutil
import pytest
from fake_kubernetes import make_cluster
from tuner_harness import APPLY, make_answer, make_question, make_samples, make_spec

from sluice.v1 import control_pb2
from sluice_core.planning.slider_candidates import SliderCandidate
from sluice_core.planning.slider_search import SearchEffort
from sluice_core.scheduling.engine_table import PROVEN_OBSERVATIONS
from sluice_core.scheduling.router_wait_limit import ROUTER_WAIT_LIMIT_S
from sluice_core.strategies import STRATEGIES
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders, resolve_sliders
from sluice_operator.autotune import search_process
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts, MeasuredEngineFacts, find_engine_facts
from sluice_operator.autotune.search import (
    compute_least_gain,
    make_candidate,
    make_effort,
    make_engine,
    make_problem,
    make_sliders,
    make_space,
    search,
)
from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
from sluice_operator.autotune.search_process import SearchError, SearchRunner
from sluice_operator.autotune.tuner import apply_sliders
from sluice_operator.autotune.workload import WorkloadSample, has_shifted, read_workload
from sluice_router.scheduling.wait_limits import WAIT_LIMIT_S


def make_status(samples: list[control_pb2.RequestSample], **engine: object) -> control_pb2.GetStatusResponse:
    state = control_pb2.ENGINE_STATE_READY
    return control_pb2.GetStatusResponse(
        samples=samples, engines=[control_pb2.EngineStatus(engine_id="e", state=state, **engine)] if engine else []
    )


# What the routers say.


def test_the_rate_is_that_of_all_routers_and_lengths_are_put_together() -> None:
    workload = read_workload([make_status(make_samples(100, 50, 0.5)), make_status(make_samples(900, 50, 0.25))])
    assert workload is not None
    assert workload.rate_rps == pytest.approx(6.0)
    assert workload.means[1].mean == 500
    assert workload.rows[0] == (100, 50, "chat")


def test_only_the_newest_requests_count() -> None:
    old, new = make_samples(100, 500, 1.0), make_samples(900, 100, 1.0)
    pause = [control_pb2.RequestSample(gap_s=7000, prompt_tokens=900, output_tokens=50)]
    workload = read_workload([make_status([*old, *pause, *new])])
    assert workload is not None
    assert {row[0] for row in workload.rows} == {900}
    assert workload.rate_rps == pytest.approx(1.0, rel=0.02)


def test_few_requests_or_requests_without_an_answer_say_nothing() -> None:
    assert read_workload([]) is None
    assert read_workload([make_status(make_samples(100, 29))]) is None
    unanswered = [control_pb2.RequestSample(gap_s=1, prompt_tokens=10) for _ in range(100)]
    assert read_workload([make_status(unanswered)]) is None


def test_small_samples_shift_by_chance_and_large_ones_do_not() -> None:
    def make(mean: int, count: int) -> WorkloadSample:
        rows = tuple((mean * factor, 10, "") for factor in (1, 3) for _ in range(count // 2))
        return WorkloadSample(rows=rows, rate_rps=1.0)

    assert not has_shifted(make(100, 30), make(150, 30))
    assert has_shifted(make(100, 1000), make(150, 1000))
    assert not has_shifted(make(100, 1000), make(120, 1000))
    nothing = replace(make(100, 1000), rate_rps=0.0)
    assert has_shifted(make(100, 1000), nothing)
    assert has_shifted(nothing, make(100, 1000))
    assert not has_shifted(nothing, nothing)


def test_fits_of_engines_are_averaged_by_what_they_have_seen() -> None:
    spec = make_question().constraints and make_spec()
    slow = control_pb2.LatencyCoefficients(base_s=0.03)
    fast = control_pb2.LatencyCoefficients(base_s=0.01)
    known = {"kv_blocks_total": 10, "block_size_tokens": 16, "kv_bytes_per_token": 1024, "max_num_seqs": 8}
    views = [
        make_status([], latency=slow, num_fitted_iterations=100, **known),
        make_status([], latency=fast, num_fitted_iterations=300, **known),
    ]
    facts, _ = find_engine_facts(spec, views)
    assert isinstance(facts, MeasuredEngineFacts)
    assert facts.coefficients[0] == pytest.approx(0.015)
    # A fit forgets: what an engine ran long ago gives it no more weight.
    veteran = make_status([], latency=fast, num_fitted_iterations=100_000, **known)
    regular = make_status([], latency=slow, num_fitted_iterations=500, **known)
    equal, _ = find_engine_facts(spec, [regular, veteran])
    assert isinstance(equal, MeasuredEngineFacts)
    assert equal.coefficients[0] == pytest.approx(0.02)
    assert not facts.differs(facts)
    # One kind of iteration that takes longer is another engine already, and so is another number of seats.
    assert facts.differs(replace(facts, coefficients=(*facts.coefficients[:3], 0.1, 0.0, 0.0)))
    assert facts.differs(replace(facts, max_num_seqs=9))
    for name in ("kv_blocks_total", "block_size_tokens", "max_num_seqs"):
        old = make_status([], latency=slow, num_fitted_iterations=300, **{**known, name: 0})
        assert find_engine_facts(spec, [old])[0] is None
    # Engines with less room than others: the least counts for all.
    small = make_status(
        [], latency=slow, num_fitted_iterations=300, **{**known, "kv_blocks_total": 6, "max_num_seqs": 4}
    )
    least, _ = find_engine_facts(spec, [views[1], small])
    assert isinstance(least, MeasuredEngineFacts)
    assert (least.kv_blocks_total, least.max_num_seqs) == (6, 4)
    alone, _ = find_engine_facts(spec, views[1:])
    assert isinstance(alone, MeasuredEngineFacts)
    assert (alone.coefficients[0], alone.block_size_tokens, alone.kv_bytes_per_token) == (0.01, 16, 1024)
    slower, _ = find_engine_facts(spec, views[:1] * 2)
    assert slower is not None
    assert facts.differs(slower)


def test_a_search_request_survives_json() -> None:
    measured = MeasuredEngineFacts(
        coefficients=(1e-3, 2e-5, 0.0, 1e-4, 0.0, 1e-8),
        kv_blocks_total=10,
        block_size_tokens=16,
        kv_bytes_per_token=1,
        max_num_seqs=8,
    )
    classes = [{"name": "chat", "ttftMilliseconds": 300, "tpotMilliseconds": 30, "priority": 2}]
    slo = {"ttftMilliseconds": 1000, "tpotMilliseconds": 50, "classes": classes}
    request = make_question(slo=slo)
    for engine in (request.engine, measured):
        last_request = SearchRequest(
            **{**{name: getattr(request, name) for name in request.__slots__}, "engine": engine}
        )
        assert SearchRequest.from_json(last_request.to_json()) == last_request
    answer = make_answer()
    assert SearchResult.from_json(answer.to_json()) == answer


@pytest.mark.parametrize(
    ("found_rps", "in_force_rps", "gain"),
    [(3.0, 2.0, 0.5), (0.5, 0.0, math.inf), (0.0, 0.0, 0.0), (0.5, 0.4, 0.25)],
)
def test_the_gain_is_over_what_is_in_force(found_rps: float, in_force_rps: float, gain: float) -> None:
    answer = replace(make_answer(), goodput_rps=found_rps, in_force_goodput_rps=in_force_rps)
    assert answer.gain == pytest.approx(gain)


@pytest.mark.parametrize(
    ("strategy", "chunks", "candidate"),
    [
        ("TaiChi", (512, 512), ("aggregated", 2, 512, 0)),
        ("TaiChi", (512, 64), ("taichi", 1, 512, 64)),
        ("Aggregated", (512, 512), ("aggregated", 2, 512, 0)),
        ("Sluice", (512, 512), ("sluice", 2, 512, 0)),
    ],
)
def test_equal_chunk_sizes_of_roles_are_aggregation(strategy: str, chunks: tuple[int, int], candidate: object) -> None:
    request = make_question(strategy=strategy)
    sliders = Sliders(num_prefill_heavy=1, prefill_heavy_tokens=chunks[0], decode_heavy_tokens=chunks[1])
    made = make_candidate(replace(request, in_force=sliders))
    assert (made.strategy, made.num_prefill_heavy, made.prefill_heavy_tokens, made.decode_heavy_tokens) == candidate


@pytest.mark.parametrize("rate_rps", [0.5, 5.0, 50.0])
def test_runs_of_a_search_hold_hundreds_of_requests(rate_rps: float) -> None:
    """Among few, the share that no sliders serve in time is chance."""
    effort = make_effort(make_problem(make_question()))
    assert rate_rps * effort.choose_duration_s(rate_rps) >= 500


@pytest.mark.parametrize(
    ("tpot_ms", "filled_s"), [(5, 2.34), (70, 32.7), (1000, 90.0)], ids=["short", "usual", "no longer than that"]
)
def test_runs_of_a_search_last_until_its_engines_are_full(tpot_ms: int, filled_s: float) -> None:
    question = make_question(slo={"ttftMilliseconds": 4000, "tpotMilliseconds": tpot_ms})
    assert make_effort(make_problem(question)).filled_s == pytest.approx(filled_s, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [("TaiChi", None), ("Aggregated", "num_prefill_heavy"), ("Disaggregated", "decode_heavy_tokens")],
)
def test_a_search_stays_within_bounds_and_is_no_worse_than_what_is_in_force(strategy: str, kept: str | None) -> None:
    request = make_question(strategy=strategy)
    answer = search(request, SearchEffort(seeds=(1,), duration_s=12.0, num_compared=1))
    assert 1 <= answer.sliders.num_prefill_heavy <= 3
    if strategy != "Disaggregated":
        assert 256 <= answer.sliders.prefill_heavy_tokens <= 2048 or answer.sliders == request.in_force
    assert answer.gain >= 0.0
    assert 0.0 <= answer.attainment <= 1.0
    if kept is not None:
        assert getattr(answer.sliders, kept) == getattr(request.in_force, kept)


def test_a_search_chooses_its_own_effort() -> None:
    answer = search(make_question(autotune={**APPLY, "bounds": {"prefillHeavy": {"min": 1, "max": 1}}}))
    assert answer.sliders == make_question().in_force
    assert answer.gain == 0.0


@pytest.mark.parametrize(
    ("best", "in_force", "gain"),
    [
        ((3.0, 2.2), (2.0, 2.0), 0.1),
        ((1.8, 3.0), (2.0, 2.0), -0.1),
        ((3.0, 3.0), (0.0, 2.0), 0.5),
        ((3.0, 3.0), (0.0, 0.0), 1.0),
        ((0.0, 3.0), (0.0, 2.0), 0.0),
    ],
)
def test_the_least_gain_is_that_of_the_worst_seed(best, in_force, gain: float) -> None:
    assert compute_least_gain(best, in_force) == pytest.approx(gain)


def test_objectives_that_nothing_meets_are_answered_with_an_attainment_to_expect() -> None:
    request = make_question(slo={"ttftMilliseconds": 4000, "tpotMilliseconds": 1})
    answer = search(request, SearchEffort(seeds=(1,), duration_s=12.0, num_compared=1))
    assert (answer.goodput_rps, answer.gain, answer.least_gain) == (0.0, 0.0, 0.0)
    assert answer.attainment < 0.5


def test_a_slider_without_bounds_is_left_alone_by_apply_and_free_for_recommend() -> None:
    one = {"prefillHeavy": {"min": 1, "max": 3}}
    free = make_question(autotune={"mode": "Recommend"}).constraints
    assert (free.prefill_heavy, free.decode_tokens) == (("0%", "100%"), (0, free.max_batch_tokens))
    applied = make_question(autotune={**APPLY, "bounds": one}).constraints
    assert (applied.prefill_tokens, applied.decode_tokens) == ((8192, 8192), (512, 512))
    recommended = make_question(autotune={"mode": "Recommend", "bounds": one}).constraints
    assert (recommended.prefill_tokens, recommended.decode_tokens) == ((64, 8192), (0, 8192))


@pytest.mark.parametrize(
    ("strategy", "counts", "chunks", "sliders"),
    [
        ("taichi", (1, 2), (1024, 128), (1, 1024, 128)),
        ("flowprefill", (2, 1), (2048, 0), (2, 2048, 0)),
        ("disaggregated", (1, 2), (8192, 0), (1, 8192, 0)),
        ("aggregated", (3, 0), (512, 0), (2, 512, 512)),
        ("dynaserve", (3, 0), (8192, 0), (2, 8192, 8192)),
        ("ecoserve", (3, 0), (8192, 0), (2, 8192, 8192)),
        ("sluice", (3, 0), (8192, 0), (2, 8192, 8192)),
    ],
)
def test_a_chosen_strategy_is_in_force_as_it_was_simulated(
    strategy: str, counts: tuple[int, int], chunks: tuple[int, int], sliders: tuple[int, int, int]
) -> None:
    request = make_question(strategy="Auto", replicas=3, autotune={"mode": "Apply"})
    candidate = SliderCandidate(
        strategy=strategy,
        num_prefill_heavy=counts[0],
        num_decode_heavy=counts[1],
        prefill_heavy_tokens=chunks[0],
        decode_heavy_tokens=chunks[1],
    )
    assert make_space(request).contains(candidate)
    found = make_sliders(request, candidate)
    assert (found.num_prefill_heavy, found.prefill_heavy_tokens, found.decode_heavy_tokens) == sliders
    in_force = apply_sliders(
        check_manifest(make_cluster(strategy="Auto", replicas=3, engine={"maxBatchTokens": 8192})), found
    ).spec
    assert (in_force.strategy.lower(), resolve_sliders(in_force)) == (strategy, replace(found, strategy=""))
    assert make_candidate(replace(request, in_force=found)) == candidate


def test_auto_is_the_default_strategy_with_every_slider_free_but_for_bounds() -> None:
    bounds = {"chunkSizes": {"prefillHeavy": {"min": 512, "max": 1024}}}
    free, bound = (
        make_question(strategy="Auto", autotune={**APPLY, "bounds": each}).constraints for each in ({}, bounds)
    )
    assert (free.prefill_heavy, free.prefill_tokens, free.decode_tokens) == (("0%", "100%"), (64, 8192), (0, 8192))
    assert (bound.prefill_tokens, bound.decode_tokens) == ((512, 1024), (0, 8192))
    assert not free.is_fixed
    one = {"prefillHeavy": {"min": 1, "max": 1}}
    chunks = {"chunkSizes": {each: {"min": 512, "max": 512} for each in ("prefillHeavy", "decodeHeavy")}}
    assert not make_question(strategy="Auto", autotune={**APPLY, "bounds": one | chunks}).constraints.is_fixed
    assert make_question(autotune={**APPLY, "bounds": one | chunks}).constraints.is_fixed
    assert make_candidate(make_question(strategy="Auto")).strategy == "sluice"
    assert make_space(make_question(strategy="Auto")).strategies == tuple(STRATEGIES)


def test_a_search_for_auto_compares_all_strategies_and_names_the_best() -> None:
    request = make_question(strategy="Auto", autotune={"mode": "Recommend"})
    answer = search(request, SearchEffort(seeds=(1,), duration_s=4.0, num_compared=1))
    assert answer.sliders.strategy in STRATEGIES
    assert answer.gain >= 0.0
    assert SearchResult.from_json(answer.to_json()) == answer


async def test_a_search_runs_in_a_process_of_its_own() -> None:
    chunks = {"decodeHeavy": {"min": 128, "max": 192}}
    request = make_question(autotune={**APPLY, "bounds": {"chunkSizes": chunks}})
    answer = await SearchRunner().run(request)
    assert answer.sliders.decode_heavy_tokens in (128, 192, 512)
    assert answer.gain >= 0.0


async def test_a_search_that_cannot_be_made_says_why() -> None:
    unknown = make_question()
    object.__setattr__(unknown, "engine", EmulatedEngineFacts(gpu="abacus", model="qwen2.5-14b"))
    with pytest.raises(SearchError, match="abacus"):
        await SearchRunner().run(unknown)
    with pytest.raises(SearchError, match="did not start"):
        await SearchRunner(("/nonexistent",)).run(unknown)
    with pytest.raises(SearchError, match="cannot be read"):
        await SearchRunner((sys.executable, "-c", "import sys; sys.stdin.read(); print('[]')")).run(unknown)
    with pytest.raises(SearchError, match="exit status 3"):
        await SearchRunner((sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)")).run(unknown)


async def test_two_searches_run_at_a_time_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    running, goes_on = [], asyncio.Event()

    async def run(*_: object) -> str:
        running.append(len(running))
        await goes_on.wait()
        return "[]"

    monkeypatch.setattr(search_process, "_run_program", run)
    runner, question = SearchRunner(), make_question()
    searches = [asyncio.create_task(runner.run(question)) for _ in range(3)]
    for _ in range(9):
        await asyncio.sleep(0)
    assert len(running) == 2
    goes_on.set()
    assert [type(error) for error in await asyncio.gather(*searches, return_exceptions=True)] == [SearchError] * 3
    assert len(running) == 3


async def test_a_search_that_eats_memory_ends_alone_and_says_so() -> None:
    program = (
        "from sluice_operator.autotune import search, search_process\n"
        "search.search = lambda request: bytearray(search_process.MAX_MEMORY_BYTES)\n"
        "search.main()"
    )
    with pytest.raises(SearchError, match="needs more than 384 MiB; narrow"):
        await SearchRunner((sys.executable, "-c", program)).run(make_question())


def test_a_search_on_measured_engines_rejects_and_refuses_as_their_routers_do() -> None:
    request = replace(
        make_question(),
        engine=MeasuredEngineFacts(
            coefficients=(1e-3, 2e-5, 0.0, 1e-4, 0.0, 1e-8),
            kv_blocks_total=1000,
            block_size_tokens=16,
            kv_bytes_per_token=1,
            max_num_seqs=8,
        ),
    )
    assert make_engine(request).profile.num_observations >= PROVEN_OBSERVATIONS
    assert make_problem(request).options.wait_limit_s == WAIT_LIMIT_S.default == ROUTER_WAIT_LIMIT_S


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_search_is_killed_when_it_is_late_or_not_wanted(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    program = "import time; time.sleep(600)"
    if is_late:
        monkeypatch.setattr(search_process, "LIMIT_S", 0.2)
        # For each of two engines.
        monkeypatch.setattr(search_process, "LIMIT_PER_ENGINE_S", 0.4)
    # Tests before this one may have left children of their own.
    others = psutil.Process().children()
    task = asyncio.create_task(SearchRunner((sys.executable, "-c", program)).run(make_question()))
    while not (searches := [child for child in psutil.Process().children() if child not in others]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    if not is_late:
        task.cancel()
    error = pytest.raises(SearchError, match="took more than 1 s") if is_late else pytest.raises(asyncio.CancelledError)
    with error:
        await task
    assert [search.is_running() for search in searches] == [False]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            r"sys.stderr.buffer.write(b'first\n\xff is no text\n'); sys.exit(3)",
            "the search failed: \N{REPLACEMENT CHARACTER} is no text",
        ),
        ("sys.stderr.write('x' * 900); sys.exit(1)", "the search failed: " + "x" * 500),
    ],
    ids=["no text", "many words"],
)
async def test_a_search_that_ends_badly_is_an_error_in_words(script: str, words: str) -> None:
    runner = SearchRunner((sys.executable, "-c", f"import sys; sys.stdin.read(); {script}"))
    with pytest.raises(SearchError) as failed:
        await runner.run(make_question())
    assert str(failed.value) == words
