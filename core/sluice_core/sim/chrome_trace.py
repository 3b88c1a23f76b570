"""What happened when, in the Chrome trace format, which Perfetto (ui.perfetto.dev) opens.

Each engine is a track: its iterations, with what they computed, and counters of running decodes and KV use. Requests
and transfers are asynchronous spans. Times are microseconds of the simulated clock.

Source: Trace Event Format, "Complete", "Async" and "Counter" events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sluice_core.records import EngineId, MoveCause
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.requests import SimRequest

_US = 1e6
_ENGINES, _REQUESTS, _TRANSFERS = 1, 2, 3  # process ids, which Perfetto shows as groups


class IterationSpan(NamedTuple):
    """An iteration of an engine, fixed at its start; blocks are those in use then."""

    engine_id: EngineId
    start_s: float
    duration_s: float
    num_decodes: int
    prefill_tokens: int
    num_chunks: int
    used_blocks: int
    decode_context_tokens: int


class Timeline:
    """Collects a run; mutable, filled by the simulation.

    Attributes:
        iterations: Of all engines, in the order of their start.
        transfers: Request, cause, start and end in seconds, source and target, in the order of their start.
    """

    def __init__(self) -> None:
        self.iterations: list[IterationSpan] = []
        self._tracks: dict[EngineId, int] = {}
        self.transfers: list[tuple[str, str, float, float, str, str]] = []
        self._requests: list[tuple[str, float, float, float, int, int, bool]] = []

    def note_iteration(self, engine: SimEngine, now: float) -> None:
        """Note an iteration that starts at ``now``."""
        self._tracks.setdefault(engine.engine_id, len(self._tracks) + 1)
        self.iterations.append(
            IterationSpan(
                engine.engine_id,
                now,
                engine.duration_s,
                0 if engine.withholds_decodes else engine.batch.num_decodes,
                engine.prefills.num_tokens,
                engine.prefills.num_chunks,
                engine.used_blocks,
                0 if engine.withholds_decodes else engine.decode_context_tokens,
            )
        )

    def note_interrupt(self, engine: SimEngine, now: float) -> None:
        """Note that the iteration under way on an engine has stopped at ``now``."""
        number = len(self.iterations) - 1
        while self.iterations[number].engine_id != engine.engine_id:
            number -= 1
        span = self.iterations[number]
        self.iterations[number] = span._replace(duration_s=now - span.start_s)

    def note_transfer(self, request: SimRequest, cause: MoveCause, now: float, arrives_at_s: float) -> None:
        """Note a KV transfer that begins at ``now``, waits for its link included."""
        source, target = request.source or "", request.target or ""
        self.transfers.append((request.request_id, cause.value, now, arrives_at_s, source, target))

    def note_finished(self, requests: Sequence[SimRequest]) -> None:
        """Note requests that have just ended."""
        for request in requests:
            self._requests.append(
                (
                    request.request_id,
                    request.arrival_s,
                    request.first_token_s,
                    request.last_token_s,
                    request.prompt_tokens,
                    request.output_tokens,
                    request.has_met_slo,
                )
            )

    def to_chrome_trace(self) -> Iterator[str]:
        """Write the trace as JSON, in pieces."""
        yield '{"displayTimeUnit":"ms","traceEvents":[\n'
        separator = ""
        for event in self._list_events():
            yield separator + json.dumps(event, separators=(",", ":"))
            separator = ",\n"
        yield "\n]}\n"

    def _list_events(self) -> Iterator[dict[str, object]]:
        names = {_ENGINES: "engines", _REQUESTS: "requests", _TRANSFERS: "KV transfers"}
        for process, name in names.items():
            yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        for engine_id, track in self._tracks.items():
            yield {"ph": "M", "pid": _ENGINES, "tid": track, "name": "thread_name", "args": {"name": engine_id}}
        for engine_id, start_s, duration_s, num_decodes, prefill_tokens, num_chunks, used, context in self.iterations:
            what = "mixed" if num_decodes and prefill_tokens else "prefill" if prefill_tokens else "decode"
            at = {"pid": _ENGINES, "tid": self._tracks[engine_id], "ts": start_s * _US}
            arguments = {
                "decodes": num_decodes,
                "context": context,
                "prefill_tokens": prefill_tokens,
                "chunks": num_chunks,
            }
            yield {"ph": "X", "name": what, "dur": duration_s * _US, "args": arguments, **at}
            yield {"ph": "C", "name": f"{engine_id} decodes", "args": {"decodes": num_decodes}, **at}
            yield {"ph": "C", "name": f"{engine_id} KV blocks", "args": {"used": used}, **at}
        for request_id, arrival_s, first_s, last_s, prompt_tokens, output_tokens, is_met in self._requests:
            outcome = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "met": is_met}
            yield from _span((_REQUESTS, request_id), "until first token", (arrival_s, first_s), outcome)
            yield from _span((_REQUESTS, request_id), "decode", (first_s, last_s), outcome)
        for request_id, cause, start_s, end_s, source, target in self.transfers:
            between = {"source": source, "target": target}
            yield from _span((_TRANSFERS, request_id), cause, (start_s, end_s), between)


def _span(
    track: tuple[int, str], name: str, times_s: tuple[float, float], arguments: Mapping[str, object]
) -> Iterator[dict[str, object]]:
    process, request_id = track
    at = {"cat": "request", "pid": process, "tid": 0, "id": int(request_id), "name": name}
    yield {"ph": "b", "ts": times_s[0] * _US, "args": arguments, **at}
    yield {"ph": "e", "ts": times_s[1] * _US, **at}
