"""Prometheus metrics of an engine; ``probes`` serves them.

Nothing is counted twice: the collector reads the server's counters and its newest load when it is scraped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.v1 import sampling_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sluice_engine.server.engine_server import EngineServer

# Gauges of the load: metric, field of core_messages.SchedulerLoad, help.
LOAD_GAUGES = (
    ("queued_prefill_tokens", "queued_prefill_tokens", "Prefill tokens not yet computed."),
    ("queued_requests", "queued_requests", "Requests with such tokens."),
    ("late_prefill_tokens", "late_prefill_tokens", "Of these tokens, those that will miss their TTFT SLO and go last."),
    ("late_requests", "late_requests", "Requests with such tokens."),
    ("running_decodes", "running_decodes", "Decodes that run."),
    ("decode_context_tokens", "decode_context_tokens", "Sum of their contexts."),
    ("pulling_requests", "pulling_requests", "Requests that wait for KV from another engine."),
    ("kv_blocks_total", "kv_blocks_total", "KV blocks of the engine."),
    ("kv_blocks_used", "kv_blocks_used", "KV blocks that requests hold."),
    ("kv_blocks_granted", "kv_blocks_granted", "KV blocks reserved by grants."),
    ("kv_blocks_pinned", "kv_blocks_pinned", "KV blocks handed off and not yet read or released."),
    ("chunk_size_tokens", "chunk_size_tokens", "Chunk size in force."),
    ("pull_bytes_per_second", "pull_bytes_per_s", "Measured rate of KV pulls."),
)
LOAD_COUNTERS = (
    ("preemptions", "num_preemptions", "Preemptions."),
    ("suspended_prefills", "num_suspended_prefills", "Prefills that made way for a more urgent one."),
    ("phase_switches", "num_phase_switches", "Changes from prefills to decodes or back, by strategies with phases."),
    ("moved_in", "num_moved_in", "Requests that arrived with KV."),
    ("moved_out", "num_moved_out", "Requests handed off."),
    ("recomputed_pulls", "num_recomputed_pulls", "Pulls that failed or came too late and were recomputed."),
)
SERVER_COUNTERS = (
    ("iterations", "num_iterations", "Iterations that computed something."),
    ("iteration_seconds", "iteration_s", "Their wall time."),
    ("messages", "num_messages", "Messages to routers with tokens, news or a load report."),
    ("output_tokens", "num_tokens", "Tokens sent to routers."),
    ("submits", "num_submits", "Submits received."),
    ("refused_submits", "num_refused", "Submits that cannot run here."),
    ("foreign_kv", "num_foreign_kv", "Submits whose KV has another fingerprint."),
    ("lost_streams", "num_lost_streams", "Streams that ended."),
    ("expired_leases", "num_expired_leases", "Requests aborted because their router did not come back."),
    ("claimed", "num_claimed", "Requests that another router has asked for to go on with."),
    ("evicted_ends", "num_evicted_ends", "Ended requests that were given up early, because too many were kept."),
)


class EngineCollector(Collector):
    """Reads the server when it is scraped.

    Args:
        server: The engine's server.
    """

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics of the engine."""
        load, counters = self._server.load, self._server.counters
        for name, field, text in LOAD_GAUGES:
            yield GaugeMetricFamily(f"sluice_engine_{name}", text, value=getattr(load, field))
        for name, field, text in LOAD_COUNTERS:
            yield CounterMetricFamily(f"sluice_engine_{name}", text, value=getattr(load, field))
        for name, field, text in SERVER_COUNTERS:
            yield CounterMetricFamily(f"sluice_engine_{name}", text, value=getattr(counters, field))
        finished = CounterMetricFamily("sluice_engine_finished", "Requests that ended.", labels=["reason"])
        for reason, count in list(counters.finished.items()):
            finished.add_metric([reason_label(reason)], count)
        yield finished
        yield GaugeMetricFamily(
            "sluice_engine_requests", "Requests that have not ended.", value=self._server.num_requests
        )
        yield GaugeMetricFamily(
            "sluice_engine_held_requests", "Those of lost routers, which wait for one.", value=self._server.num_held
        )
        yield GaugeMetricFamily(
            "sluice_engine_kept_ends", "Ended requests that clients may resume.", value=self._server.num_kept_ends
        )
        yield GaugeMetricFamily("sluice_engine_routers", "Routers with a stream.", value=self._server.num_routers)
        yield GaugeMetricFamily("sluice_engine_draining", "1 while draining.", value=int(self._server.is_draining))


def reason_label(reason: int) -> str:
    """The wire's finish reason as a label: ``stop``, ``length``, ``handed_off``."""
    return sampling_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()  # type: ignore[arg-type]
