"""Tokens of known words: always those of the tokenizer itself, of each kind that has such words."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from sluice_router.text import tokenizer_cache as module
from sluice_router.text.detokenizer import SAMPLE_TEXTS
from sluice_router.text.tokenizer_cache import MAX_CHARACTERS, MAX_NEW_WORDS, MAX_WORD_CHARACTERS, KnownWords, can_cut

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
# As the models' own tokenizer.json have them; GPT-2's is built in.
EXPRESSIONS = {
    "gpt-2": None,
    "llama-3": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen-2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-oss": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
TRAINING = [*SAMPLE_TEXTS * 3, "It's what they'll say: don't, I'VE, we'D. 12 345 6789 a-b (c) d/e\n\n  x = [1, 2]"] * 2
SPECIALS = ["<|begin|>", "<|end|>", "<t>"]
# What cuts could go wrong at: each kind of whitespace, marks, letters of both cases, digits, signs, added tokens.
PIECES = st.sampled_from(
    [
        *(" ", " ", " ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x85", "\u00a0", "\u2003", "\u2028", "\u3000"),
        *(
            "a",
            "the",
            "I'm",
            "'S",
            "\u017f",
            "É",
            "e\u0301",
            "\u0301",
            "\u0338",
            "\u200b",
            "\u180e",
            "中",
            "한",
            "ǅ",
            "ª",
        ),
        *("1", "٣", "½", "12345", ".", "/", "(", "'", "=", "\u212a", "🎉", "\ufffd", *SPECIALS),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=24).map("".join)


def make_tokenizer(expression, *, normalizer=None, adds_bos=True):
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    splits = [] if expression is None else [pre_tokenizers.Split(Regex(expression), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level]) if splits else byte_level
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIALS[:2],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_tokens([AddedToken(SPECIALS[2], normalized=True)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
        )
    return tokenizer


TOKENIZERS = {
    f"{name}{suffix}": make_tokenizer(expression, normalizer=normalizer, adds_bos=normalizer is None)
    for name, expression in EXPRESSIONS.items()
    for suffix, normalizer in (("", None), ("-nfc", normalizers.NFC()))
}


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request):
    return TOKENIZERS[request.param]


def test_tokenizers_of_the_usual_models_can_be_cut(tokenizer):
    assert can_cut(tokenizer)


def encode(words: KnownWords, text: str, *, adds_specials: bool = False) -> list[int] | None:
    ids = words.encode(text, add_special_tokens=adds_specials)
    return None if ids is None else list(ids)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), adds_specials=st.booleans())
def test_tokens_are_those_of_the_tokenizer(name, texts, adds_specials):
    tokenizer = TOKENIZERS[name]
    words = KnownWords(tokenizer)
    for text in texts * 2:
        expected = tokenizer.encode(text, add_special_tokens=adds_specials).ids
        assert encode(words, text, adds_specials=adds_specials) in (None, expected)
        # A new word or none is no cause for giving up.
        if len(text.split()) < MAX_NEW_WORDS:
            assert encode(words, text, adds_specials=adds_specials) == expected


def test_texts_of_many_kinds(tokenizer):
    words = KnownWords(tokenizer)
    for text in [*TRAINING, "", " ", "a", " a", "a ", "a  b", "a b", "a b\n", "a\nb c", "a\u00a0b c", "a\x1fb c"]:
        found = encode(words, text, adds_specials=True)
        assert found in (None, tokenizer.encode(text).ids)


def test_nfc_neither_makes_nor_joins_spaces():
    for code in range(0x110000):
        character = chr(code)
        if not character.isspace():
            normal = unicodedata.normalize("NFC", f"{character} {character}")
            assert normal.count(" ") == 1
            assert not any(part.isspace() for part in normal.replace(" ", ""))
            assert normal == " ".join([unicodedata.normalize("NFC", character)] * 2)


def test_a_text_of_many_new_words_is_left_to_the_tokenizer_until_they_are_known(tokenizer):
    words = KnownWords(tokenizer)
    text = " ".join(f"word{number}" for number in range(2 * MAX_NEW_WORDS))
    assert encode(words, text) is None
    assert encode(words, text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert len(words) == 2 * MAX_NEW_WORDS


def test_long_words_and_texts_are_left_to_the_tokenizer(tokenizer):
    words = KnownWords(tokenizer)
    longest = "x" * MAX_WORD_CHARACTERS
    assert words.encode(longest, add_special_tokens=False) is None
    assert words.encode(f"a {longest}x", add_special_tokens=False) is None
    assert words.encode(f"{longest[1:]} {longest}", add_special_tokens=False) is not None
    assert words.encode("a " * (MAX_CHARACTERS // 2), add_special_tokens=False) is not None
    assert words.encode("a " * (MAX_CHARACTERS // 2) + "a", add_special_tokens=False) is None


def test_a_full_table_begins_anew(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "MAX_WORDS", 4)
    words = KnownWords(tokenizer)
    for text in ("s a b c", "s d e", "s a b c", "s e f", ""):
        assert encode(words, text) == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(words) <= 4


def with_added(**arguments):
    tokenizer = make_tokenizer(None)
    tokenizer.add_tokens([AddedToken(**arguments)])
    return tokenizer


def with_pre_tokenizer(pre_tokenizer):
    tokenizer = make_tokenizer(None)
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def with_model(**arguments):
    tokenizer = make_tokenizer(None)
    tokenizer.model = models.BPE({"x": 0}, [], **arguments)
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(expression, behavior="isolated", **arguments):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), behavior, **arguments), BYTES])


@pytest.mark.parametrize(
    "refused",
    [
        make_tokenizer(None, normalizer=normalizers.NFKC()),
        make_tokenizer(None, normalizer=normalizers.Sequence([normalizers.NFC()])),
        with_added(content="<m>", lstrip=True),
        with_added(content="<m>", rstrip=True),
        with_added(content="m", single_word=True),
        with_added(content="a b"),
        with_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        with_pre_tokenizer(BYTES),
        with_pre_tokenizer(pre_tokenizers.Metaspace()),
        with_pre_tokenizer(split(r"\p{L}+ \p{L}+|\s+")),
        with_pre_tokenizer(split(r"\p{N}|\s+(?!\S)")),
        with_pre_tokenizer(split(r"\p{N}|\s+", "removed")),
        with_pre_tokenizer(split(r"\p{N}|\s+", invert=True)),
        with_model(dropout=0.5),
        with_model(),
    ],
)
def test_others_are_not_cut(refused):
    assert not can_cut(refused)


def test_a_tokenizer_without_parts_is_not_cut():
    assert not can_cut(Tokenizer(models.BPE()))
    assert not can_cut(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
