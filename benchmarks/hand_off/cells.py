"""Cells of the benchmark: hops under one condition at one context length, and what they come to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.local_cluster.figures import compute_percentile, format_number, format_table, to_json_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.hand_off.hops import Hop, Walk

MS = 1e3
HEADER = (
    "condition",
    "KV moved",
    "context",
    "hops",
    "pause p50",
    "p99 ms",
    "plain gap mean",
    "p50",
    "p99 ms",
    "ratio p50",
    "ratio p99",
    "iterations p50",
    "p99",
    "router p50 ms",
    "missing",
    "recomputed",
    "wrong",
)


@dataclass(slots=True, kw_only=True)
class HopGroup:
    """Hops that are alike; mutable, filled while the benchmark runs.

    Args:
        condition: Background.
        kv_moved: Which part of the KV crosses: ``all``, or ``new`` where the target still has what it had before.
        context_tokens: Wanted context at the first hop.
        hops: The hops.
        iterations: Of each hop, iterations of the target in the pause; empty where nothing counts them.
        plain_gaps_s: Gaps of the same requests without a hop near them.
        num_missing: Moves asked for that did not come to a hop.
        num_recomputed: Pulls that failed or came too late, by the engines' counters; None: not told apart here.
        num_wrong: Moved requests that were answered otherwise than unmoved ones; None: not compared.
    """

    condition: str
    kv_moved: str
    context_tokens: int
    hops: list[Hop] = field(default_factory=list)
    iterations: list[float] = field(default_factory=list)
    plain_gaps_s: list[float] = field(default_factory=list)
    num_missing: int = 0
    num_recomputed: int | None = None
    num_wrong: int | None = None

    def add(self, hop: Hop, iterations: float | None) -> None:
        """Adds a hop."""
        self.hops.append(hop)
        if iterations is not None:
            self.iterations.append(iterations)

    def add_rest(self, walk: Walk) -> None:
        """Adds the plain gaps of a request and what it did not come to."""
        self.plain_gaps_s.extend(walk.plain_gaps_s)
        self.num_missing += walk.num_missing

    def summarize(self) -> dict[str, float]:
        """Computes the figures of the table, times in milliseconds; NaN where there is nothing to compute from."""
        pauses = [hop.pause_s * MS for hop in self.hops]
        gaps = [gap * MS for gap in self.plain_gaps_s]
        figures = {}
        for percent in (50, 99):
            figures[f"pause_p{percent}_ms"] = compute_percentile(pauses, percent)
            figures[f"plain_gap_p{percent}_ms"] = compute_percentile(gaps, percent)
            figures[f"iterations_p{percent}"] = compute_percentile(self.iterations, percent)
            figures[f"router_move_p{percent}_ms"] = compute_percentile([hop.move_s * MS for hop in self.hops], percent)
        # The mean: a client that was not scheduled reads several tokens at once, which moves the median to nothing
        # and leaves the mean as it is.
        mean = figures["plain_gap_mean_ms"] = sum(gaps) / len(gaps) if gaps else math.nan
        for percent in (50, 99):
            figures[f"ratio_p{percent}"] = figures[f"pause_p{percent}_ms"] / mean if mean else math.nan
        return figures

    def format_row(self) -> list[str]:
        """Formats the cell's line of the table."""
        figures = self.summarize()
        return [
            self.condition,
            self.kv_moved,
            str(self.context_tokens),
            str(len(self.hops)),
            format_number(figures["pause_p50_ms"]),
            format_number(figures["pause_p99_ms"]),
            format_number(figures["plain_gap_mean_ms"]),
            format_number(figures["plain_gap_p50_ms"]),
            format_number(figures["plain_gap_p99_ms"]),
            format_number(figures["ratio_p50"]),
            format_number(figures["ratio_p99"]),
            format_number(figures["iterations_p50"]),
            format_number(figures["iterations_p99"]),
            format_number(figures["router_move_p50_ms"]),
            str(self.num_missing),
            "-" if self.num_recomputed is None else str(self.num_recomputed),
            "-" if self.num_wrong is None else str(self.num_wrong),
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything, with the sample of each hop."""
        return {
            "condition": self.condition,
            "kv_moved": self.kv_moved,
            "context_tokens": self.context_tokens,
            "num_hops": len(self.hops),
            "num_plain_gaps": len(self.plain_gaps_s),
            "num_missing": self.num_missing,
            "num_recomputed": self.num_recomputed,
            "num_wrong": self.num_wrong,
            **{name: to_json_number(value) for name, value in self.summarize().items()},
            "hops": [
                {
                    "source": hop.source,
                    "target": hop.target,
                    "context_tokens": hop.context_tokens,
                    "pause_ms": round(hop.pause_s * MS, 3),
                    "router_move_ms": round(hop.move_s * MS, 3),
                    "target_decodes": hop.target_decodes,
                    "target_queued_tokens": hop.target_queued_tokens,
                }
                for hop in self.hops
            ],
            "iterations": self.iterations,
        }


def format_cells(cells: Sequence[HopGroup]) -> str:
    """Formats the table."""
    return format_table(HEADER, [cell.format_row() for cell in cells], num_left=2)
