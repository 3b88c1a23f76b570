"""What a config.json says of attention that the engine does not support."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_engine.startup.model_check import find_unsupported_attention


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
