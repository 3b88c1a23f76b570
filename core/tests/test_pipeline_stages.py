"""Profiles of pipeline stages, held to DistServe's section 3 and to a pipeline that is played step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.latency.interface import ModelTooLargeError, UnknownModelError
from sluice_core.latency.iteration_time import DecodeCoefficients, IterationProfile
from sluice_core.latency.measured_profiles import Assumptions, load_model_on_gpu
from sluice_core.latency.pipeline_stages import make_lockstep_profile, make_stage_profile

HOST_S = 0.003
PROFILE = IterationProfile(
    linear_s=(0.0, *(HOST_S + 0.01 + 1e-4 * max(0, 8 * row - 64) for row in range(1, 257))),
    slope_s=1e-4,
    prefill_base_s=1e-4,
    prefill_token_s=1e-5,
    prefill_work_s=2e-9,
    decode_base_s=1e-3,
    decode_request_s=2e-5,
    decode_context_s=1e-7,
    host_sequence_s=1e-5,
)
DISTSERVE = load_model_on_gpu("opt-13b", "a100-80g").profile


def estimate_prefill_s(profile: IterationProfile, tokens: int) -> float:
    return profile.estimate_iteration_s(tokens, 1, tokens, tokens * tokens / 2, 0, 0)


def estimate_decodes_s(profile: IterationProfile, num: int, context: int) -> float:
    return profile.estimate_iteration_s(num, 0, 0, 0.0, num, num * context)


@pytest.mark.parametrize("profile", [PROFILE, DISTSERVE], ids=["kernels", "distserve"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 64, 700, 9000])
def test_stages_without_host_work_take_together_what_all_layers_take(
    profile: IterationProfile, num_stages: int, tokens: int
) -> None:
    stage = make_stage_profile(profile, num_stages, 0.0)
    work_s = estimate_prefill_s(profile, tokens) - profile.host_sequence_s
    assert num_stages * (estimate_prefill_s(stage, tokens) - profile.host_sequence_s) == pytest.approx(work_s)


@given(num_stages=st.integers(1, 16), tokens=st.integers(1, 20_000), decodes=st.integers(1, 300))
def test_every_stage_does_all_of_the_hosts_work(num_stages: int, tokens: int, decodes: int) -> None:
    stage = make_stage_profile(PROFILE, num_stages, HOST_S)
    for estimate in (
        lambda profile: estimate_prefill_s(profile, tokens) - profile.host_sequence_s,
        lambda profile: estimate_decodes_s(profile, decodes, 900) - decodes * profile.host_sequence_s,
    ):
        layers_s = estimate(PROFILE) - HOST_S
        assert estimate(stage) == pytest.approx(layers_s / num_stages + HOST_S)


@pytest.mark.parametrize("num_decodes", [94, 95, 300])
def test_a_stage_of_distserve_keeps_the_size_from_which_batches_count_as_large(num_decodes: int) -> None:
    stage = make_stage_profile(DISTSERVE, 4, 0.0)
    assert 4 * estimate_decodes_s(stage, num_decodes, 500) == pytest.approx(
        estimate_decodes_s(DISTSERVE, num_decodes, 500)
    )
    assert isinstance(stage.large_batch, DecodeCoefficients)


def play_micro_batches(stage: IterationProfile, num_stages: int, per_batch: int, context: int) -> float:
    """Plays micro-batches that go round a pipeline; returns the time between two tokens once it is full."""
    free_s = [0.0] * num_stages
    ready_s = [0.0] * num_stages  # by micro-batch: when it may enter the first stage again
    tokens_s: list[float] = []
    for turn in range(6 * num_stages):
        batch = turn % num_stages
        at_s = ready_s[batch]
        for number in range(num_stages):
            at_s = max(at_s, free_s[number]) + estimate_decodes_s(stage, per_batch, context)
            free_s[number] = at_s
        ready_s[batch] = at_s
        if batch == 0:
            tokens_s.append(at_s)
    return tokens_s[-1] - tokens_s[-2]


@settings(max_examples=50)
@given(
    num_stages=st.integers(1, 6),
    per_batch=st.integers(1, 120),
    context=st.integers(1, 3000),
    name=st.sampled_from(["kernels", "distserve"]),
)
def test_decodes_in_lockstep_get_a_token_each_time_their_micro_batch_has_gone_round(
    num_stages: int, per_batch: int, context: int, name: str
) -> None:
    profile, host_s = (DISTSERVE, 0.0) if name == "distserve" else (PROFILE, HOST_S)
    stage = make_stage_profile(profile, num_stages, host_s)
    lockstep = make_lockstep_profile(stage, num_stages)
    # The table has steps of 8 tokens: a row stands for up to so many in all micro-batches together.
    row = -(-num_stages * per_batch // 8) * 8
    steps_s = num_stages * (stage.estimate_linear_s(-(-row // num_stages)) - stage.estimate_linear_s(per_batch))
    played_s = play_micro_batches(stage, num_stages, per_batch, context)
    assert estimate_decodes_s(lockstep, num_stages * per_batch, context) == pytest.approx(played_s + steps_s)
    assert steps_s >= 0.0


def test_more_decodes_never_take_less_time_in_lockstep() -> None:
    lockstep = make_lockstep_profile(make_stage_profile(PROFILE, 4, HOST_S), 4)
    times = [estimate_decodes_s(lockstep, num, 500) for num in range(1, 400)]
    assert times == sorted(times)


def test_a_recomputed_prompt_passes_all_stages() -> None:
    stage = make_stage_profile(PROFILE, 4, 0.0)
    attention_s = estimate_prefill_s(PROFILE, 512) - PROFILE.estimate_linear_s(512) - PROFILE.host_sequence_s
    lockstep = make_lockstep_profile(stage, 4)
    found_s = estimate_prefill_s(lockstep, 512) - lockstep.estimate_linear_s(512) - PROFILE.host_sequence_s
    assert found_s == pytest.approx(attention_s)


def test_one_stage_is_the_engine_that_there_was() -> None:
    assert make_stage_profile(PROFILE, 1, HOST_S) is PROFILE
    assert make_lockstep_profile(PROFILE, 1) is PROFILE


def test_stages_share_weights_and_memory() -> None:
    one = load_model_on_gpu("qwen2.5-14b", "a100-80g", 2)
    two = load_model_on_gpu("qwen2.5-14b", "a100-80g", 1, pipeline_parallel=2)
    assert (two.tensor_parallel, two.pipeline_parallel) == (1, 2)
    assert two.kv_capacity_tokens == one.kv_capacity_tokens
    assert two.weight_bytes == one.weight_bytes
    # DistServe measured what is left on 1, 2 and 4 GPUs; memory that a stage adds is computed.
    measured, computed = (
        load_model_on_gpu("opt-13b", "a100-80g", 2),
        load_model_on_gpu("opt-13b", "a100-80g", pipeline_parallel=2),
    )
    assert computed.kv_capacity_tokens == pytest.approx(measured.kv_capacity_tokens, rel=0.05)


def test_a_stage_counts_the_hosts_work_as_assumed() -> None:
    slow = Assumptions(host_iteration_s=0.008)
    whole = load_model_on_gpu("llama-3-8b", "h100-80g", assumptions=slow).profile
    stage = load_model_on_gpu("llama-3-8b", "h100-80g", pipeline_parallel=2, assumptions=slow).profile
    assert stage.linear_s[100] == pytest.approx((whole.linear_s[100] - 0.008) / 2 + 0.008)


def test_a_model_that_does_not_fit_on_one_gpu_fits_in_stages() -> None:
    with pytest.raises(ModelTooLargeError, match="do not fit into the"):
        load_model_on_gpu("qwen2.5-32b", "l40s-48g")
    assert load_model_on_gpu("qwen2.5-32b", "l40s-48g", pipeline_parallel=4).kv_capacity_tokens > 100_000


@pytest.mark.parametrize("num_stages", [0, 3])
def test_stages_of_unequal_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(UnknownModelError, match=rf"llama-3-8b has 32 layers, which {num_stages} stages cannot share"):
        load_model_on_gpu("llama-3-8b", "h100-80g", pipeline_parallel=num_stages)
