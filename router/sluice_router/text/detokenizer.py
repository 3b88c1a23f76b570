"""Turns output tokens into text, one token at a time.

``TableDetokenizer`` looks tokens up and is several times cheaper; it is right for plain byte-level tokenizers.
``StreamDetokenizer`` is right for all. ``DetokenizerFactory`` takes the table only where both agree on samples.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Raised by DecodeStream where a tokenizer's decoding is not monotonic (vllm#17448).
INVALID_PREFIX = "Invalid prefix encountered"
# A character has at most four bytes, so this many tokens without text hold something that will never become one.
MAX_HELD_TOKENS = 16
# Text and random ids on which table and tokenizer must agree.
SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.\n\n    def f(x: int) -> str:\n\treturn f'{x!r}'  # ok\r\n",
    "Grüße aus Köln, où ça? Ελληνικά, Привет, שלום, مرحبا, नमस्ते, สวัสดี, 한국어, 日本語、中文。",
    "🎉👩‍👩‍👧‍👦 e\u0301 \u00a0 \u200b \ufffd \U0001d518\U0001d52b ½ — … ' don't I'm  1234567890",
    " leading, trailing ",
)
NUM_RANDOM_SAMPLES = 64
RANDOM_SAMPLE_TOKENS = 24


class Detokenizer:
    """Text of one request's output; a base class.

    It never sees the prompt, so that a hand-off or a recovery does not touch it. Text that may still change, such as
    the bytes of an incomplete character, is held back until it cannot, or until ``flush``.
    """

    __slots__ = ()

    def step(self, token_id: int) -> str:
        """Takes the next output token.

        Args:
            token_id: The token; ids outside of the vocabulary have no text.

        Returns:
            The text that it completes; often empty inside a character.
        """
        raise NotImplementedError

    def flush(self) -> str:
        """Returns what is still held back, with replacement characters for what never became a character."""
        raise NotImplementedError


class StreamDetokenizer(Detokenizer):
    """Decodes with the tokenizer's ``DecodeStream``.

    Args:
        tokenizer: The tokenizer.
        special_ids: Tokens without text; empty when special tokens are to be shown.
        skip_special_tokens: Whether special tokens have no text.
        anchor: Token put before the output, or None. Decoders that strip the first space of a text must not strip the
            first space of an output, which continues a prompt.
    """

    __slots__ = ("_context", "_held", "_skip", "_special_ids", "_stream", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, *, special_ids: frozenset[int], skip_special_tokens: bool, anchor: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._skip = skip_special_tokens
        self._context: list[int] = [] if anchor is None else [anchor]
        self._held: list[int] = []
        self._stream = self._start()

    def step(self, token_id: int) -> str:
        """Takes the next output token; see ``Detokenizer.step``."""
        if token_id in self._special_ids:
            return ""
        self._held.append(token_id)
        text = self._step_stream(token_id)
        if text:
            self._context, self._held = self._held, []
            return text
        return self._restart() if len(self._held) >= MAX_HELD_TOKENS else ""

    def flush(self) -> str:
        """Returns what is held back."""
        return self._restart() if self._held else ""

    def _start(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=self._skip)

    def _step_stream(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except OverflowError:
            return ""
        except Exception as error:  # tokenizers raises plain Exception; all but one are passed on
            if not str(error).startswith(INVALID_PREFIX):
                raise
            return self._restart()

    def _restart(self) -> str:
        """Decodes what is held outside of the stream, and starts another one behind it."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip)
        whole = self._tokenizer.decode(self._context + self._held, skip_special_tokens=self._skip)
        if whole.startswith(before):
            text = whole[len(before) :]
        else:
            text = self._tokenizer.decode(self._held, skip_special_tokens=self._skip)
        self._context, self._held = self._held[-1:], []
        self._stream = self._start()
        return text


class TableDetokenizer(Detokenizer):
    """Looks tokens up; an incremental UTF-8 decoder joins the characters that span tokens.

    Args:
        pieces: Per token id, its text where its bytes are whole characters, else its bytes.
    """

    __slots__ = ("_decoder", "_is_inside", "_pieces")

    def __init__(self, pieces: list[str | bytes]) -> None:
        self._pieces = pieces
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_inside = False

    def step(self, token_id: int) -> str:
        """Takes the next output token; see ``Detokenizer.step``."""
        if token_id >= len(self._pieces):
            return ""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._is_inside or not piece:
                return piece
            piece = piece.encode()
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = self._decoder.decode(piece)
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Returns a replacement character for an incomplete one."""
        if self._decoder is None:
            return ""
        self._is_inside = False
        return self._decoder.decode(b"", final=True)


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer; decides once, at load, which kind.

    Args:
        tokenizer: The tokenizer.
        allows_table: False forces the stream, for comparisons.
    """

    def __init__(self, tokenizer: Tokenizer, *, allows_table: bool = True) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._anchor = _find_anchor(tokenizer)
        self._tables = _build_tables(tokenizer, self._special_ids) if allows_table else None

    @property
    def uses_table(self) -> bool:
        """Whether detokenizers look tokens up."""
        return self._tables is not None

    def make(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Makes a detokenizer for one request.

        Args:
            skip_special_tokens: Whether special tokens have no text.
        """
        if self._tables is not None:
            return TableDetokenizer(self._tables[skip_special_tokens])
        return StreamDetokenizer(
            self._tokenizer,
            special_ids=self._special_ids if skip_special_tokens else frozenset(),
            skip_special_tokens=skip_special_tokens,
            anchor=self._anchor,
        )

    def decode_token(self, token_id: int) -> tuple[str, bytes]:
        """Decodes one token alone, special or not, for logprobs.

        Returns:
            Its text, with replacement characters where it is a part of a character, and its bytes.
        """
        if self._tables is not None:
            table = self._tables[False]
            piece = table[token_id] if token_id < len(table) else ""
            if isinstance(piece, bytes):
                return piece.decode(errors="replace"), piece
            return piece, piece.encode()
        text = self._decode_after_anchor(token_id)
        return text, text.encode()

    def _decode_after_anchor(self, token_id: int) -> str:
        if self._anchor is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        before = self._tokenizer.decode([self._anchor], skip_special_tokens=False)
        return self._tokenizer.decode([self._anchor, token_id], skip_special_tokens=False)[len(before) :]


def _find_anchor(tokenizer: Tokenizer) -> int | None:
    """Returns a token to put before outputs, if the tokenizer decodes a token differently where a text begins."""
    words = tokenizer.encode(" a a", add_special_tokens=False).ids
    if not words:
        return None
    anchor = words[-1]
    before = tokenizer.decode([anchor], skip_special_tokens=True)
    for token_id in words:
        alone = tokenizer.decode([token_id], skip_special_tokens=True)
        if tokenizer.decode([anchor, token_id], skip_special_tokens=True) != before + alone:
            return anchor
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Maps the characters of a byte-level vocabulary to bytes.

    Source: GPT-2's ``bytes_to_unicode``: printable Latin-1 stands for itself, the others are shifted above 255.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _build_tables(tokenizer: Tokenizer, special_ids: frozenset[int]) -> dict[bool, list[str | bytes]] | None:
    """Builds the tables with (False) and without (True) special tokens, or None where they would be wrong."""
    if '"type":"ByteLevel"' not in _describe_decoder(tokenizer):
        return None
    alphabet = _byte_level_alphabet()
    shown = [_piece(token, alphabet) for token in _tokens_by_id(tokenizer)]
    skipped: list[str | bytes] = ["" if index in special_ids else piece for index, piece in enumerate(shown)]
    tables = {False: shown, True: skipped}
    return tables if all(_agrees(tokenizer, tables[skip], skip=skip) for skip in (False, True)) else None


def _describe_decoder(tokenizer: Tokenizer) -> str:
    return "" if tokenizer.decoder is None else tokenizer.decoder.__getstate__().decode()


def _tokens_by_id(tokenizer: Tokenizer) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tokens


def _piece(token: str, alphabet: dict[str, int]) -> str | bytes:
    # As the library: a token with any character outside of the alphabet stands for its own UTF-8.
    if not all(character in alphabet for character in token):
        return token
    piece = bytes(alphabet[character] for character in token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


def _agrees(tokenizer: Tokenizer, table: list[str | bytes], *, skip: bool) -> bool:
    for sample in _samples(tokenizer, len(table)):
        detokenizer = TableDetokenizer(table)
        text = "".join(detokenizer.step(token_id) for token_id in sample) + detokenizer.flush()
        if text != tokenizer.decode(sample, skip_special_tokens=skip):
            return False
    return True


def _samples(tokenizer: Tokenizer, num_tokens: int) -> Iterable[list[int]]:
    for text in SAMPLE_TEXTS:
        yield tokenizer.encode(text, add_special_tokens=False).ids
    rng = random.Random(0)  # noqa: S311 - samples of a vocabulary, not secrets
    for _ in range(NUM_RANDOM_SAMPLES):
        yield [rng.randrange(num_tokens) for _ in range(RANDOM_SAMPLE_TOKENS)]
