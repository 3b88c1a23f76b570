"""What a config.json says of layers that engines do not support."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sluice_core.model_support import find_refusal, find_unsupported_attention


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param({"model_type": "llama"}, "", id="full attention"),
        pytest.param({"sliding_window": None}, "", id="no window"),
        pytest.param({"sliding_window": 0}, "", id="a window of nothing"),
        pytest.param({"sliding_window": 4096, "use_sliding_window": False}, "", id="Qwen2, whose window is off"),
        pytest.param({"sliding_window": 128, "layer_types": ["full_attention"] * 2}, "", id="a window of no layer"),
        pytest.param({"sliding_window": 4096}, "sliding_window is 4096", id="Mistral"),
        pytest.param(
            {"text_config": {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}},
            "layer_types has sliding_attention",
            id="Gemma 3",
        ),
        pytest.param(
            {"layer_types": ["linear_attention", "full_attention"]}, "layer_types has linear_attention", id="Qwen3-Next"
        ),
        pytest.param(
            {"full_attention_interval": 4, "linear_num_value_heads": 32},
            "linear_num_value_heads is 32, so it has linear attention",
            id="Qwen3-Next without a list of layers",
        ),
        pytest.param(
            {"attn_layer_period": 8, "mamba_d_state": 16},
            "mamba_d_state is 16, so it has state-space layers",
            id="Jamba",
        ),
        pytest.param(
            {"ssm_state_size": 128, "hybrid_override_pattern": "M-M*-"},
            "ssm_state_size is 128, so it has state-space layers",
            id="Nemotron-H",
        ),
        pytest.param({"state_size": 128}, "state_size is 128, so it has state-space layers", id="Mamba 2"),
        pytest.param({"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg, so it has state-space layers", id="the first Mambas"),
        pytest.param(
            {"text_config": {"attention_chunk_size": 8192, "layer_types": ["chunked_attention"]}},
            "attention_chunk_size is 8192, so its attention is local to chunks",
            id="Llama 4",
        ),
        pytest.param({"attention_chunk_size": None}, "", id="no chunks"),
        pytest.param({"is_encoder_decoder": True}, "is_encoder_decoder is True, so it has an encoder", id="Whisper"),
        pytest.param(
            {"is_encoder_decoder": True, "text_config": {"model_type": "llama"}},
            "is_encoder_decoder is True, so it has an encoder",
            id="an encoder beside a language model",
        ),
        pytest.param({"is_encoder_decoder": False, "text_config": None}, "", id="no encoder"),
        pytest.param(
            {"layer_types": ["mamba", "attention"], "mamba_d_state": 256}, "layer_types has mamba", id="Granite 4"
        ),
        pytest.param(
            {"layer_types": ["attention"], "mamba_d_state": 256}, "", id="Granite 4 without state-space layers"
        ),
    ],
)
def test_layers_that_are_not_supported_are_named(config: dict[str, Any], reason: str) -> None:
    assert find_unsupported_attention(config) == reason


def test_a_model_is_refused_by_its_config_unless_the_user_overrides_it(tmp_path: Path) -> None:
    assert find_refusal(Path("org/model"), ()) == find_refusal(tmp_path, ()) == ""
    path = tmp_path / "config.json"
    path.write_text('{"sliding_window": 4096}')
    expected = f"{path}: sliding_window is 4096; models with full attention in every layer are supported"
    assert find_refusal(tmp_path, ()) == find_refusal(tmp_path, ("--gpu-memory-utilization", "0.8")) == expected
    for override in ("--disable-sliding-window", "--disable_sliding_window", '--hf-overrides={"sliding_window": null}'):
        assert find_refusal(tmp_path, ("--enforce-eager", override)) == ""
    path.write_text('{"sliding_window": null}')
    assert find_refusal(tmp_path, ()) == ""


def test_a_config_that_cannot_be_read_is_left_to_vllm(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text('{"sliding_window": 4096}')

    def fail(_path: Path) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", fail)
    assert find_refusal(tmp_path, ()) == ""


@pytest.mark.parametrize(
    ("text", "reason"), [('{"sliding_wi', r"is not JSON \(.*\)"), ("[]", "is no model's configuration")]
)
def test_a_config_that_is_cut_off_is_to_be_fetched_again(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert re.fullmatch(f".*/config.json {reason}; fetch the model again", find_refusal(tmp_path, ()))
