"""Traces: four formats give the same rows, and a wrong row is named."""

from __future__ import annotations

import json
from time import tzset

import pytest

from sluice_core.sim.traces import TraceError, TraceRow, parse_trace

ROWS = [
    TraceRow(prompt_tokens=4808, output_tokens=10, arrival_s=0.0),
    TraceRow(prompt_tokens=3180, output_tokens=8, arrival_s=0.5),
    TraceRow(prompt_tokens=110, output_tokens=27, arrival_s=2.25),
]
COUNTS = [(row.prompt_tokens, row.output_tokens) for row in ROWS]
LOG_TIMES = [1_700_000_000, 1_700_000_000.5, 1_700_000_002.25]
ISO_TIMES = ["2023-11-14T22:13:20Z", "2023-11-14T22:13:20.500000+00:00", "2023-11-14T23:13:22.25+01:00"]


def write_log(times: list[object], *, nests: bool = False, name: str = "timestamp") -> list[str]:
    lines = []
    for time, (prompt, output) in zip(times, COUNTS, strict=True):
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        record = {"id": "cmpl-1", "model": "m", **({"usage": usage} if nests else usage)}
        lines.append(json.dumps(record if time is None else {**record, name: time}))
    return lines


FORMATS = {
    "ours": ["arrival_s,input_tokens,output_tokens", "0,4808,10", "0.5,3180,8", "2.25,110,27"],
    "azure 2023": [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6800000,4808,10",
        "2023-11-16 18:15:47.1800000,3180,8",
        "2023-11-16 18:15:48.9300000,110,27",
    ],
    "azure 2024": [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.009930+00:00,4808,10",
        "2024-05-10 00:00:00.509930+00:00,3180,8",
        "2024-05-10 00:00:02.259930+00:00,110,27",
    ],
    "mooncake": [
        json.dumps({"timestamp": ms, "input_length": prompt, "output_length": output, "hash_ids": [1, 2]})
        for ms, (prompt, output) in zip((27_000, 27_500, 29_250), COUNTS, strict=True)
    ],
    "log, seconds": write_log([*LOG_TIMES]),
    "log, ISO 8601": write_log([*ISO_TIMES]),
    "log, usage nested": write_log([*LOG_TIMES], nests=True, name="created"),
    "log, in the order of ends": write_log([*LOG_TIMES])[::-1],
}


@pytest.mark.parametrize("lines", FORMATS.values(), ids=FORMATS)
def test_every_format_gives_the_same_rows(lines: list[str]) -> None:
    rows = parse_trace(lines)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == COUNTS
    assert [row.arrival_s for row in rows] == pytest.approx([row.arrival_s for row in ROWS], abs=1e-6)


def test_a_log_without_times_has_lengths_only() -> None:
    rows = parse_trace(write_log([None, None, None]))
    assert rows == [TraceRow(prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens) for row in ROWS]


def test_a_log_of_unanswered_requests_alone_has_no_rows() -> None:
    with pytest.raises(TraceError, match="line 2: the trace has no rows"):
        parse_trace([LOG.replace("3}", "0}")], skips_unanswered=True)


def test_blank_lines_do_not_count_as_rows_but_as_lines() -> None:
    with pytest.raises(TraceError, match="line 5: input_tokens is 'x'"):
        parse_trace(["", "input_tokens,output_tokens", "1,2", "", "x,2"])


def test_own_columns_are_kept() -> None:
    (row,) = parse_trace(["class,input_tokens,output_tokens,ttft_slo_s", "chat,5,6,0.4"])
    assert row == TraceRow(prompt_tokens=5, output_tokens=6, slo_class="chat", ttft_slo_s=0.4)


MOONCAKE = '{"timestamp": 5, "input_length": 10, "output_length": 3}'
LOG = '{"timestamp": 5, "prompt_tokens": 10, "completion_tokens": 3}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
HASHED = '{"timestamp": 5, "input_length": 1030, "output_length": 3, "hash_ids": [7, 8, 9]}'


def test_hashes_name_a_block_and_all_before_it() -> None:
    """Whether the ids do that by themselves, as Mooncake's, or name a block only, as the second prompt's 8 here."""
    lines = [
        HASHED,
        HASHED.replace("[7, 8, 9]", "[5, 8, 9]"),
        HASHED.replace("[7, 8, 9]", "[7, 8, 6]"),
        HASHED.replace("1030", "1040"),
    ]
    first, second, third, fourth = [row.block_hashes for row in parse_trace(lines, reads_hashes=True)]
    assert len(first) == 3
    assert not set(first) & set(second)
    assert third[:2] == first[:2]
    assert third[2] != first[2]
    assert fourth[:2] == first[:2]
    assert fourth[2] != first[2]  # 16 tokens, not 6


def test_hashes_are_read_only_when_requested() -> None:
    assert parse_trace([HASHED.replace("[7, 8, 9]", '"none"')])[0].block_hashes == ()


NONE = "there are no hash_ids, which the reuse of prefixes needs: only Mooncake's format has them"
WRONG_HASHES: dict[str, tuple[list[str], str]] = {
    "missing": ([HASHED, MOONCAKE], f"line 2: {NONE}"),
    "CSV": (["", "input_tokens,output_tokens", "1,2"], f"line 2: {NONE}"),
    "log": ([LOG], f"line 1: {NONE}"),
    "no list": ([HASHED.replace("[7, 8, 9]", "7")], "line 1: hash_ids is 7, a list of whole numbers is needed"),
    "texts": ([HASHED, HASHED.replace("8", '"8"')], "line 2: hash_ids is [7, '8', 9], a list of whole numbers"),
    "truth": ([HASHED.replace("8", "true")], "line 1: hash_ids is [7, True, 9], a list of whole numbers is needed"),
    "too few": (
        [HASHED.replace("8, ", "")],
        "line 1: hash_ids has 2 entries; one is needed for each 512 of 1030 tokens: 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "message"), WRONG_HASHES.values(), ids=WRONG_HASHES)
def test_a_row_with_wrong_hashes_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_trace(lines, reads_hashes=True)
    assert str(caught.value).startswith(message)


WRONG: dict[str, tuple[list[str], str]] = {
    "empty": ([], "line 1: the trace is empty"),
    "header only": (["input_tokens,output_tokens"], "line 2: the trace has no rows"),
    "unknown column": (["a,b", "1,2"], "line 1: columns are a, b; known are input_tokens"),
    "fields": (["input_tokens,output_tokens", "1,2,3"], "line 2: 3 fields, the header has 2"),
    "fraction": (["input_tokens,output_tokens", "1.5,2"], "line 2: input_tokens is '1.5', a whole number"),
    "zero": (["input_tokens,output_tokens", "1,0"], "line 2: output_tokens is '0'"),
    "order": (["arrival_s,input_tokens,output_tokens", "2,1,1", "1,1,1"], "line 3: arrival_s is 1 s before"),
    "not a time": (["arrival_s,input_tokens,output_tokens", "nan,1,1"], "line 2: arrival_s is 'nan'"),
    "azure date": ([AZURE, "18:15,4,5"], "line 2: TIMESTAMP is '18:15', a date and time are needed"),
    "azure count": ([AZURE, "2023-11-16 18:15:46.68,4,-5"], "line 2: GeneratedTokens is '-5'"),
    "no JSON": ([LOG, "{"], "line 2: is no JSON"),
    "no object": ([LOG, "[1]"], "line 2: is no JSON object"),
    "count missing": ([LOG, '{"timestamp": 6, "prompt_tokens": 4}'], "line 2: completion_tokens is missing"),
    "count is true": ([LOG.replace("10", "true")], "line 1: prompt_tokens is True"),
    "usage": (['{"timestamp": 6, "usage": 4}'], "line 1: usage is 4, an object is needed"),
    "milliseconds": (
        [LOG.replace('"timestamp": 5', '"timestamp": 1700000000000')],
        "line 1: timestamp is 1700000000000;",
    ),
    "time missing": ([LOG, '{"prompt_tokens": 4, "completion_tokens": 3}'], "line 2: has no timestamp, unlike"),
    "mooncake time": ([MOONCAKE, '{"input_length": 4, "output_length": 3}'], "line 2: timestamp is missing"),
    "mooncake count": ([MOONCAKE, MOONCAKE.replace("10", '"x"')], "line 2: input_length is 'x'"),
    "mooncake order": ([MOONCAKE, MOONCAKE.replace("5", "4")], "line 2: timestamp is 0.001 s before"),
    "another format": ([MOONCAKE, LOG], "line 2: input_length is missing"),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_row_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_trace(lines)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "lines",
    [
        ["input_tokens,output_tokens", "5,0", "5,6"],
        [AZURE, "2023-11-16 18:15:46,5,0", "2023-11-16 18:15:47,5,6"],
        [LOG.replace("3}", "0}"), LOG.replace("10", "5").replace("3}", "6}")],
    ],
    ids=["ours", "azure", "log"],
)
def test_unanswered_requests_are_left_out_on_request_only(lines: list[str]) -> None:
    with pytest.raises(TraceError, match=r"is '?0'?, a whole number of at least 1"):
        parse_trace(lines)
    assert [(row.prompt_tokens, row.output_tokens) for row in parse_trace(lines, skips_unanswered=True)] == [(5, 6)]


ACCEPTED: dict[str, tuple[list[str], list[TraceRow]]] = {
    "largest count": (
        ["input_tokens,output_tokens", "2147483647,1"],
        [TraceRow(prompt_tokens=2**31 - 1, output_tokens=1)],
    ),
    "blanks": (
        [" arrival_s , input_tokens,output_tokens ", " 0 , 5,6 "],
        [TraceRow(prompt_tokens=5, output_tokens=6, arrival_s=0.0)],
    ),
    "our times as they are": (
        ["arrival_s,input_tokens,output_tokens", "7,5,6", "7,5,6"],
        [TraceRow(prompt_tokens=5, output_tokens=6, arrival_s=7.0)] * 2,
    ),
    "quoted class": (
        ["class,input_tokens,output_tokens", '"a, b",5,6', ",5,6"],
        [TraceRow(prompt_tokens=5, output_tokens=6, slo_class="a, b"), TraceRow(prompt_tokens=5, output_tokens=6)],
    ),
    "azure without a zone is in UTC": (
        [AZURE, "2023-11-16 23:30:00,5,6", "2023-11-17 01:00:00+01:00,5,6"],
        [TraceRow(prompt_tokens=5, output_tokens=6, arrival_s=each) for each in (0.0, 1800.0)],
    ),
    "mooncake at one time": (
        [MOONCAKE, MOONCAKE],
        [TraceRow(prompt_tokens=10, output_tokens=3, arrival_s=0.0)] * 2,
    ),
    "log with classes": (
        [LOG.replace("3}", '3, "class": "chat"}'), LOG],
        [
            TraceRow(prompt_tokens=10, output_tokens=3, arrival_s=0.0, slo_class="chat"),
            TraceRow(prompt_tokens=10, output_tokens=3, arrival_s=0.0),
        ],
    ),
    "log with counts at the top and usage": (
        [LOG.replace("3}", '3, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}')],
        [TraceRow(prompt_tokens=10, output_tokens=3, arrival_s=0.0)],
    ),
    "log with both times": (
        [LOG.replace("3}", '3, "created": 99}'), LOG.replace("5", "8").replace("3}", '3, "created": 1}')],
        [TraceRow(prompt_tokens=10, output_tokens=3, arrival_s=each) for each in (0.0, 3.0)],
    ),
    "log with blank lines": (
        ["", LOG, " ", LOG, ""],
        [TraceRow(prompt_tokens=10, output_tokens=3, arrival_s=0.0)] * 2,
    ),
    "log of the last second": (
        [LOG.replace('"timestamp": 5', '"timestamp": 100000000000')],
        [TraceRow(prompt_tokens=10, output_tokens=3, arrival_s=0.0)],
    ),
    "log of no time": (
        [LOG.replace('"timestamp": 5', '"timestamp": null')],
        [TraceRow(prompt_tokens=10, output_tokens=3)],
    ),
}


@pytest.mark.parametrize(("lines", "rows"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_just_right_is_read(lines: list[str], rows: list[TraceRow]) -> None:
    assert parse_trace(lines) == rows


MORE_WRONG: dict[str, tuple[list[str], str]] = {
    "count too large": (["input_tokens,output_tokens", "2147483648,1"], "line 2: input_tokens is '2147483648'"),
    "count of eleven digits": (
        ["input_tokens,output_tokens", "00000000005,1"],
        "line 2: input_tokens is '00000000005'",
    ),
    "column twice": (["input_tokens,output_tokens,input_tokens", "1,2,3"], "line 1: columns are input_tokens, output"),
    "column missing": (["input_tokens", "1"], "line 1: columns are input_tokens; known are"),
    "no name": (["", "  ,"], "line 2: columns are , ; known are"),
    "half of azure": (["TIMESTAMP,ContextTokens", "x,1"], "line 1: columns are TIMESTAMP, ContextTokens; known are"),
    "time is true": ([LOG.replace('"timestamp": 5', '"timestamp": true')], "line 1: timestamp is True"),
    "time is a list": ([LOG.replace('"timestamp": 5', '"timestamp": [5]')], "line 1: timestamp is [5]"),
    "time before": ([MOONCAKE.replace('"timestamp": 5', '"timestamp": -1')], "line 1: timestamp is -1, a number"),
    "time too large": (["arrival_s,input_tokens,output_tokens", "1e15,1,1"], "line 2: arrival_s is '1e15'"),
    "objective": (["ttft_slo_s,input_tokens,output_tokens", "soon,1,1"], "line 2: ttft_slo_s is 'soon', a number"),
    "milliseconds just so": (
        [LOG.replace('"timestamp": 5', '"created": 100000000001')],
        "line 1: created is 100000000001; seconds since 1970",
    ),
    "log date": ([LOG.replace('"timestamp": 5', '"created": "noon"')], "line 1: created is 'noon', a date and time"),
    "time of one alone": (['{"prompt_tokens": 4, "completion_tokens": 3}', LOG], "line 2: has a timestamp, unlike"),
    "no usage": (['{"timestamp": 6, "usage": null}'], "line 1: prompt_tokens is missing"),
    "azure order": ([AZURE, "2023-11-16 18:15:47,4,5", "2023-11-16 18:15:46,4,5"], "line 3: TIMESTAMP is 1 s before"),
}


@pytest.mark.parametrize(("lines", "message"), MORE_WRONG.values(), ids=MORE_WRONG)
def test_what_is_just_wrong_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_trace(lines)
    assert str(caught.value).startswith(message)


def test_times_without_a_zone_are_in_utc_wherever_they_are_read(monkeypatch):
    """Where the clocks are put forward in between, the hour that they lose is none."""
    lines = [AZURE, "2023-03-25 23:30:00,5,6", "2023-03-26 03:30:00,5,6", "2023-03-26 03:30:00Z,5,6"]
    try:
        monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        tzset()
        assert [row.arrival_s for row in parse_trace(lines)] == [0.0, 14400.0, 14400.0]
    finally:
        monkeypatch.undo()
        tzset()
