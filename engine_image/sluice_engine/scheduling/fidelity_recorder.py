"""A record of every iteration, for comparisons with the simulator (``benchmarks/fidelity``); off by default.

With ``SLUICE_RECORD`` in an engine's environment, its scheduler writes a file into that folder. Each line is a JSON
array:

- ``["request", at_s, request_id, kind, num_tokens, max_tokens, arrival_s]``: a request arrived at the scheduler;
- ``["batch", at_s, num_decodes, decode_context_tokens, [[request_id, num_computed_tokens, num_tokens], ...],
  [request_id, ...]]``: an iteration was scheduled, with its prefill chunks and the requests whose KV had arrived;
- ``["hand-off", at_s, request_id]``: a request ended here, and its KV waits for a reader;
- ``["end", at_s, duration_s]``: the oldest iteration under way ended;
- ``["plan", at_s, role, chunk_size_tokens]``: a plan came into force.

``at_s`` and ``arrival_s`` (arrival at the router) are on the machine's monotonic clock, alike in all processes.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice_core.scheduling.engine_policy import RequestKind

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from sluice_engine.core_messages import ConfigureAnswer
    from sluice_engine.request_tracker import TrackedRequest
    from sluice_engine.scheduling.scheduled_batch import ScheduledBatch

VARIABLE = "SLUICE_RECORD"


class IterationRecorder:
    """Writes one engine's file.

    Args:
        path: The file; it is overwritten.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line by line, because engines are killed.
        self._file = path.open("w", buffering=1)

    def close(self) -> None:
        """Ends the record."""
        self._file.close()

    def note_request(self, tracked: TrackedRequest) -> None:
        """Notes a request that has just come."""
        request = tracked.request
        self._write(
            "request",
            request.request_id,
            tracked.kind.name,
            request.num_tokens,
            request.max_tokens,
            tracked.arrival_s,
        )

    def note_batch(self, output: SchedulerOutput, batch: ScheduledBatch) -> None:
        """Notes an iteration right after it was scheduled, when vLLM has counted its tokens as computed."""
        chunks, joining = [], []
        for tracked in batch.computing:
            request = tracked.request
            if tracked.kind is RequestKind.JOINING:
                joining.append(request.request_id)
            else:
                num_tokens = output.num_scheduled_tokens[request.request_id]
                chunks.append([request.request_id, request.num_computed_tokens - num_tokens, num_tokens])
        self._write("batch", batch.num_decodes, batch.decode_context_tokens, chunks, joining)

    def note_hand_off(self, request_id: str) -> None:
        """Notes that a request was handed off."""
        self._write("hand-off", request_id)

    def note_end(self, duration_s: float) -> None:
        """Notes the end of an iteration."""
        self._write("end", duration_s)

    def note_plan(self, plan: ConfigureAnswer) -> None:
        """Notes a plan."""
        self._write("plan", str(plan.role), plan.chunk_size_tokens)

    def _write(self, what: str, *values: Any) -> None:
        self._file.write(json.dumps([what, time.monotonic(), *values], separators=(",", ":")) + "\n")


def open_recorder(name: str) -> IterationRecorder | None:
    """Opens the record if the environment names a folder.

    Args:
        name: The engine's.

    Returns:
        None when the environment names none.
    """
    folder = os.environ.get(VARIABLE)
    return IterationRecorder(Path(folder) / f"{name}.jsonl") if folder else None
