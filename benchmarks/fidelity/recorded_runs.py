"""Reads what ``sluice_engine.scheduling.fidelity_recorder`` wrote: iterations and load of each engine.

The modelled clock has none of the host's delays: an iteration that was scheduled while another ran begins when that one
ends, and an idle engine idles as long as it did. On it a request comes exactly when the scheduler saw it, between two
iterations. So a replay in the simulator compares batches and nothing else, however loaded the machine was.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sluice_core.latency import compute_attention_work

if TYPE_CHECKING:
    from pathlib import Path

    from sluice_core.latency import IterationProfile

# A request that came between two iterations came before the first one ended, on a clock without delays: by this much.
BEFORE_S = 1e-7


class RecordedBatch(NamedTuple):
    """What an iteration held.

    Args:
        num_decodes: Decodes.
        decode_context_tokens: Sum of their contexts, the token of the iteration included.
        prefill_tokens: Tokens of all chunks.
        num_chunks: Prefill chunks.
    """

    num_decodes: int
    decode_context_tokens: int
    prefill_tokens: int
    num_chunks: int

    def __str__(self) -> str:
        return (
            f"{self.num_decodes} decodes with {self.decode_context_tokens} tokens of context, "
            f"{self.prefill_tokens} prefill tokens in {self.num_chunks} chunks"
        )


@dataclass(slots=True)
class RecordedRequest:
    """A request as an engine saw it; mutable while the record is read.

    Args:
        request_id: The router's name of it.
        kind: What it was when it came.
        at_s: When it came.
        modelled_at_s: The same on the modelled clock.
        num_tokens: Its tokens then.
        max_tokens: Its output's length.
        arrival_s: When it arrived at its router, which orders it among others, on the machine's clock.
    """

    request_id: str
    kind: str
    at_s: float
    modelled_at_s: float
    num_tokens: int
    max_tokens: int
    arrival_s: float


@dataclass(slots=True)
class RecordedIteration:
    """One iteration of a record; mutable while the record is read.

    Args:
        scheduled_s: When it was scheduled, on the machine's clock.
        start_s: When it began, on the modelled clock.
        duration_s: What the profile says.
        batch: What it held.
        ended_s: When its output was taken in, on the machine's clock; 0: it was not.
        measured_s: How long the engine found it to take.
    """

    scheduled_s: float
    start_s: float
    duration_s: float
    batch: RecordedBatch
    ended_s: float = 0.0
    measured_s: float = 0.0

    @property
    def end_s(self) -> float:
        """When it ended, on the modelled clock."""
        return self.start_s + self.duration_s


@dataclass(slots=True)
class Record:
    """One engine's record.

    Args:
        name: The engine.
        iterations: In order.
        requests: In the order in which they came.
        handed_off_s: When requests left for another engine, by their names, on the machine's clock.
        joined_s: When the iteration was scheduled in which requests of other engines joined, likewise.
    """

    name: str
    iterations: list[RecordedIteration] = field(default_factory=list)
    requests: list[RecordedRequest] = field(default_factory=list)
    handed_off_s: dict[str, float] = field(default_factory=dict)
    joined_s: dict[str, float] = field(default_factory=dict)


class _Reader:
    """Reads one record; mutable."""

    def __init__(self, name: str, profile: IterationProfile, begin_s: float) -> None:
        self.record = Record(name)
        self._profile = profile
        self._begin_s = begin_s
        self._running: list[RecordedIteration] = []
        self._end_s = self._ended_s = 0.0
        self._new: list[RecordedRequest] = []

    def take(self, line: list) -> None:  # type: ignore[type-arg]
        """Takes a line of the record."""
        what, at_s, *values = line
        if what == "request":
            self._new.append(RecordedRequest(values[0], values[1], at_s, 0.0, *values[2:5]))
        elif what == "batch":
            self._schedule(at_s, *values[:3])
            self.record.joined_s |= dict.fromkeys(values[3], at_s)
        elif what == "hand-off":
            self.record.handed_off_s[values[0]] = at_s
        elif what == "end":
            ended = self._running.pop(0)
            ended.ended_s, ended.measured_s = at_s, values[0]
            self._end_s, self._ended_s = ended.end_s, at_s

    def _schedule(self, at_s: float, num_decodes: int, context_tokens: int, chunks: list[list]) -> None:  # type: ignore[type-arg]
        batch = RecordedBatch(num_decodes, context_tokens, sum(chunk[2] for chunk in chunks), len(chunks))
        work = sum(compute_attention_work(tokens, before) for _, before, tokens in chunks)
        duration_s = self._profile.estimate_iteration_s(
            num_decodes + batch.prefill_tokens,
            batch.num_chunks,
            batch.prefill_tokens,
            work,
            num_decodes,
            context_tokens,
        )
        new_ids = {request.request_id for request in self._new}
        has_idled = not num_decodes and all(chunk[0] in new_ids for chunk in chunks)
        if self._running:
            start_s = self._running[-1].end_s
            seen_s = self._end_s - BEFORE_S
        elif not self.record.iterations:
            start_s = seen_s = at_s - self._begin_s
        elif has_idled:
            start_s = seen_s = self._end_s + at_s - self._ended_s
        else:  # its last iteration has just ended, and this one could not be scheduled before
            start_s = self._end_s
            seen_s = start_s - BEFORE_S
        for request in self._new:
            request.modelled_at_s = seen_s
            self.record.requests.append(request)
        self._new = []
        iteration = RecordedIteration(at_s, start_s, duration_s, batch)
        self._running.append(iteration)
        self.record.iterations.append(iteration)


def read_records(folder: Path, profile: IterationProfile, begin_s: float, end_s: float) -> list[Record]:
    """Reads what the engines did in a time in which they were idle at first and at last.

    Args:
        folder: Of the records.
        profile: What the engines emulate.
        begin_s: Begin, on the machine's monotonic clock; zero of the modelled clock.
        end_s: End.
    """
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        reader = _Reader(path.stem.rpartition("-")[0], profile, begin_s)
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if begin_s <= line[1] <= end_s:
                reader.take(line)
        records.append(reader.record)
    return records


def count_pauses(records: list[Record]) -> list[tuple[int, float]]:
    """Finds how long moved requests paused.

    Returns:
        For each move, ends of the target's iterations from the hand-off until the iteration was scheduled in which the
        request joined, and the seconds.
    """
    left_s: dict[str, list[float]] = {}
    for record in records:
        for name, at_s in record.handed_off_s.items():
            left_s.setdefault(_strip_fence(name), []).append(at_s)
    pauses = []
    for record in records:
        ends = [iteration.ended_s for iteration in record.iterations if iteration.ended_s]
        for name, joined_s in record.joined_s.items():
            before = [at_s for at_s in left_s.get(_strip_fence(name), ()) if at_s < joined_s]
            if before:
                num_ends = bisect_right(ends, joined_s) - bisect_right(ends, max(before))
                pauses.append((num_ends, joined_s - max(before)))
    return pauses


def _strip_fence(name: str) -> str:
    """The router names a request anew on each engine: by its own id and a fencing number."""
    return name.rpartition("-")[0]
