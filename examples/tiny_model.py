"""Makes the tiny model: a Llama-shaped network with random weights, its tokenizer and its chat template.

No trained weights can be had as an ordinary dependency, and none are needed to prove that a hand-off is exact:
what matters is that the model is small, that its greedy choice is clear (wide logits, no near ties) and that its
output does not collapse into one token. The tokenizer is a byte-level BPE trained on the standard library, so any
UTF-8 text goes through it and back unchanged.

The directory is a function of ``RECIPE`` and of the Python that runs it: the same command makes the same bytes.

    python examples/tiny_model.py [DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DEFAULT_DIRECTORY = Path(".sluice/volumes/models/tiny")
# The first three ids; the model ends its turn with the third.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STAMP = "sluice-recipe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the model is made of; a change makes another model.

    Args:
        vocabulary: Tokens, special ones and the 256 bytes included.
        hidden: Width of the residual stream.
        intermediate: Width of the feed-forward layers.
        layers: Transformer layers.
        heads: Query heads.
        kv_heads: Key and value heads (grouped-query attention).
        max_tokens: Longest prompt + output, in tokens.
        training_files: Files of the standard library that the tokenizer learns from.
        attention_gain: Standard deviation of query and key weights, times sqrt(fan-in); attention is neither flat nor
            one-hot.
        layer_gain: The same for all other layers.
        logit_gain: The same for the output layer: logits wide enough that greedy choices are clear.
        seed: Seed of the weights.
    """

    vocabulary: int = 2048
    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    max_tokens: int = 4096
    training_files: int = 120
    attention_gain: float = 1.4
    layer_gain: float = 1.7
    logit_gain: float = 2.8
    seed: int = 1


RECIPE = Recipe()


class NotOurDirectoryError(Exception):
    """The target holds files that this program did not make."""


def make_tiny_model(directory: Path, recipe: Recipe = RECIPE) -> bool:
    """Makes the model, unless it is there already.

    Args:
        directory: Where it goes; its parents are made.
        recipe: What it is made of.

    Returns:
        True if it was made now.

    Raises:
        NotOurDirectoryError: The directory holds something else.
    """
    stamp = _describe(recipe)
    marker = directory / STAMP
    if marker.is_file() and marker.read_text() == stamp:
        return False
    if directory.exists() and any(directory.iterdir()) and not marker.is_file():
        raise NotOurDirectoryError(f"{directory} holds files of something else; choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there whole: a killed run leaves no half of a model behind.
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as temporary:
        making = Path(temporary) / "model"
        making.mkdir()
        _write_tokenizer(making, recipe)
        _write_weights(making, recipe)
        _write_configuration(making, recipe)
        (making / STAMP).write_text(stamp)
        shutil.rmtree(directory, ignore_errors=True)
        making.rename(directory)
    return True


def _describe(recipe: Recipe) -> str:
    program = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return json.dumps({"recipe": asdict(recipe), "program": program, "python": python}, indent=2) + "\n"


def _write_tokenizer(directory: Path, recipe: Recipe) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(str(path) for path in library.glob("*.py"))[: recipe.training_files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


def _weight_shapes(recipe: Recipe) -> dict[str, tuple[tuple[int, ...], float]]:
    """Names, shapes and standard deviations of the weights; 0 stands for a norm, which is all ones."""
    head = recipe.hidden // recipe.heads
    narrow = 1 / math.sqrt(recipe.hidden)
    wide = 1 / math.sqrt(recipe.intermediate)
    square, key = (recipe.hidden, recipe.hidden), (recipe.kv_heads * head, recipe.hidden)
    up, down = (recipe.intermediate, recipe.hidden), (recipe.hidden, recipe.intermediate)
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "model.embed_tokens.weight": ((recipe.vocabulary, recipe.hidden), 1.0),
        "model.norm.weight": ((recipe.hidden,), 0.0),
        "lm_head.weight": ((recipe.vocabulary, recipe.hidden), recipe.logit_gain * narrow),
    }
    for index in range(recipe.layers):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": ((recipe.hidden,), 0.0),
            f"{layer}.post_attention_layernorm.weight": ((recipe.hidden,), 0.0),
            f"{layer}.self_attn.q_proj.weight": (square, recipe.attention_gain * narrow),
            f"{layer}.self_attn.k_proj.weight": (key, recipe.attention_gain * narrow),
            f"{layer}.self_attn.v_proj.weight": (key, recipe.layer_gain * narrow),
            f"{layer}.self_attn.o_proj.weight": (square, recipe.layer_gain * narrow),
            f"{layer}.mlp.gate_proj.weight": (up, recipe.layer_gain * narrow),
            f"{layer}.mlp.up_proj.weight": (up, recipe.layer_gain * narrow),
            f"{layer}.mlp.down_proj.weight": (down, recipe.layer_gain * wide),
        }
    return shapes


def _write_weights(directory: Path, recipe: Recipe) -> None:
    rng = np.random.default_rng(recipe.seed)
    tensors = {
        name: (rng.standard_normal(shape) * deviation if deviation else np.ones(shape)).astype(np.float32)
        for name, (shape, deviation) in sorted(_weight_shapes(recipe).items())
    }
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file writes it for the owner alone; pods run as another user


def _write_configuration(directory: Path, recipe: Recipe) -> None:
    end, _, turn_end = SPECIAL_TOKENS
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": SPECIAL_TOKENS.index(turn_end), "pad_token_id": 0}
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": recipe.vocabulary,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.hidden // recipe.heads,
        "max_position_embeddings": recipe.max_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **ids,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": turn_end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (
        ("config.json", model),
        ("generation_config.json", ids),
        ("tokenizer_config.json", tokenizer),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Makes the tiny model.")
    parser.add_argument("directory", type=Path, nargs="?", default=DEFAULT_DIRECTORY)
    directory = parser.parse_args(arguments).directory
    try:
        is_made = make_tiny_model(directory)
    except NotOurDirectoryError as error:
        parser.exit(1, f"{error}\n")
    print(f"{'made' if is_made else 'found'} the tiny model in {directory}")


if __name__ == "__main__":
    main()
