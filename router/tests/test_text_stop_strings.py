"""Stop strings: the cut does not depend on how the text is divided."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_router.text.stop_strings import StopStrings

ALPHABET = "abé"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


def _run(stops, parts, **arguments):
    cutter = StopStrings(stops, **arguments)
    out = []
    for part in parts:
        out.append(cutter.push(part))
        if cutter.matched is not None:
            return out, cutter.matched
    out.append(cutter.flush())
    return out, None


def _expect(stops, text):
    """The definition: before the stop string that is complete first, ties in the order given."""
    ends = [(text.find(stop) + len(stop), index) for index, stop in enumerate(stops) if stop in text]
    if not ends:
        return text, None
    end, index = min(ends)
    return text[: end - len(stops[index])], stops[index]


def _split(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(stops=STOPS, text=st.text(ALPHABET, max_size=30), cuts=st.lists(st.integers(0, 30), max_size=8))
def test_any_chunking_gives_the_same_cut(stops, text, cuts):
    out, matched = _run(stops, _split(text, cuts))
    assert ("".join(out), matched) == _expect(stops, text)


@given(stops=STOPS, text=st.text(ALPHABET, max_size=30))
def test_only_what_may_begin_a_stop_is_held(stops, text):
    cutter = StopStrings(stops)
    sent = ""
    for character in text:
        sent += cutter.push(character)
        if cutter.matched is not None:
            return
        held = cutter._held
        assert not held or any(stop.startswith(held) for stop in stops)
        assert len(held) < max(map(len, stops))
        assert text.startswith(sent + held)


@given(stops=STOPS, text=st.text(ALPHABET, max_size=20), unarmed=st.integers(0, 20))
def test_stops_before_min_tokens_do_not_count(stops, text, unarmed):
    cutter = StopStrings(stops)
    sent = ""
    for index, character in enumerate(text):
        sent += cutter.push(character, is_armed=index >= unarmed)
        if cutter.matched is not None:
            assert index >= unarmed
            assert text[: index + 1].endswith(cutter.matched)
            assert sent == text[: index + 1 - len(cutter.matched)]
            return
    assert sent + cutter.flush() == text
    assert not any(text[: end + 1].endswith(stop) for end in range(unarmed, len(text)) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "parts", "sent", "matched"),
    [
        pytest.param(("END",), ["a E", "N", "D b"], "a ", "END", id="across-parts"),
        pytest.param(("END",), ["a E", "N", "X b"], "a ENX b", None, id="false-beginning"),
        pytest.param(("aab",), ["a", "a", "a", "b"], "a", "aab", id="overlapping-beginnings"),
        pytest.param(("abc", "b"), ["ab", "c"], "a", "b", id="shorter-inside-longer"),
        pytest.param(("b", "ab"), ["ab"], "a", "b", id="tie-by-order"),
        pytest.param(("\n\n",), ["x\n", "\ny"], "x", "\n\n", id="newlines"),
        pytest.param(("x",), [""], "", None, id="no-text"),
    ],
)
def test_examples(stops, parts, sent, matched):
    out, found = _run(stops, parts)
    assert ("".join(out), found) == (sent, matched)


def test_included_stop_stays_and_what_follows_goes():
    out, matched = _run(("END",), ["a EN", "D b"], is_included=True)
    assert ("".join(out), matched) == ("a END", "END")
