"""CPU that OpenTelemetry traces take per request, without a router around them: steadier than ``cpu_cost.py --traced``.

    .venv/bin/python benchmarks/router/trace_cost.py [--share 0.01] [--requests N]

A request that is not sampled costs the sampler's decision. One that is costs its spans, here those of an answer that
moves once, and their way to a collector in another process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from typing import TYPE_CHECKING
from unittest import mock

from cpu_cost import SAMPLER, collect_traces
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from sluice_core.records import RequestId
from sluice_router.observability.decision_log import DecisionLog
from sluice_router.observability.request_traces import RequestTraces

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# The events of a request that moves once; see ``decision_log.FIELDS``.
EVENTS: tuple[tuple[object, ...], ...] = (
    ("admitted", "client-1", 1000, 200, 2.0, 0.1, "", 0),
    ("submitted", "p0", 1, 0, False),
    ("first_token", "p0", 0.4, 0.3),
    ("grant_asked", "p0", "d0", "prefill_done", 1001),
    ("granted", "d0", "prefill_done"),
    ("handed_off", "p0", "d0", "prefill_done", 2, 3),
    ("moved", "p0", "d0", "prefill_done", 0.1),
    ("finished", "stop", 200, 0.4, 0.05, True),
)


def serve_collector(pipe: Connection) -> None:
    """Serves a collector until its parent closes the pipe."""
    with collect_traces() as (endpoint, _):
        pipe.send(endpoint)
        pipe.poll(None)


def measure(endpoint: str, share: float, num_requests: int) -> float:
    """Returns the CPU of this process per request, in microseconds, with what the collector takes.

    Args:
        endpoint: URL of the collector.
        share: Of the requests that are sampled.
        num_requests: How many there are.
    """
    with mock.patch.dict(os.environ, {**SAMPLER, "OTEL_TRACES_SAMPLER_ARG": str(share)}):
        # Room for all: what does not fit would be dropped, and cost nothing.
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint), max_queue_size=num_requests * 10)
        traces = RequestTraces(processor, "router-1", time.monotonic)
    return run(num_requests, traces)


def run(num_requests: int, traces: RequestTraces | None = None) -> float:
    """Returns the CPU per request of a decision log, in microseconds, and of traces where there are any."""
    log = DecisionLog(10_000, traces)
    started_s = time.process_time()
    for number in range(num_requests):
        request_id = RequestId(f"req-{number}")
        if traces is not None:
            traces.begin(request_id, time.monotonic(), None)
        for kind, *values in EVENTS:
            log.record(time.monotonic(), request_id, str(kind), *values)
    if traces is not None:
        traces.shut_down(60)
    return (time.process_time() - started_s) / num_requests * 1e6


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="CPU of traces per request")
    parser.add_argument("--share", type=float, default=0.01, help="share of requests sampled (default %(default)s)")
    parser.add_argument("--requests", type=int, default=5000, help="requests of each case (default %(default)s)")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve_collector, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    endpoint = ours.recv()
    base_us = run(options.requests)
    for share in (0.0, options.share, 1.0):
        extra_us = measure(endpoint, share, options.requests) - base_us
        print(f"{share:.0%} sampled: {extra_us:.1f} us of CPU per request beside the decision log's {base_us:.1f} us")
    ours.close()
    child.join()


if __name__ == "__main__":
    main()
