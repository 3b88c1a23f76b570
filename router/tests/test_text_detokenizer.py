"""Detokenizers: whatever the split into tokens, the parts are the decoding of the whole."""

from __future__ import annotations

import pytest
from edge_fakes import write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from sluice_router.text.detokenizer import MAX_HELD_TOKENS, DetokenizerFactory, StreamDetokenizer

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(["<tool call>", "ünïcode"])
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback():
    """As Llama 2: words begin with a mark, unknown characters are bytes, and decoding strips the first space."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlo", "▁a", "▁he", "llo"]
    tokenizer = Tokenizer(
        models.BPE(dict(zip(words, range(len(words)), strict=True)), [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(params=["table", "stream", "byte-fallback"])
def factory(request, byte_level, byte_fallback):
    if request.param == "byte-fallback":
        return DetokenizerFactory(byte_fallback), byte_fallback
    return DetokenizerFactory(byte_level, allows_table=request.param == "table"), byte_level


def _decode(factory, ids, *, skip=True):
    detokenizer = factory.make(skip_special_tokens=skip)
    parts = [detokenizer.step(token_id) for token_id in ids]
    return parts, detokenizer.flush()


def test_table_serves_byte_level_and_stream_the_others(byte_level, byte_fallback):
    assert DetokenizerFactory(byte_level).uses_table
    assert not DetokenizerFactory(byte_level, allows_table=False).uses_table
    assert not DetokenizerFactory(byte_fallback).uses_table


@settings(deadline=None, max_examples=200)
@given(text=TEXT)
def test_parts_of_an_encoded_text_are_the_text(byte_level, text):
    ids = byte_level.encode(text, add_special_tokens=False).ids
    for allows_table in (True, False):
        parts, rest = _decode(DetokenizerFactory(byte_level, allows_table=allows_table), ids, skip=False)
        assert "".join(parts) + rest == text


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_parts_of_random_tokens_are_the_decoding_of_the_whole(byte_level, data):
    ids = data.draw(st.lists(st.integers(0, byte_level.get_vocab_size() + 3), max_size=40))
    skip = data.draw(st.booleans())
    parts, rest = _decode(DetokenizerFactory(byte_level), ids, skip=skip)
    assert "".join(parts) + rest == byte_level.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_stream_and_table_agree(byte_level, data):
    ids = data.draw(st.lists(st.integers(0, byte_level.get_vocab_size() - 1), max_size=MAX_HELD_TOKENS - 1))
    table, rest = _decode(DetokenizerFactory(byte_level), ids)
    stream, stream_rest = _decode(DetokenizerFactory(byte_level, allows_table=False), ids)
    assert "".join(table) + rest == "".join(stream) + stream_rest


@settings(deadline=None, max_examples=200)
@given(text=st.text("▁abcdehlo \u00e9\u4e2d\U0001f389", min_size=1, max_size=30))
def test_byte_fallback_keeps_the_first_space(byte_fallback, text):
    ids = byte_fallback.encode(text, add_special_tokens=False).ids
    parts, rest = _decode(DetokenizerFactory(byte_fallback), ids)
    # The output continues a prompt, so the space that decoding strips from a text belongs to it.
    assert "".join(parts) + rest == " " + text.replace("▁", " ")


def test_incomplete_character_is_held_and_then_flushed(factory):
    made, tokenizer = factory
    ids = tokenizer.encode("\U0001f389", add_special_tokens=False).ids
    parts, rest = _decode(made, ids[:-1])
    assert "\U0001f389" not in "".join(parts)
    assert "\ufffd" in rest
    parts, rest = _decode(made, ids)
    assert "".join(parts).endswith("\U0001f389")
    assert rest == ""


def test_unknown_ids_and_special_tokens_have_no_text(factory):
    made, tokenizer = factory
    ids = tokenizer.encode("hello", add_special_tokens=False).ids
    special = tokenizer.token_to_id("</s>") or tokenizer.token_to_id("<|im_end|>")
    plain = "".join(_decode(made, ids)[0])
    assert "".join(_decode(made, [10**6, *ids, special, 2**31 - 1])[0]) == plain
    assert len("".join(_decode(made, [*ids, special], skip=False)[0])) > len(plain)


def test_bytes_that_never_become_a_character_do_not_pile_up(byte_fallback):
    detokenizer = DetokenizerFactory(byte_fallback).make()
    broken = byte_fallback.token_to_id("<0x80>")
    text = "".join(detokenizer.step(broken) for _ in range(10 * MAX_HELD_TOKENS))
    assert text.count("\ufffd") >= 9 * MAX_HELD_TOKENS
    assert len(detokenizer._held) < MAX_HELD_TOKENS


def test_goes_on_after_an_invalid_prefix(byte_fallback):
    """A run of byte tokens that turns invalid changes text that was sent; vllm#17448."""
    ids = [byte_fallback.token_to_id(f"<0x{byte:02X}>") for byte in (*"é".encode(), 0x80)]
    ids += byte_fallback.encode("hello", add_special_tokens=False).ids
    parts, rest = _decode(DetokenizerFactory(byte_fallback), ids)
    assert "".join(parts) + rest == "é\ufffd hello"


def test_single_tokens_for_logprobs(factory, byte_level):
    made, tokenizer = factory
    ids = tokenizer.encode("he", add_special_tokens=False).ids
    assert "".join(made.decode_token(token_id)[0] for token_id in ids).strip() == "he"
    assert b"".join(made.decode_token(token_id)[1] for token_id in ids).strip() == b"he"
    half = byte_level.encode("é", add_special_tokens=False).ids[0]
    assert DetokenizerFactory(byte_level).decode_token(half) == ("\ufffd", b"\xc3")
    assert DetokenizerFactory(byte_level).decode_token(10**6) == ("", b"")


@pytest.mark.parametrize(("anchor", "text"), [(None, "he"), (0, " he"), (5, " he")])
def test_the_first_space_of_an_output_stays_behind_any_anchor(byte_fallback, anchor, text):
    detokenizer = StreamDetokenizer(byte_fallback, special_ids=frozenset(), skip_special_tokens=True, anchor=anchor)
    assert detokenizer.step(byte_fallback.token_to_id("▁he")) + detokenizer.flush() == text
