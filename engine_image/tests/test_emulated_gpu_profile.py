"""The clock of emulated engines, and the tokens they choose."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import IterationShape
from sluice_engine.emulation.emulated_gpu_profile import find_gpu
from sluice_engine.errors import SettingsError
from sluice_engine.settings import EmulationSettings


def estimate_s(settings: dict, **shape) -> float:
    return find_gpu(EmulationSettings(**settings)).profile.estimate_shape_s(IterationShape(**shape))


def test_explicit_coefficients_add_up():
    settings = {
        "base_s": 0.01,
        "token_s": 1e-4,
        "attention_s": 1e-6,
        "chunk_s": 1e-3,
        "decode_s": 2e-4,
        "context_s": 1e-7,
    }
    shape = {
        "prefill_tokens": 100,
        "attention_work": 5000.0,
        "num_chunks": 2,
        "num_decodes": 10,
        "decode_context_tokens": 4000,
    }
    expected = 0.01 + 110e-4 + 5000e-6 + 2e-3 + 10 * 2e-4 + 4000e-7
    assert estimate_s(settings, **shape) == pytest.approx(expected)


def test_an_iteration_that_computes_nothing_takes_no_time():
    assert estimate_s({"base_s": 0.03}) == 0.0


def test_a_gpu_has_the_clock_that_the_simulator_has():
    known = load_model_on_gpu("qwen2.5-14b", "h100-80g")
    gpu = find_gpu(EmulationSettings(gpu="h100-80g", model="Qwen2.5-14B"))
    assert gpu.profile == known.profile
    assert (gpu.kv_tokens, gpu.kv_bytes_per_token) == (known.kv_capacity_tokens, known.kv_bytes_per_token)
    assert find_gpu(EmulationSettings(gpu="h100", model="qwen2.5-14b")) == gpu


def test_gpus_that_share_an_engine_are_a_suffix():
    known = load_model_on_gpu("qwen2.5-32b", "a100-80g", 2)
    gpu = find_gpu(EmulationSettings(gpu="a100x2", model="qwen2.5-32b"))
    assert gpu.profile == known.profile


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"gpu": "abacus", "model": "qwen2.5-14b"}, r"a100-80g, h100-80g"),
        ({"gpu": "h100", "model": "abacus"}, r"llama-3-8b, qwen2\.5-14b"),
        ({"gpu": "a100x3", "model": "qwen2.5-14b"}, "3 GPUs"),
    ],
    ids=["gpu", "model", "number"],
)
def test_what_has_no_profile_is_refused_with_the_known_ones(settings, known):
    with pytest.raises(SettingsError, match=known):
        find_gpu(EmulationSettings(**settings))


@pytest.mark.parametrize("settings", [{"base_s": -1.0}, {"link_bytes_per_s": 0}, {"bas_s": 1.0}], ids=str)
def test_settings_are_checked(settings):
    with pytest.raises(ValidationError):
        EmulationSettings(**settings)


def test_explicit_coefficients_go_over_a_profile():
    known = find_gpu(EmulationSettings(gpu="h100", model="qwen2.5-14b"))
    gpu = find_gpu(EmulationSettings(gpu="h100", model="qwen2.5-14b", base_s=0.5, chunk_s=0.25, decode_s=0.125))
    assert (gpu.profile.estimate_linear_s(8), gpu.profile.estimate_linear_s(8192)) == (0.5, 0.5)
    chunk = {"prefill_tokens": 100, "num_chunks": 1}
    assert gpu.profile.estimate_shape_s(IterationShape(**chunk)) == pytest.approx(
        0.75 + 100 * known.profile.prefill_token_s
    )
    assert gpu.profile.estimate_shape_s(IterationShape(num_decodes=2)) == pytest.approx(
        0.5 + known.profile.decode_base_s + 2 * 0.125
    )
    assert gpu.profile.decode_context_s == known.profile.decode_context_s
    assert gpu.kv_tokens == known.kv_tokens
