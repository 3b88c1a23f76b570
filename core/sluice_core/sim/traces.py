"""Reads traces: who asked for how much, and when. A wrong row is named with its line and field; nothing is guessed.

Four formats, recognized by their first line:

- ours: CSV with ``[arrival_s,] [class,] input_tokens, output_tokens [, ttft_slo_s]``;
- Azure's public traces: CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``;
- Mooncake's: a JSON object per line with ``timestamp`` (milliseconds), ``input_length``, ``output_length``, and where
  asked for ``hash_ids``, an id for each 512 tokens of the prompt;
- request logs of vLLM and OpenAI-compatible gateways: a JSON object per line with ``prompt_tokens`` and
  ``completion_tokens``, at its top or under ``usage``, and ``timestamp`` or ``created`` (seconds since 1970, or ISO
  8601). Gateways write when they are done, so the lines need not be in the order of the times.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain

_REQUIRED = ("input_tokens", "output_tokens")
_KNOWN = (*_REQUIRED, "arrival_s", "class", "ttft_slo_s")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length")
HASH_BLOCK_TOKENS = 512  # Mooncake, FAST25-release/traces
_MOST_SECONDS = 1e11  # of a time since 1970: the year 5138; what is more are milliseconds
_MOST_TOKENS = 2**31
_NO_HASHES = "there are no hash_ids, which the reuse of prefixes needs: only Mooncake's format has them"


class TraceError(ValueError):
    """A trace that cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace.

    Args:
        prompt_tokens: Prompt length.
        output_tokens: Answer length.
        arrival_s: When it arrived; None: the trace does not say.
        slo_class: Its class; empty without.
        ttft_slo_s: Its own TTFT objective; None: the default.
        block_hashes: See ``Arrival.block_hashes``: one for each ``HASH_BLOCK_TOKENS``; empty: not asked for.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    slo_class: str = ""
    ttft_slo_s: float | None = None
    block_hashes: tuple[int, ...] = ()


def parse_trace(lines: Iterable[str], *, skips_unanswered: bool = False, reads_hashes: bool = False) -> list[TraceRow]:
    """Parse a trace of any of the formats.

    Args:
        lines: The lines.
        skips_unanswered: Leave out requests whose answer has 0 tokens, such as failed ones of a log; otherwise they are
            wrong rows.
        reads_hashes: Every row needs ``hash_ids``; otherwise they are ignored.

    Raises:
        TraceError: Unknown or missing fields, a value that is no number, a count below 1, arrivals out of order, no
            row.
    """
    numbered = iter(enumerate(lines, start=1))
    first = next(((number, line) for number, line in numbered if line.strip()), None)
    if first is None:
        raise TraceError("line 1: the trace is empty")
    if first[1].lstrip().startswith("{"):
        chains = _HashChains() if reads_hashes else None
        rows = _parse_json_lines(chain([first], numbered), chains, skips_unanswered=skips_unanswered)
    elif reads_hashes:
        raise TraceError(f"line {first[0]}: {_NO_HASHES}")
    else:
        rows = _parse_csv(first, numbered, skips_unanswered=skips_unanswered)
    if not rows:
        raise TraceError(f"line {first[0] + 1}: the trace has no rows")
    return rows


def _parse_csv(
    first: tuple[int, str], numbered: Iterator[tuple[int, str]], *, skips_unanswered: bool
) -> list[TraceRow]:
    number, line = first
    header = [name.strip() for name in next(csv.reader([line]))]
    is_azure = header == list(_AZURE)
    if not is_azure:
        unknown = [name for name in header if name not in _KNOWN]
        missing = [name for name in _REQUIRED if name not in header]
        if unknown or missing or len(set(header)) != len(header):
            known = f"known are {', '.join(_KNOWN)}, or those of Azure's traces, {', '.join(_AZURE)}"
            raise TraceError(f"line {number}: columns are {', '.join(header) or 'none'}; {known}")
    names = _AZURE[1:] if is_azure else _REQUIRED
    rows: list[TraceRow] = []
    for number, line in numbered:
        if not line.strip():
            continue
        fields = [field.strip() for field in next(csv.reader([line]))]
        if len(fields) != len(header):
            raise TraceError(f"line {number}: {len(fields)} fields, the header has {len(header)}")
        values: dict[str, object] = dict(zip(header, fields, strict=True))
        if skips_unanswered and values[names[1]] == "0":
            continue
        row = _make_row(values, names, number)
        if is_azure:
            row = replace(row, arrival_s=_parse_date(values, "TIMESTAMP", number))
        else:
            row = replace(
                row,
                arrival_s=_parse_seconds(values, "arrival_s", number),
                slo_class=str(values.get("class", "")),
                ttft_slo_s=_parse_seconds(values, "ttft_slo_s", number),
            )
        _check_order(rows, row, number, "TIMESTAMP" if is_azure else "arrival_s")
        rows.append(row)
    return _start_at_zero(rows) if is_azure else rows


def _parse_json_lines(
    numbered: Iterable[tuple[int, str]], chains: _HashChains | None, *, skips_unanswered: bool
) -> list[TraceRow]:
    rows: list[TraceRow] = []
    is_mooncake: bool | None = None
    for number, line in numbered:
        if not line.strip():
            continue
        record = _parse_object(line, number)
        if is_mooncake is None:
            is_mooncake = "input_length" in record
        names = _MOONCAKE[1:] if is_mooncake else ("prompt_tokens", "completion_tokens")
        counts = record if is_mooncake else _find_usage(record, number)
        if skips_unanswered and counts.get(names[1]) == 0:
            continue
        row = _make_row(counts, names, number)
        if chains is not None:
            row = replace(row, block_hashes=chains.parse(record, row.prompt_tokens, number))
        if is_mooncake:
            arrival_s = _parse_seconds(record, "timestamp", number)
            if arrival_s is None:
                raise TraceError(f"line {number}: timestamp is missing")
            row = replace(row, arrival_s=arrival_s / 1e3)
            _check_order(rows, row, number, "timestamp")
        else:
            row = replace(row, arrival_s=_parse_log_time(record, number), slo_class=str(record.get("class", "")))
            if rows and (row.arrival_s is None) != (rows[0].arrival_s is None):
                state = "has no" if row.arrival_s is None else "has a"
                raise TraceError(f"line {number}: {state} timestamp, unlike the lines before")
        rows.append(row)
    if not is_mooncake and rows and rows[0].arrival_s is not None:
        rows.sort(key=_get_arrival_s)
    return _start_at_zero(rows)


class _HashChains:
    """Gives each block of a trace and all before it one number, whether or not its ids do; mutable."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}

    def parse(self, record: Mapping[str, object], prompt_tokens: int, number: int) -> tuple[int, ...]:
        """Parse ``hash_ids``.

        Raises:
            TraceError: Not a list of as many whole numbers as the prompt has blocks.
        """
        if "hash_ids" not in record:
            raise TraceError(f"line {number}: {_NO_HASHES}")
        ids = record["hash_ids"]
        num_blocks = -(-prompt_tokens // HASH_BLOCK_TOKENS)
        if not isinstance(ids, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise TraceError(f"line {number}: hash_ids is {str(ids)[:80]}, a list of whole numbers is needed")
        if len(ids) != num_blocks:
            raise TraceError(
                f"line {number}: hash_ids has {len(ids)} entries; one is needed for each {HASH_BLOCK_TOKENS} of "
                f"{prompt_tokens} tokens: {num_blocks}"
            )
        chain_numbers: list[int] = []
        before = -1
        for position, each in enumerate(ids):
            tokens = min(HASH_BLOCK_TOKENS, prompt_tokens - position * HASH_BLOCK_TOKENS)
            before = self._numbers.setdefault((before, each, tokens), len(self._numbers))
            chain_numbers.append(before)
        return tuple(chain_numbers)


def _parse_object(line: str, number: int) -> Mapping[str, object]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TraceError(f"line {number}: is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"line {number}: is no JSON object")
    return record


def _find_usage(record: Mapping[str, object], number: int) -> Mapping[str, object]:
    """Find the object with the counts: the record, or what it has under ``usage``."""
    usage = record.get("usage")
    if "prompt_tokens" in record or usage is None:
        return record
    if not isinstance(usage, dict):
        raise TraceError(f"line {number}: usage is {usage!r}, an object is needed")
    return usage


def _make_row(values: Mapping[str, object], names: Sequence[str], number: int) -> TraceRow:
    return TraceRow(
        prompt_tokens=_parse_count(values, names[0], number), output_tokens=_parse_count(values, names[1], number)
    )


def _parse_count(values: Mapping[str, object], name: str, number: int) -> int:
    if name not in values:
        raise TraceError(f"line {number}: {name} is missing")
    value = values[name]
    count = 0
    if isinstance(value, str) and value.isdecimal() and len(value) <= 10:
        count = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        count = value
    if not 1 <= count < _MOST_TOKENS:
        raise TraceError(f"line {number}: {name} is {value!r}, a whole number of at least 1 is needed")
    return count


def _parse_seconds(values: Mapping[str, object], name: str, number: int) -> float | None:
    if name not in values:
        return None
    value = values[name]
    seconds = -1.0
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
    if not 0.0 <= seconds < 1e15:
        raise TraceError(f"line {number}: {name} is {value!r}, a number of at least 0 is needed")
    return seconds


def _parse_log_time(record: Mapping[str, object], number: int) -> float | None:
    name = "timestamp" if "timestamp" in record else "created"
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        return _parse_date(record, name, number)
    seconds = _parse_seconds(record, name, number)
    assert seconds is not None
    if seconds > _MOST_SECONDS:
        raise TraceError(f"line {number}: {name} is {value!r}; seconds since 1970 are needed, or ISO 8601")
    return seconds


def _parse_date(values: Mapping[str, object], name: str, number: int) -> float:
    """Parse ISO 8601, with any number of digits after the second; a time without a zone is in UTC."""
    value = str(values[name])
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise TraceError(f"line {number}: {name} is {value!r}, a date and time are needed") from error
    if moment.tzinfo is None:
        moment = datetime.fromisoformat(value + "+00:00")
    return moment.timestamp()


def _check_order(rows: Sequence[TraceRow], row: TraceRow, number: int, name: str) -> None:
    if not rows or row.arrival_s is None:
        return
    last_s = rows[-1].arrival_s
    assert last_s is not None
    if row.arrival_s < last_s:
        raise TraceError(f"line {number}: {name} is {last_s - row.arrival_s:g} s before that of the row above")


def _start_at_zero(rows: list[TraceRow]) -> list[TraceRow]:
    """Count times from the first arrival: nobody needs the date."""
    if not rows or rows[0].arrival_s is None:
        return rows
    first_s = rows[0].arrival_s
    return [replace(row, arrival_s=_get_arrival_s(row) - first_s) for row in rows]


def _get_arrival_s(row: TraceRow) -> float:
    assert row.arrival_s is not None
    return row.arrival_s
