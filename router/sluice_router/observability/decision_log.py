"""Why a request went where it went: a bounded log of tuples, formatted on demand."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import Any

from sluice_core.records import RequestId
from sluice_core.scheduling.placement_records import PlacementRecord
from sluice_core.scheduling.placement_records import explain as explain_placement
from sluice_router.limit_type import Limit
from sluice_router.observability.request_traces import RequestTraces

RING_SIZE = Limit("ring_size", 32_768, "events about requests kept for explanations", at_least=0)
# Names of the values of each kind of event.
FIELDS: dict[str, tuple[str, ...]] = {
    "admitted": (
        "client_request_id",
        "prompt_tokens",
        "max_tokens",
        "ttft_slo_s",
        "tpot_slo_s",
        "slo_class",
        "priority",
    ),
    "placement": ("record",),
    "submitted": ("engine", "fence", "output_tokens", "is_recovery"),
    "split": ("source", "target", "output_tokens"),
    "cut": ("source", "target", "prompt_tokens"),
    "whole": ("engine",),
    "first_token": ("engine", "ttft_s", "predicted_ttft_s"),
    "proposed": ("engine", "cause", "output_tokens"),
    "blocked": ("engine", "cause", "reason"),
    "grant_asked": ("source", "target", "cause", "num_tokens"),
    "granted": ("target", "cause"),
    "copied": ("source", "target", "cause", "num_tokens", "num_parts"),
    "handed_off": ("source", "target", "cause", "fence", "output_tokens"),
    "kept": ("engine", "longest_s"),
    "abandoned": ("engine", "cause", "reason"),
    "moved": ("source", "target", "cause", "duration_s"),
    "returned": ("engine",),
    "lost": ("engine", "reason", "output_tokens"),
    "resumed": ("engine", "output_tokens", "stall_s"),
    "adopted": ("engine", "output_tokens"),
    "detached": (),
    "recovered": ("engine", "output_tokens", "stall_s"),
    "finished": ("reason", "output_tokens", "ttft_s", "tpot_s", "is_slo_met"),
    "failed": ("code", "message"),
    "cancelled": ("reason",),
}


class DecisionLog:
    """The last events about requests, as tuples ``(now, request_id, kind, *values)``; ``FIELDS`` names the values.

    Args:
        size: Events kept.
        traces: Take each event too; None: nobody collects traces.
    """

    def __init__(self, size: int, traces: RequestTraces | None = None) -> None:
        self._events: deque[tuple[Any, ...]] = deque(maxlen=size)
        self._traces = traces

    def __len__(self) -> int:
        return len(self._events)

    def record(self, now: float, request_id: RequestId, kind: str, *values: object) -> None:
        """Keep one event; ``values`` as ``FIELDS[kind]`` names them."""
        self._events.append((now, request_id, kind, *values))
        if self._traces is not None and request_id in self._traces:
            self._traces.note(now, request_id, kind, dict(zip(FIELDS[kind], values, strict=True)))

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Lists every decision about a request.

        Args:
            request_id: The router's id or the client's; of several with the client's id, the last.

        Returns:
            Plain data, oldest event first, times from the first event on; None when nothing is kept.
        """
        router_id = self._resolve(request_id)
        events = [event for event in self._events if event[1] == router_id]
        if not events:
            return None
        start = events[0][0]
        entries = [{"at_s": round(event[0] - start, 6), "event": event[2], **_format_values(event)} for event in events]
        return {"request_id": router_id, "events": entries}

    def _resolve(self, request_id: str) -> RequestId:
        for event in reversed(self._events):
            if event[1] == request_id or (event[2] == "admitted" and event[3] == request_id):
                known: RequestId = event[1]
                return known
        return request_id  # type: ignore[return-value]  # unknown: nothing is found under it


def _format_values(event: tuple[Any, ...]) -> dict[str, Any]:
    kind = event[2]
    if kind == "placement":
        return _format_placement(event[3])
    return dict(zip(FIELDS[kind], event[3:], strict=True))


def _format_placement(record: PlacementRecord | None) -> dict[str, Any]:
    if record is None:
        return {}
    return {
        "prompt_tokens": record.request.prompt_tokens,
        "is_recovery": record.request.is_recovery,
        "decision": {"kind": type(record.decision).__name__, **asdict(record.decision)},
        "candidates": [asdict(candidate) for candidate in explain_placement(record)],
    }
