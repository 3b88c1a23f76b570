"""OpenTelemetry traces of requests, one span per step, made from the events of the decision log.

Off unless the standard variables name a collector (https://opentelemetry.io/docs/languages/sdk-configuration). The
SDK reads them: sampler, headers, certificates, resource attributes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sluice_core.records import RequestId

TRACE_HEADERS = ("traceparent", "tracestate")
DEFAULT_SERVICE_NAME = "sluice-router"

# The events that end a request.
ENDS = frozenset({"finished", "failed", "cancelled"})
# The step that begins with an event; empty: none does until the next.
_STEPS = {
    "admitted": "queue",
    "submitted": "prefill",
    "first_token": "decode",
    "kept": "kv_wait",
    "whole": "queue",
    "handed_off": "",
    "moved": "decode",
    "returned": "queue",
    "lost": "queue",
    "resumed": "decode",
    "recovered": "decode",
}
# Names that OpenTelemetry's conventions and vLLM's own spans have for fields of the whole request.
_ATTRIBUTES = {
    "client_request_id": "gen_ai.request.id",
    "max_tokens": "gen_ai.request.max_tokens",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "ttft_s": "gen_ai.latency.time_to_first_token",
}
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class TracingError(Exception):
    """A variable of the environment asks for what the router cannot do; names it, the value and what is possible."""


def read_trace_headers(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Reads the W3C trace context of a call (https://www.w3.org/TR/trace-context)."""
    if TRACE_HEADERS[0] not in headers:
        return None
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


def make_request_traces(
    environment: Mapping[str, str], router_id: str, clock: Callable[[], float]
) -> RequestTraces | None:
    """Makes the traces that the environment asks for.

    Args:
        environment: The process's, which the SDK reads too.
        router_id: Unique per router process.
        clock: Of the decision log, in seconds.

    Returns:
        None: no collector is named, or tracing is disabled.

    Raises:
        TracingError: The protocol is not ``grpc``.
    """
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_disabled or environment.get("OTEL_TRACES_EXPORTER") == "none" or not any(map(environment.get, _ENDPOINTS)):
        return None
    for name in _PROTOCOLS:
        if environment.get(name, "grpc") != "grpc":
            raise TracingError(f"{name} is {environment[name]!r}; the router sends traces by 'grpc' only")
    return RequestTraces(BatchSpanProcessor(OTLPSpanExporter()), router_id, clock)


class RequestTraces:
    """The traces of the requests under way that are sampled.

    Args:
        processor: Takes the spans.
        router_id: Unique per router process.
        clock: Of the decision log, in seconds.
    """

    def __init__(self, processor: SpanProcessor, router_id: str, clock: Callable[[], float]) -> None:
        attributes = {SERVICE_INSTANCE_ID: router_id}
        is_named = os.environ.get("OTEL_SERVICE_NAME") or SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if not is_named:
            attributes[SERVICE_NAME] = DEFAULT_SERVICE_NAME
        # The router ends the provider itself, once its last request is over.
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sluice_router")
        self._propagator = TraceContextTextMapPropagator()
        self._start_ns = time.time_ns() - round(clock() * 1e9)
        self._open: dict[RequestId, _RequestTrace] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._open

    def begin(self, request_id: RequestId, arrival_s: float, headers: Mapping[str, str] | None) -> None:
        """Begins a request's trace, if the caller's context or the sampler says so.

        Args:
            request_id: The router's id.
            arrival_s: When its first byte came, on the clock.
            headers: W3C trace context of the call; None: it has none.
        """
        context = self._propagator.extract(headers) if headers else None
        start_ns = self._to_unix_ns(arrival_s)
        root = self._tracer.start_span("request", context, kind=SpanKind.SERVER, start_time=start_ns)
        if root.is_recording():
            root.set_attribute("sluice.request_id", request_id)
            self._open[request_id] = _RequestTrace(self._tracer, root, self._to_unix_ns, arrival_s)

    def note(self, now: float, request_id: RequestId, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes an event of a request that is sampled.

        Args:
            now: The clock.
            request_id: The router's id.
            kind: Of the event.
            fields: Its values by name, as in the decision log.
        """
        known = self._open[request_id] if kind not in ENDS else self._open.pop(request_id)
        known.note(now, kind, fields)

    def refuse(self, now: float, request_id: RequestId, code: str, message: str) -> None:
        """Ends the trace of a request that was not admitted."""
        if request_id in self._open:
            self.note(now, request_id, "failed", {"code": code, "message": message})

    def shut_down(self, timeout_s: float) -> None:
        """Sends what is left, and blocks meanwhile; what the collector does not take in time is lost."""
        # A daemon, since the exporter tries again and again for as long as its own time-out.
        sending = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        sending.start()
        sending.join(timeout_s)

    def _to_unix_ns(self, now: float) -> int:
        return self._start_ns + round(now * 1e9)


class _RequestTrace:
    """One request's spans: of the whole, of its present step, and of the move under way.

    Args:
        tracer: Makes spans.
        root: The span of the whole request.
        to_unix_ns: Converts times of the decision log.
        arrival_s: When its first byte came. Admission is HTTP or gRPC, chat template, tokenizer and limits.
    """

    def __init__(self, tracer: trace.Tracer, root: Span, to_unix_ns: Callable[[float], int], arrival_s: float) -> None:
        self._tracer = tracer
        self._root = root
        self._context = trace.set_span_in_context(root)
        self._to_unix_ns = to_unix_ns
        self._step: Span | None = self._start(arrival_s, "admission", {})
        self._move: Span | None = None
        self._has_token = False

    def note(self, now: float, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes an event."""
        if kind == "first_token" or (kind == "adopted" and fields["output_tokens"]):
            self._has_token = True
        if kind == "grant_asked":
            self._end_move(now, "superseded")
            self._move = self._start(now, "move", fields)
        elif kind == "handed_off" and self._move is not None:
            self._move.add_event(kind, timestamp=self._to_unix_ns(now))
        elif kind == "moved":
            self._end_move(now, "done")
            fields = {"engine": fields["target"]}
        elif kind in {"blocked", "abandoned", "lost"}:
            self._end_move(now, fields["reason"])
        if kind in _STEPS:
            name = _STEPS[kind]
            # What broke off may have been the prefill, and what moved the first part of a prompt.
            if (kind == "resumed" and not fields["output_tokens"]) or (kind == "moved" and not self._has_token):
                name = "prefill"
            self._end_step(now)
            self._step = self._start(now, name, fields) if name else None
        if kind == "admitted":
            self._root.set_attributes(_name(fields, _ATTRIBUTES))
        elif kind in ENDS:
            self._end(now, kind, fields)

    def _start(self, now: float, name: str, fields: Mapping[str, Any]) -> Span:
        return self._tracer.start_span(name, self._context, attributes=_name(fields), start_time=self._to_unix_ns(now))

    def _end_step(self, now: float) -> None:
        if self._step is not None:
            self._step.end(self._to_unix_ns(now))

    def _end_move(self, now: float, outcome: str) -> None:
        if self._move is not None:
            self._move.set_attribute("sluice.outcome", outcome)
            self._move.end(self._to_unix_ns(now))
            self._move = None

    def _end(self, now: float, kind: str, fields: Mapping[str, Any]) -> None:
        self._end_step(now)
        self._end_move(now, kind)
        if kind == "finished":
            self._root.set_attributes(_name(fields, _ATTRIBUTES))
            self._root.set_status(StatusCode.OK)
        else:
            self._root.set_attribute("error.type", fields["code" if kind == "failed" else "reason"])
            self._root.set_status(StatusCode.ERROR, fields.get("message", kind))
        self._root.end(self._to_unix_ns(now))


def _name(fields: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Names fields of an event as attributes of a span, which have values."""
    return {names.get(key, f"sluice.{key}"): value for key, value in fields.items() if value is not None}
