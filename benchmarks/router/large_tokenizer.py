"""A model folder whose tokenizer has as many entries as those of real models; weights it has none.

The tiny model's tokenizer has 2048 entries, which flatters: its table stays in the processor's caches. This one is
trained once, in half a minute, on 40 million characters of the environment's Python sources, and splits words as Qwen2.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import c_programs
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_ENTRIES = 128_000
MAX_CHARACTERS = 40_000_000
MAX_FILE_CHARACTERS = 200_000
FOLDER = c_programs.BUILD / f"tokenizer-{NUM_ENTRIES}"
END = "<|endoftext|>"
# Source: tokenizer.json of Qwen2.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_large_model(tiny: Path) -> Path:
    """Makes the folder, unless it is there already.

    Args:
        tiny: Folder of the tiny model, whose other files are taken.

    Returns:
        The folder, under ``build/``.

    Raises:
        RuntimeError: The sources give fewer entries.
    """
    if FOLDER.is_dir():
        return FOLDER
    unfinished = FOLDER.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tokenizer = _train()
    found = tokenizer.get_vocab_size()
    if found < NUM_ENTRIES:
        raise RuntimeError(f"the sources give a tokenizer of {found} entries, {NUM_ENTRIES} are needed")
    tokenizer.save(str(unfinished / "tokenizer.json"))
    (unfinished / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    config = json.loads((tiny / "config.json").read_text())
    config |= {"vocab_size": found, "eos_token_id": tokenizer.token_to_id(END)}
    (unfinished / "config.json").write_text(json.dumps(config))
    unfinished.rename(FOLDER)
    return FOLDER


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_ENTRIES,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
    )
    tokenizer.train_from_iterator(_read_sources(), trainer)
    return tokenizer


def _read_sources() -> Iterator[str]:
    """Reads every third file, so that no package makes up the most of it."""
    room = MAX_CHARACTERS
    for path in sorted(Path(sys.prefix, "lib").rglob("*.py"))[::3]:
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > MAX_FILE_CHARACTERS:
            continue
        yield text
        room -= len(text)
        if room < 0:
            return
