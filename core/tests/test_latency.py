import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.latency import (
    DEFAULT_TRANSFER_BYTES_PER_S,
    TRANSFER_LATENCY_S,
    LinkSpeed,
    OnlineLatencyModel,
    compute_attention_work,
    estimate_transfer_s,
    find_link,
)
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import IterationShape

# Constant, token, token pair, chunk, decode, context token: seconds.
ENGINES = {
    "14B on an A100": (0.021, 9.2e-5, 5.2e-9, 3.7e-4, 1.2e-5, 1.3e-7),
    "70B": (0.037, 1.7e-4, 5.1e-9, 2e-4, 1e-6, 5.7e-8),
    "tiny on a CPU": (0.003, 2e-5, 1e-8, 1e-3, 1e-4, 1e-7),
    "huge": (2.0, 1e-2, 1e-6, 0.1, 0.1, 1e-4),
}


def draw_shape(rng):
    decodes = rng.randint(0, 200)
    tokens = rng.choice([0, 0, 128, 256, 512, 2048])
    context = rng.randint(0, 4000)
    return IterationShape(
        prefill_tokens=tokens,
        attention_work=compute_attention_work(tokens, context),
        num_chunks=1 if tokens else 0,
        num_decodes=decodes,
        decode_context_tokens=decodes * rng.randint(100, 2000),
    )


def measure(coefficients, shape):
    base, token, work, chunk, decode, context = coefficients
    return (
        base
        + token * (shape.prefill_tokens + shape.num_decodes)
        + work * shape.attention_work
        + chunk * shape.num_chunks
        + decode * shape.num_decodes
        + context * shape.decode_context_tokens
    )


def fit(model, coefficients, num, *, seed=0, noise=0.03, stalls=0.0):
    rng = random.Random(seed)
    for _ in range(num):
        shape = draw_shape(rng)
        duration = measure(coefficients, shape) * max(0.1, rng.gauss(1, noise))
        model.observe(shape, duration * (20 if rng.random() < stalls else 1))


def mean_error(model, coefficients, seed=99):
    rng = random.Random(seed)
    shapes = [draw_shape(rng) for _ in range(200)]
    errors = [abs(model.estimate_shape_s(s) / measure(coefficients, s) - 1) for s in shapes]
    return sum(errors) / len(errors)


@pytest.mark.parametrize("coefficients", ENGINES.values(), ids=ENGINES)
def test_any_engine_is_learned_in_some_hundred_iterations(coefficients):
    model = OnlineLatencyModel()
    fit(model, coefficients, 300)
    assert mean_error(model, coefficients) < 0.06
    assert model.relative_error < 0.1
    assert model.num_observations == 300


def test_a_profile_is_right_before_anything_was_measured():
    known = load_model_on_gpu("llama-3-8b", "h100-80g").profile
    model = OnlineLatencyModel(known)
    for tokens, decodes in ((0, 16), (2048, 0), (1024, 64)):
        shape = IterationShape(
            prefill_tokens=tokens,
            attention_work=compute_attention_work(tokens, 0),
            num_chunks=1 if tokens else 0,
            num_decodes=decodes,
            decode_context_tokens=decodes * 1000,
        )
        assert model.estimate_shape_s(shape) == pytest.approx(known.estimate_shape_s(shape), rel=0.25)
    assert model.num_observations == 0


@pytest.mark.parametrize("known", [("llama-3-8b", "h100-80g"), ("opt-13b", "a100-80g")], ids=" ".join)
@pytest.mark.parametrize("coefficients", ENGINES.values(), ids=ENGINES)
def test_an_engine_is_learned_whatever_profile_was_given(known, coefficients):
    model = OnlineLatencyModel(load_model_on_gpu(*known).profile)
    fit(model, coefficients, 600)
    assert mean_error(model, coefficients) < 0.1


@pytest.mark.parametrize("coefficients", ENGINES.values(), ids=ENGINES)
def test_one_iteration_of_decodes_puts_prefills_in_the_right_magnitude(coefficients):
    model = OnlineLatencyModel()
    shape = IterationShape(num_decodes=32, decode_context_tokens=32_000)
    model.observe(shape, measure(coefficients, shape))
    prefill = IterationShape(prefill_tokens=2048, attention_work=2048 * 1024, num_chunks=1)
    # Of the first guess, those for the slowest and for the fastest engine are wrong by more than this.
    assert 1 / 3 < model.estimate_shape_s(prefill) / measure(coefficients, prefill) < 3


def test_stalls_do_not_move_the_estimate():
    model = OnlineLatencyModel()
    fit(model, ENGINES["14B on an A100"], 600, stalls=0.02)
    assert mean_error(model, ENGINES["14B on an A100"]) < 0.06


def test_heavy_noise_does_not_bias_the_estimate():
    model = OnlineLatencyModel()
    fit(model, ENGINES["14B on an A100"], 1000, noise=0.3)
    assert mean_error(model, ENGINES["14B on an A100"]) < 0.1


@pytest.mark.parametrize("factor", [10.0, 0.1], ids=["slower", "faster"])
def test_a_changed_engine_is_learned_again(factor):
    model = OnlineLatencyModel()
    before = ENGINES["14B on an A100"]
    after = tuple(c * factor for c in before)
    fit(model, before, 500)
    fit(model, after, 300, seed=1)
    assert mean_error(model, after) < 0.1


@pytest.mark.parametrize("duration", [0.0, -1.0, math.inf, math.nan], ids=str)
def test_impossible_durations_are_ignored(duration):
    model = OnlineLatencyModel()
    model.observe(IterationShape(num_decodes=1), duration)
    assert model.num_observations == 0


counts = st.integers(0, 5000)
shapes = st.builds(
    IterationShape,
    prefill_tokens=counts,
    attention_work=st.floats(0, 1e8),
    num_chunks=st.integers(0, 50),
    num_decodes=st.integers(0, 500),
    decode_context_tokens=st.integers(0, 10**6),
)


@settings(max_examples=50)
@given(observations=st.lists(st.tuples(shapes, st.floats(1e-6, 1e3)), max_size=40), shape=shapes)
def test_more_work_never_takes_less_time_whatever_was_measured(observations, shape):
    model = OnlineLatencyModel()
    for observed, duration in observations:
        model.observe(observed, duration)
    estimate = model.estimate_shape_s(shape)
    assert estimate >= 0
    assert math.isfinite(estimate)
    larger = IterationShape(
        prefill_tokens=shape.prefill_tokens + 10,
        attention_work=shape.attention_work + 1e4,
        num_chunks=shape.num_chunks + 1,
        num_decodes=shape.num_decodes + 1,
        decode_context_tokens=shape.decode_context_tokens + 100,
    )
    assert model.estimate_shape_s(larger) >= estimate


def prefill(model, tokens, room, num_prompts=1, decodes=0):
    return model.estimate_prefill_s(
        tokens=tokens,
        attention_work=compute_attention_work(tokens, 0),
        num_prompts=num_prompts,
        room_tokens=room,
        num_decodes=decodes,
        decode_context_tokens=decodes * 1000,
    )


def test_no_tokens_take_no_time_and_no_room_takes_for_ever():
    model = OnlineLatencyModel()
    assert prefill(model, 0, 0) == 0.0
    assert prefill(model, 1, 0) == math.inf


@given(tokens=st.integers(1, 10_000), room=st.integers(1, 4096), decodes=st.integers(0, 200))
def test_prefill_estimate_is_the_sum_of_its_iterations(tokens, room, decodes):
    model = OnlineLatencyModel()
    total, done = 0.0, 0
    while done < tokens:
        chunk = min(room, tokens - done)
        shape = IterationShape(
            prefill_tokens=chunk,
            attention_work=compute_attention_work(chunk, done),
            num_chunks=1,
            num_decodes=decodes,
            decode_context_tokens=decodes * 1000,
        )
        total += model.estimate_shape_s(shape)
        done += chunk
    assert prefill(model, tokens, room, decodes=decodes) == pytest.approx(total)


def test_transfers_share_a_link_one_after_the_other():
    link = LinkSpeed(bytes_per_s=100.0, latency_s=0.5)
    free_at, first_arrives = link.schedule(10.0, 0.0, 200)
    assert (free_at, first_arrives) == (12.0, 12.5)
    assert link.schedule(11.0, free_at, 300) == (15.0, 15.5)
    assert link.schedule(20.0, free_at, 100) == (21.0, 21.5)


def test_a_long_prompt_over_nvlink_takes_the_designs_time():
    kv_bytes = 7500 * load_model_on_gpu("qwen2.5-14b", "a100-80g").kv_bytes_per_token
    _, arrives = find_link("NVLink").schedule(0.0, 0.0, kv_bytes)
    assert arrives == pytest.approx(0.012, abs=0.0005)


def test_links_are_as_fast_as_their_wires():
    speeds = {"nvlink": 150e9, "pcie": 25e9, "infiniband": 24e9, "100GbE": 12e9, "25gbe": 3e9, "tcp": 1.2e9}
    assert {name: find_link(name).bytes_per_s for name in speeds} == speeds
    assert {find_link(name).latency_s for name in speeds} == {0.002}
    assert estimate_transfer_s(1000, 200_000, 0.0) == pytest.approx(0.002 + 0.02)
    assert estimate_transfer_s(1000, 200_000, math.inf) == pytest.approx(0.002 + 0.02)


def test_an_unknown_link_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="nvlink, pcie, infiniband, 100gbe, 25gbe, tcp"):
        find_link("pigeon")


def test_transfer_time_is_latency_plus_bytes_over_the_measured_rate():
    assert estimate_transfer_s(1000, 200_000, 1e9) == pytest.approx(TRANSFER_LATENCY_S + 0.2)
    assert estimate_transfer_s(1000, 200_000, 0.0) == pytest.approx(
        TRANSFER_LATENCY_S + 2e8 / DEFAULT_TRANSFER_BYTES_PER_S
    )


def test_fitted_coefficients_make_a_profile_that_takes_as_long():
    model = OnlineLatencyModel()
    for tokens in (1, 7, 300, 2000):
        model.observe(
            IterationShape(prefill_tokens=tokens, num_chunks=1, attention_work=tokens**2 / 2), 0.01 + 1e-4 * tokens
        )
    profile = model.coefficients.make_profile()
    for shape in (
        IterationShape(num_decodes=1, decode_context_tokens=10),
        IterationShape(prefill_tokens=511, num_chunks=2, attention_work=1e5, num_decodes=9, decode_context_tokens=4000),
    ):
        assert profile.estimate_shape_s(shape) == pytest.approx(model.estimate_shape_s(shape))
