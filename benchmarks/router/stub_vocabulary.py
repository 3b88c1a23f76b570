"""The vocabulary of the stubs: tokens whose text has a fixed width, so that tokens can be counted in merged chunks.

A piece is a space and three lower-case letters. Each is one token wherever it stands. So a prompt made of pieces has as
many tokens as pieces, and an answer made of their ids has the text that the HTTP stub sends.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

PIECE = re.compile(r" [a-z]{3}")
MIN_PIECES = 16


def find_pieces(model: Path) -> list[tuple[int, str]]:
    """Finds the pieces of a model's vocabulary.

    Args:
        model: Directory with ``tokenizer.json``.

    Returns:
        (token id, text), by id.

    Raises:
        ValueError: The model has too few.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = []
    for token_id in sorted(tokenizer.get_vocab().values()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        # A decoder that drops a leading space shows it again after another token.
        if not PIECE.fullmatch(text) or tokenizer.encode(text, add_special_tokens=False).ids != [token_id]:
            continue
        found.append((token_id, text))
    if len(found) < MIN_PIECES:
        raise ValueError(f"{model}: {len(found)} tokens of a space and three letters, at least {MIN_PIECES} are needed")
    _check_together(tokenizer, found)
    return found


def _check_together(tokenizer: Tokenizer, pieces: list[tuple[int, str]]) -> None:
    ids = [token_id for token_id, _ in pieces]
    text = "".join(piece for _, piece in pieces)
    if tokenizer.encode(text, add_special_tokens=False).ids != ids or tokenizer.decode(ids) != text:
        raise ValueError("the model merges or splits tokens of a space and three letters when they stand side by side")


def write_pieces(path: Path, pieces: list[tuple[int, str]]) -> None:
    """Writes the pieces for the stubs and the generator: one line "ID PIECE" each."""
    path.write_text("".join(f"{token_id} {text}\n" for token_id, text in pieces))


def read_piece_ids(path: Path) -> list[int]:
    """Reads the token ids of the pieces."""
    return [int(line.split(" ", 1)[0]) for line in path.read_text().splitlines()]
