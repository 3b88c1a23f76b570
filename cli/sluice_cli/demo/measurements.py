"""What the demo measures, and the tables that it shows of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sluice_cli.demo.openai_client import CompletionStream
    from sluice_cli.local_cluster.cluster_status import ClusterStatus


@dataclass(slots=True)
class DemoTotals:
    """What all steps measured together.

    Args:
        streams: Every stream.
        moves: Decodes moved, by cause.
        num_recovered: Decodes that went on elsewhere after their engine was killed.
        num_exact: Streams over the kill whose text is that of the same request without a kill.
        num_repeated: Streams over the kill.
        slider_s: From the edit of a slider to its acknowledgement by every engine, in seconds.
        num_slo_met: Requests that met their SLOs.
        num_finished: Requests that finished.
    """

    streams: list[CompletionStream] = field(default_factory=list)
    moves: Counter[str] = field(default_factory=Counter)
    num_recovered: int = 0
    num_exact: int = 0
    num_repeated: int = 0
    slider_s: float = 0.0
    num_slo_met: int = 0
    num_finished: int = 0

    def add(self, stream: CompletionStream, log: dict[str, Any]) -> None:
        """Counts a stream and what its decision log says."""
        self.streams.append(stream)
        for event in log["events"]:
            if event["event"] == "moved":
                self.moves[event["cause"]] += 1
            elif event["event"] == "finished":
                self.num_finished += 1
                self.num_slo_met += bool(event["is_slo_met"])


def make_summary_table(totals: DemoTotals, status: ClusterStatus) -> Table:
    """Makes the summary at the end."""
    table = Table(show_header=False)
    table.add_row("complete streams", f"{sum(s.is_complete for s in totals.streams)} of {len(totals.streams)}")
    table.add_row("output tokens", str(sum(stream.output_tokens for stream in totals.streams)))
    for cause, count in totals.moves.most_common():
        table.add_row(f"decodes moved: {cause}", str(count))
    table.add_row("decodes recovered from a killed engine", str(totals.num_recovered))
    table.add_row("greedy streams with the same text despite the kill", f"{totals.num_exact} of {totals.num_repeated}")
    table.add_row("time from edit to new slider", f"{totals.slider_s:.2f} s")
    table.add_row("requests that met their SLOs", f"{totals.num_slo_met} of {totals.num_finished}")
    free = sum(engine.kv_blocks_free or 0 for engine in status.engines)
    table.add_row("KV blocks free now", f"{free} of {sum(engine.kv_blocks_total or 0 for engine in status.engines)}")
    return table


def make_placement_table(requests: Iterable[tuple[CompletionStream, dict[str, Any]]], status: ClusterStatus) -> Table:
    """Makes a table of requests: where each prefill ran and how its decode moved.

    Args:
        requests: Streams with their decision logs.
        status: The cluster that served them.
    """
    table = Table()
    for name in ("prompt tokens", "prefill on", "because", "TTFT ms", "moves of its decode", "SLO"):
        table.add_column(name, justify="right" if name in ("prompt tokens", "TTFT ms") else "left")
    for stream, log in requests:
        table.add_row(*_describe_request(stream, log, status))
    return table


def _describe_request(stream: CompletionStream, log: dict[str, Any], status: ClusterStatus) -> list[str]:
    roles = {engine.engine_id: engine.role for engine in status.engines}
    events = log["events"]
    placed = next(event for event in events if event["event"] == "placement" and event["decision"]["kind"] == "Place")
    finished: dict[str, Any] = next((event for event in events if event["event"] == "finished"), {})
    engine = placed["decision"]["engine_id"]
    moves = [
        f"{event['source']} -> {event['target']} ({event['cause']})" for event in events if event["event"] == "moved"
    ]
    return [
        str(placed["prompt_tokens"]),
        f"{engine} ({roles.get(engine, '')})",
        placed["decision"]["reason"],
        f"{1000 * stream.ttft_s:.0f}",
        ", ".join(moves) or "none",
        "met" if finished.get("is_slo_met") else "missed",
    ]
