"""Model classes are registered with vLLM before it starts a process to inspect them."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from quiet_imports import import_quietly

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def classes() -> Any:
    return import_quietly("sluice_engine.startup.model_classes")


def test_a_model_s_class_is_registered_with_what_it_can_do(classes: Any, tiny_model: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert classes.register_classes(str(tiny_model)) == ["LlamaForCausalLM"]
    known = classes.ModelRegistry.models["LlamaForCausalLM"]
    assert known.inspect_model_cls().is_text_generation_model
    assert known.inspect_model_cls().supports_pp
    assert known.load_model_cls().__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"architectures": null}', '{"architectures": "Llama"}', '{"architectures": [1]}'],
)
def test_a_configuration_that_names_no_class_is_left_to_vllm(classes: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert classes.register_classes(str(tmp_path)) == []


def test_a_model_on_the_hub_and_an_unknown_class_are_left_to_vllm(classes: Any, tmp_path: Path) -> None:
    assert classes.register_classes("some/model-on-a-hub") == []
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"]}))
    assert classes.register_classes(str(tmp_path)) == []
