"""Tokens of words that prompts have had before, so that most of a prompt need not be tokenized again.

A byte-level tokenizer splits text into words, by a regular expression, before it looks for tokens. None of the known
expressions matches across a cut: a space between two characters that are no whitespace. So the tokens of a text are
those of the parts between its cuts, each but the first with its space.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models

# Finding spaces first and looking around them afterwards takes two thirds of the time.
CUT = re.compile(r" (?<=\S )(?=\S)")
# Together some 10 MB. English needs fewer words; a table that is full begins anew.
MAX_WORDS, MAX_WORD_CHARACTERS = 32768, 128
# Words tokenized one by one for a prompt, each for 4 us; with more of them all of the prompt costs less.
MAX_NEW_WORDS = 16
# A text of so many known words takes the event loop 0.2 ms.
MAX_CHARACTERS = 8192
# Alternatives of the expressions of GPT-2, Llama 3, Qwen 2 and gpt-oss, each of which matches no space but its first
# character, and of which only one looks ahead: behind whitespace. So their order does not matter.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
ANY_SPACE = r"\s+"
# By its tokens those are found that a tokenizer adds to any text.
SAMPLE = "a"
ALTERNATIVES = frozenset(
    {
        *("CONTRACTIONS", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        *(r" ?\p{L}+", r" ?\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
        *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}" for end in ("", "CONTRACTIONS?")),
        *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}" for end in ("", "CONTRACTIONS?")),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        *(r"\s*[\r\n]+", r"\s+(?!\S)", ANY_SPACE),
    }
)


class KnownWords:
    """Tokens of words; the table changes with what it is asked for.

    Args:
        tokenizer: One that ``can_cut``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # By the text between two cuts, without its space; what a text begins with has one more, which no other has.
        # Tokens are packed as an array("I") has them, so that those of a text are joined by copying.
        self._words: dict[str, bytes] = {}
        # What the tokenizer adds to any text.
        before, after = _find_specials(tokenizer)
        self._before, self._after = _pack(before), _pack(after)

    def __len__(self) -> int:
        return len(self._words)

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int] | None:
        """Tokenizes a text of known words.

        Args:
            text: The text; of too many new words some are learned.
            add_special_tokens: Whether the tokenizer adds BOS and the like.

        Returns:
            Its tokens; None: it is too long or has too many new words.
        """
        if len(text) > MAX_CHARACTERS:
            return None
        words = text.split()
        if " ".join(words) != text or not words:
            # There is whitespace that is not between two words. To find the cuts takes three times as long.
            words = CUT.split(text)
        words[0] = " " + words[0]
        known = self._words
        try:
            tokens = [known[word] for word in words]
        except KeyError:
            if not self._learn(words):
                return None
            tokens = [known[word] for word in words]
        if add_special_tokens:
            tokens = [self._before, *tokens, self._after]
        ids = array("I")
        ids.frombytes(b"".join(tokens))
        return ids

    def _learn(self, words: Sequence[str]) -> bool:
        """Learns the new ones of a text's words, or some of them; returns whether it knows all now."""
        known = self._words
        new = {word for word in words if word not in known}
        if len(known) + len(new) > MAX_WORDS:
            known.clear()
            new = set(words)
        learned = [word for word in new if len(word) <= MAX_WORD_CHARACTERS][:MAX_NEW_WORDS]
        known.update((word, self._tokenize(word)) for word in learned)
        return len(learned) == len(new)

    def _tokenize(self, word: str) -> bytes:
        text = word[1:] if word.startswith(" ") else " " + word
        return _pack(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _pack(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def can_cut(tokenizer: Tokenizer) -> bool:
    """Say whether a tokenizer tokenizes the parts between two cuts of a text each by itself."""
    normalizer = _describe(tokenizer.normalizer)
    # NFC composes nothing with a space, and makes none.
    is_normal = normalizer is None or normalizer["type"] == "NFC"
    model = tokenizer.model
    is_certain = isinstance(model, models.BPE) and not model.dropout
    return (
        is_normal
        and is_certain
        and _splits_at_cuts(_describe(tokenizer.pre_tokenizer))
        and _finds_added_tokens_whole(tokenizer)
        and bool(tokenizer.encode(SAMPLE, add_special_tokens=False).ids)
    )


def _splits_at_cuts(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether all that splits a text is a known expression."""
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    *splits, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or bool(splits) == last["use_regex"]:
        return False
    return all(map(_is_known, splits))


def _is_known(split: dict[str, Any]) -> bool:
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return False
    expression = split["pattern"].get("Regex", "")
    alternatives = expression.replace(CONTRACTIONS, "CONTRACTIONS").split("|")
    return alternatives[-1] == ANY_SPACE and ALTERNATIVES.issuperset(alternatives)


def _finds_added_tokens_whole(tokenizer: Tokenizer) -> bool:
    """Whether every added token is found by its own text alone, and none contains a space."""
    return not any(
        token.lstrip or token.rstrip or token.single_word or " " in token.content
        for token in tokenizer.get_added_tokens_decoder().values()
    )


def _find_specials(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Finds what a tokenizer adds before and behind a text."""
    encoding = tokenizer.encode(SAMPLE)
    mask = encoding.special_tokens_mask
    start = mask.index(0)
    end = len(mask) - mask[::-1].index(0)
    return encoding.ids[:start], encoding.ids[end:]


def _describe(component: Any) -> dict[str, Any] | None:
    """Reads a tokenizer's component as ``tokenizer.json`` has it."""
    return None if component is None else json.loads(component.__getstate__())
