"""Counters of the serving process: the server's handlers change them, ``metrics`` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ServerCounters:
    """What happened since the start, for metrics."""

    num_iterations: int = 0
    iteration_s: float = 0.0
    num_messages: int = 0
    num_tokens: int = 0
    num_submits: int = 0
    num_refused: int = 0
    num_foreign_kv: int = 0
    num_lost_streams: int = 0
    num_expired_leases: int = 0
    num_claimed: int = 0
    num_evicted_ends: int = 0
    finished: dict[int, int] = field(default_factory=dict)
