"""What an output keeps for a client that does not keep up, and what slow clients may cost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sluice.v1 import engine_pb2
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.text.output import Output, OutputSettings


@pytest.mark.parametrize(
    ("words", "settings", "text_bytes", "token_bytes"),
    [
        ("hello world", OutputSettings(), 11, 0),
        ("grüße", OutputSettings(), 1 + 1 + 4 + 4 + 1, 0),
        ("hello world", OutputSettings(returns_token_ids=True), 11, 8),
        ("hello world", OutputSettings(num_logprobs=2), 11, 8 + 120 + 16 * 2),
    ],
    ids=["text", "text beyond ASCII", "token ids", "logprobs"],
)
def test_memory_of_what_has_not_gone_out_is_estimated(text, words, settings, text_bytes, token_bytes):
    output = Output(text, settings)
    ids = text.encode_now(words, add_special_tokens=False)
    entry = engine_pb2.TokenLogprobs(top_token_ids=[1, 2], top_logprobs=[-1.0, -2.0])
    for token_id in ids:
        output.push(token_id, entry)
    assert output.num_bytes == text_bytes + token_bytes * len(ids)
    assert output.take().text == words
    assert output.num_bytes == 0


@pytest.mark.parametrize(("min_tokens", "ends_at"), [(0, 2), (1, 2), (2, 4), (3, 4), (4, None)])
def test_a_stop_string_counts_where_it_ends_behind_the_least_number_of_tokens(text, min_tokens, ends_at):
    one, other = (text.encode_now(letter, add_special_tokens=False)[0] for letter in "ab")
    output = Output(text, OutputSettings(stops=("b",), min_tokens=min_tokens))
    ends = [output.push(token_id, None) for token_id in (one, other, one, other)]
    assert next((end for end in ends if end is not None), None) == ends_at


@pytest.mark.parametrize("is_included", [False, True])
def test_a_token_that_ends_the_output_is_shown_where_that_is_asked_for(text, is_included):
    one, other = (text.encode_now(letter, add_special_tokens=False)[0] for letter in "ab")
    settings = OutputSettings(hidden_token_ids=frozenset({other}), is_stop_included=is_included)
    output = Output(text, settings)
    for token_id in (one, other):
        output.push(token_id, None)
    assert output.take_text() == ("ab" if is_included else "a")


@dataclass(eq=False)
class Reader:
    """A client that does not keep up."""

    num_buffered_bytes: int = 0
    paused_since_s: float = 0.0
    is_shed: bool = False

    def shed(self) -> None:
        self.is_shed = True


def test_a_slow_reader_may_hold_and_wait_as_much_as_the_limits_and_no_more():
    readers = SlowReaders(SlowReaderLimits(max_stream_bytes=10, max_paused_s=5.0, max_total_bytes=30))
    held = [Reader(9), Reader(11), Reader(10)]
    for reader in held:
        readers.add(reader)
    readers.sweep(5.0)
    assert (len(readers), readers.num_shed) == (3, {})
    for reader in (held[2], held[1]):
        readers.check(reader)
    assert [reader.is_shed for reader in held] == [False, True, False]
    late = Reader(1, paused_since_s=0.1)
    readers.add(late)
    readers.sweep(5.1)
    assert [reader.is_shed for reader in (*held, late)] == [True, True, True, False]
    assert readers.num_shed == {"stream_bytes": 1, "paused": 2}


def test_the_largest_are_shed_until_all_together_hold_no_more_than_the_limit():
    readers = SlowReaders(SlowReaderLimits(max_total_bytes=30))
    held = [Reader(size) for size in (10, 14, 11, 9)]
    for reader in held:
        readers.add(reader)
    readers.sweep(0.0)
    assert [reader.is_shed for reader in held] == [False, True, False, False]
    held[3].num_buffered_bytes = 10
    readers.sweep(0.0)
    assert [reader.is_shed for reader in held] == [False, True, True, False]
    assert (len(readers), readers.num_shed) == (2, {"total_bytes": 2})
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in EdgeMetrics(readers).collect()
        for sample in family.samples
    }
    assert samples["sluice_slow_readers",] == 2
    assert samples["sluice_slow_readers_shed_total", "total_bytes"] == 2
