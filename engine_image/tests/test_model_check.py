"""What a config.json says of attention that the engine does not support."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sluice_engine.errors import ModelRefusedError
from sluice_engine.settings import EngineSettings
from sluice_engine.startup.model_check import check_model, find_unsupported_attention

if TYPE_CHECKING:
    from pathlib import Path


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
    ],
)
def test_attention_that_is_not_full_is_named(config: dict[str, Any], reason: str) -> None:
    assert find_unsupported_attention(config) == reason


def check(model: Path | str, *vllm_args: str) -> None:
    fields = {"engine_id": "e", "port": 1, "metrics_port": 2, "kv_host": "h", "kv_port": 3, "max_batch_tokens": 64}
    check_model(EngineSettings(model=str(model), vllm_args=vllm_args, **fields))


def test_a_model_is_refused_by_its_config_unless_the_user_overrides_it(tmp_path: Path) -> None:
    check("org/model")
    check(tmp_path)
    path = tmp_path / "config.json"
    path.write_text('{"sliding_window": 4096}')
    expected = f"{path}: sliding_window is 4096; models with full attention in every layer are supported"
    for arguments in ((), ("--gpu-memory-utilization", "0.8")):
        with pytest.raises(ModelRefusedError) as refused:
            check(tmp_path, *arguments)
        assert str(refused.value) == expected
    for override in ("--disable-sliding-window", "--disable_sliding_window", '--hf-overrides={"sliding_window": null}'):
        check(tmp_path, "--enforce-eager", override)
    path.write_text('{"sliding_window": null}')
    check(tmp_path)


def test_a_config_that_is_cut_off_is_to_be_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"sliding_wi')
    with pytest.raises(ModelRefusedError, match=r"config.json is not JSON \(.*\); fetch the model again"):
        check(tmp_path)
