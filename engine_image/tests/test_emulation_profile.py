"""The clock of emulated engines, and the tokens they choose."""

from __future__ import annotations

from itertools import pairwise

import pytest
from pydantic import ValidationError

from sluice_core.records import IterationShape
from sluice_engine.errors import SettingsError
from sluice_engine.profiles import PROFILES, find_profile
from sluice_engine.settings import EmulationSettings


def estimate_s(settings: dict, **shape) -> float:
    return find_profile(EmulationSettings(**settings)).estimate_iteration_s(IterationShape(**shape))


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


@pytest.mark.parametrize(
    ("tokens", "linear_ms"),
    [(1, 14.3), (8, 14.3), (96, 15.75), (512, 23.8), (16384, 326 + 2 * 164)],
    ids=["below the table", "first row", "between rows", "a row", "beyond the table"],
)
def test_a_profile_interpolates_its_table(tokens, linear_ms):
    settings = {"gpu": "h100", "model": "Qwen2.5-14B", "chunk_s": 0.0, "attention_s": 0.0}
    prefill_token_s = 0.89e-6
    found_s = estimate_s(settings, prefill_tokens=tokens, num_chunks=1)
    assert found_s == pytest.approx(linear_ms / 1e3 + tokens * prefill_token_s)


@pytest.mark.parametrize("key", PROFILES, ids=" ".join)
def test_more_work_never_takes_less_time(key):
    times = [
        PROFILES[key].estimate_iteration_s(IterationShape(prefill_tokens=tokens, num_chunks=1))
        for tokens in range(1, 20_000, 97)
    ]
    assert all(before <= after for before, after in pairwise(times))


def test_a_14b_prefill_of_8192_tokens_has_the_checked_rate():
    shape = IterationShape(prefill_tokens=8192, num_chunks=1, attention_work=8192 * 4096)
    assert 8192 / PROFILES["a100", "qwen2.5-14b"].estimate_iteration_s(shape) == pytest.approx(8160, rel=0.03)


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(SettingsError, match=r"qwen2\.5-14b on h100"):
        find_profile(EmulationSettings(gpu="abacus", model="Qwen2.5-14B"))


@pytest.mark.parametrize("settings", [{"base_s": -1.0}, {"link_bytes_per_s": 0}, {"bas_s": 1.0}], ids=str)
def test_settings_are_checked(settings):
    with pytest.raises(ValidationError):
        EmulationSettings(**settings)


def test_explicit_coefficients_go_over_a_profile():
    settings = {"gpu": "h100", "model": "qwen2.5-14b", "base_s": 0.5}
    profile = find_profile(EmulationSettings(**settings))
    assert profile.linear_s[0] == (0, 0.5)
    assert profile.context_s == PROFILES["h100", "qwen2.5-14b"].context_s
    assert profile.kv_tokens == 227_000
