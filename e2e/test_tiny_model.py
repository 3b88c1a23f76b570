"""The tiny model is reproducible and complete, and works as a chat model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import jinja2
import pytest
from examples.tiny_model import RECIPE, NotOurDirectoryError, make_tiny_model
from safetensors.numpy import load_file
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    assert make_tiny_model(directory)
    return directory


def test_the_model_is_the_same_byte_for_byte(model: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "again")
    names = sorted(path.name for path in model.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (model / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_a_finished_model_is_not_made_again(model: Path) -> None:
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert not make_tiny_model(model)
    assert (model / "model.safetensors").stat().st_mtime_ns == before


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(NotOurDirectoryError, match=str(tmp_path)):
        make_tiny_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize("text", ["def f(x): return x", "Grüße, 世界! \U0001f600", "", "\x00\x7f\r\n\t", "<|im_end|"])
def test_any_text_goes_through_the_tokenizer_unchanged(model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_chat_template_renders_turns_and_the_generation_prompt(model: Path) -> None:
    template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    text = jinja2.Template(template).render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_files_agree_with_one_another(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    generation = json.loads((model / "generation_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    weights = load_file(model / "model.safetensors")
    assert config["max_position_embeddings"] == RECIPE.max_tokens == 4096
    assert tokenizer.get_vocab_size() == config["vocab_size"] == weights["lm_head.weight"].shape[0]
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"] == generation["eos_token_id"]
    assert len(weights) == 3 + 9 * RECIPE.layers
