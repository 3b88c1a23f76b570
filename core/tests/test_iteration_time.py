import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_core.latency import IterationProfile, LatencyModel, compute_attention_work
from sluice_core.records import EngineId, IterationShape, Role
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable

# Flat up to 32 tokens, then 1 ms per 8 tokens; every other coefficient has a value of its own.
PROFILE = IterationProfile(
    linear_s=(0.0, 0.02, 0.02, 0.02, 0.02, 0.021, 0.022, 0.023, 0.024),
    prefill_base_s=1e-3,
    prefill_token_s=1e-6,
    prefill_work_s=1e-9,
    decode_base_s=2e-3,
    decode_request_s=3e-6,
    decode_context_s=4e-9,
    host_sequence_s=1e-5,
    slope_s=1.25e-4,
)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [(0, 0.0), (1, 0.02), (8, 0.02), (9, 0.02), (33, 0.021), (40, 0.021), (41, 0.022), (64, 0.024), (80, 0.026)],
    ids=["none", "one", "a row", "above a row", "rounded up", "row", "next", "last row", "beyond the table"],
)
def test_linear_time_is_the_row_that_holds_the_tokens(tokens, seconds):
    assert PROFILE.estimate_linear_s(tokens) == pytest.approx(seconds)
    assert PROFILE.estimate_iteration_s(tokens, 0, 0, 0.0, 0, 0) == pytest.approx(seconds)


def test_each_part_of_an_iteration_has_its_price():
    work = compute_attention_work(20, 300) + compute_attention_work(4, 0)
    expected = 0.02 + 2 * (1e-3 + 1e-5) + 24e-6 + work * 1e-9 + 2e-3 + 6 * (3e-6 + 1e-5) + 5000 * 4e-9
    assert PROFILE.estimate_iteration_s(30, 2, 24, work, 6, 5000) == pytest.approx(expected)
    shape = IterationShape(
        prefill_tokens=24, attention_work=work, num_chunks=2, num_decodes=6, decode_context_tokens=5000
    )
    assert PROFILE.estimate_shape_s(shape) == pytest.approx(expected)


def test_a_prefill_costs_what_its_iterations_cost():
    room, decodes, contexts, tokens = 40, 8, 4000, 100
    iterations_s, computed = 0.0, 0
    for chunk in (40, 40, 20):
        work = compute_attention_work(chunk, computed)
        iterations_s += PROFILE.estimate_iteration_s(chunk + decodes, 1, chunk, work, decodes, contexts)
        computed += chunk
    estimate_s = PROFILE.estimate_prefill_s(
        tokens=tokens,
        attention_work=compute_attention_work(tokens, 0),
        num_prompts=1,
        room_tokens=room,
        num_decodes=decodes,
        decode_context_tokens=contexts,
    )
    assert estimate_s == pytest.approx(iterations_s)


@given(
    tokens=st.integers(1, 3000),
    room=st.integers(1, 500),
    decodes=st.integers(0, 60),
    contexts=st.integers(0, 10_000),
)
def test_closed_form_of_a_prefill_is_never_too_low_and_exact_for_full_iterations(tokens, room, decodes, contexts):
    contexts = contexts if decodes else 0
    work = compute_attention_work(tokens, 0)
    estimate_s = PROFILE.estimate_prefill_s(
        tokens=tokens,
        attention_work=work,
        num_prompts=1,
        room_tokens=room,
        num_decodes=decodes,
        decode_context_tokens=contexts,
    )
    found = PROFILE.compute_prefill_coefficients(decodes, contexts, room)
    closed_s = found.per_token_s * tokens + found.per_work_s * work + math.ceil(tokens / room) * found.per_iteration_s
    if tokens % room == 0:
        assert closed_s == pytest.approx(estimate_s)
    # A row holds eight tokens: by so much the secant may fall short of a step.
    assert closed_s >= estimate_s - 0.001 - 1e-12


@given(room=st.integers(1, 500), decodes=st.integers(0, 60))
def test_more_work_never_takes_less_time(room, decodes):
    times = [
        PROFILE.estimate_prefill_s(
            tokens=tokens,
            attention_work=compute_attention_work(tokens, 0),
            num_prompts=1,
            room_tokens=room,
            num_decodes=decodes,
            decode_context_tokens=0,
        )
        for tokens in range(0, 600, 7)
    ]
    assert all(before <= after + 1e-12 for before, after in pairwise(times))


def test_no_tokens_take_no_time_and_no_room_for_ever():
    queue = {"attention_work": 0.0, "num_prompts": 1, "num_decodes": 3, "decode_context_tokens": 9}
    assert PROFILE.estimate_prefill_s(tokens=0, room_tokens=8, **queue) == 0.0
    assert PROFILE.estimate_prefill_s(tokens=8, room_tokens=0, **queue) == math.inf


def test_a_profile_does_not_learn():
    model: LatencyModel = PROFILE
    shape = IterationShape(prefill_tokens=8, num_chunks=1)
    before_s = model.estimate_shape_s(shape)
    model.observe(shape, 100.0)
    assert model.estimate_shape_s(shape) == before_s


def test_placements_can_rest_on_a_profile():
    table = EngineTable(lambda _: PROFILE)
    spec = EngineConfig(block_size_tokens=16, kv_bytes_per_token=1000, max_num_seqs=64, max_batch_tokens=8192)
    table.add(EngineId("a"), spec, role=Role.PREFILL_HEAVY, chunk_size_tokens=40)
    load = EngineLoad(kv_blocks_total=1000, queued_prefill_tokens=80, queued_requests=1, queued_attention_work=3200.0)
    table.report(EngineId("a"), load, 5.0)
    expected_s = 2 * (0.021 + 1e-3 + 1e-5) + 80e-6 + 3200e-9
    assert table[EngineId("a")].free_at_s == pytest.approx(5.0 + expected_s)
