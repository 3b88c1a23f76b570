"""Traces of requests: what a collector sees of admission, queue, prefill, moves, decode and failures."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import aiohttp
import grpc
import pytest
from data_plane_harness import Clock, Harness, until
from fake_engine import make_plan
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from server_harness import serving_ready

from sluice.v1 import router_pb2, router_pb2_grpc, sampling_pb2
from sluice_router import __main__ as program
from sluice_router.errors import QueueFullError
from sluice_router.observability.request_traces import RequestTraces, make_request_traces
from sluice_router.settings import make_limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from sluice_router.limit_type import Limits

PD = {"p0": "P", "d0": "D"}
TWO = {"d0": "D", "d1": "D"}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collected:
    """A data plane whose traces stay in memory."""

    def __init__(self, roles: dict[str, str], limits: Limits | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.harness = Harness(roles, limits=limits, make_traces=self._make)

    def _make(self, clock: Clock) -> RequestTraces:
        self.traces = RequestTraces(SimpleSpanProcessor(self.exporter), "router-1", clock)
        return self.traces

    def record(self, *events: tuple[object, ...]) -> None:
        """Logs events of a request, a quarter of a second apart, until its trace has ended."""
        clock = self.harness.clock
        self.traces.begin("r", clock.now_s, {})
        for event in events:
            clock.advance(0.25)
            if "r" in self.traces:
                self.harness.state.decision_log.record(clock.now_s, "r", *event)

    def take(self) -> tuple[ReadableSpan, list[ReadableSpan], list[ReadableSpan]]:
        """The only request that has ended: its span, its steps in order, its moves; checks that they belong to it."""
        (root,) = [span for span in self.exporter.get_finished_spans() if span.name == "request"]
        spans = sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
        parts = [span for span in spans if span is not root and span.context.trace_id == root.context.trace_id]
        for span in parts:
            assert span.parent is not None
            assert span.parent.span_id == root.context.span_id
            assert root.start_time <= span.start_time <= span.end_time <= root.end_time
        return root, [span for span in parts if span.name != "move"], [span for span in parts if span.name == "move"]


def get_names(spans: Sequence[ReadableSpan]) -> list[str]:
    return [span.name for span in spans]


def test_a_request_that_moves_has_a_span_for_each_step_and_for_the_move():
    collected = Collected(PD)
    harness = collected.harness
    engine = harness.engines["d0"]
    # The prefill must not run there.
    harness.state.engines.table.configure(engine.engine_id, role=engine.role, chunk_size_tokens=0, is_draining=False)
    arrival_s = harness.clock.now_s
    request_id, response_stream = harness.admit(20, 40, client_request_id="mine")
    assert harness.engine_of(request_id) == "p0"
    harness.run()
    assert response_stream.finish is not None
    assert response_stream.finish.usage.num_hand_offs == 1
    root, steps, moves = collected.take()
    assert get_names(steps) == ["admission", "queue", "prefill", "decode", "decode"]
    assert [step.attributes.get("sluice.engine") for step in steps[2:]] == ["p0", "p0", "d0"]
    # One after the other without a gap, but for the hand-off, which is the end of the move.
    assert [step.end_time for step in steps[:3]] == [step.start_time for step in steps[1:4]]
    (move,) = moves
    assert [event.timestamp for event in move.events] == [steps[3].end_time]
    assert move.end_time == steps[4].start_time
    assert dict(move.attributes) == {
        "sluice.source": "p0",
        "sluice.target": "d0",
        "sluice.cause": "prefill_done",
        "sluice.num_tokens": 22,
        "sluice.outcome": "done",
    }
    assert root.kind is SpanKind.SERVER
    assert root.status.status_code is StatusCode.OK
    assert (root.end_time - root.start_time) / 1e9 == pytest.approx(harness.clock.now_s - arrival_s, abs=0.05)
    wanted = {
        "sluice.request_id": request_id,
        "gen_ai.request.id": "mine",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.usage.output_tokens": 40,
        "gen_ai.latency.time_to_first_token": response_stream.finish.usage.ttft_s,
        "sluice.is_slo_met": response_stream.finish.usage.is_slo_met,
    }
    assert {name: root.attributes[name] for name in wanted} == wanted
    resource = root.resource.attributes
    assert (resource["service.name"], resource["service.instance.id"]) == ("sluice-router", "router-1")


@pytest.mark.parametrize(
    ("events", "names"),
    [
        (
            [("handed_off", "e0", "e1", "split", 2, 0), ("moved", "e0", "e1", "split", 0.5)],
            ["admission", "queue", "prefill", "kv_wait", "prefill", "decode"],
        ),
        (
            [("whole", "e0"), ("submitted", "e0", 2, 0, False)],
            ["admission", "queue", "prefill", "kv_wait", "queue", "prefill", "decode"],
        ),
    ],
    ids=["cut", "without room"],
)
def test_a_prompt_that_is_cut_has_a_prefill_on_each_engine(events, names):
    collected = Collected({})
    begun = [
        ("admitted", "", 100, 8, 5.0, 0.5, "", 0),
        ("submitted", "e0", 1, 0, False),
        ("cut", "e0", "e1", 70),
        ("kept", "e0", 10.0),
    ]
    ended = [("first_token", "e1", 1.0, 0.9), ("finished", "length", 8, 1.0, 0.1, True)]
    collected.record(*begun, *events, *ended)
    _, steps, _ = collected.take()
    assert get_names(steps) == names


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (("moved", "e0", "e1", "drain", 0.5), "done"),
        (("blocked", "e0", "drain", "no_room"), "no_room"),
        (("abandoned", "e0", "drain", "copy_timeout"), "copy_timeout"),
        (("lost", "e0", "silence", 1), "silence"),
        (("grant_asked", "e0", "e1", "manual", 101), "superseded"),
        (("cancelled", "client_gone"), "cancelled"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_move_ends_when_its_outcome_is_known(event, outcome):
    collected = Collected({})
    begun = [
        ("admitted", "", 100, 8, 5.0, 0.5, "", 0),
        ("submitted", "e0", 1, 0, False),
        ("first_token", "e0", 1.0, 0.9),
        ("grant_asked", "e0", "e1", "drain", 101),
    ]
    collected.record(*begun, event, ("finished", "length", 8, 1.0, 0.1, True))
    _, _, moves = collected.take()
    assert moves[0].attributes["sluice.outcome"] == outcome
    assert moves[0].end_time - moves[0].start_time == pytest.approx(0.25e9, abs=1000)


def test_a_move_that_its_source_refuses_says_why():
    collected = Collected(PD)
    harness = collected.harness
    harness.cores["p0"].refuse_hand_offs = "preempted"
    request_id, _ = harness.admit(20, 20)
    harness.run()
    _, steps, moves = collected.take()
    assert get_names(steps) == ["admission", "queue", "prefill", "decode"]
    assert {move.attributes["sluice.outcome"] for move in moves} == {"preempted"}
    events = [event for event in harness.router.explain(request_id)["events"] if event["event"] == "abandoned"]
    assert {(event["engine"], event["cause"], event["reason"]) for event in events} == {
        ("p0", "prefill_done", "preempted")
    }


def test_a_request_whose_engine_dies_is_computed_again_elsewhere():
    collected = Collected(TWO)
    harness = collected.harness
    request_id, _ = harness.admit(20, 20)
    first = harness.engine_of(request_id)
    for _ in range(5):
        harness.step_all()
    harness.kill(first)
    (second,) = harness.engines
    harness.run()
    root, steps, _ = collected.take()
    assert get_names(steps) == ["admission", "queue", "prefill", "decode", "queue", "prefill", "decode"]
    assert [step.attributes.get("sluice.engine") for step in steps[2:]] == [first, first, first, second, second]
    assert steps[4].attributes["sluice.reason"] == "stream"
    assert [steps[index].attributes["sluice.is_recovery"] for index in (2, 5)] == [False, True]
    assert steps[6].attributes["sluice.stall_s"] == pytest.approx((steps[6].start_time - steps[3].end_time) / 1e9)
    assert root.status.status_code is StatusCode.OK
    (recovered,) = [event for event in harness.router.explain(request_id)["events"] if event["event"] == "recovered"]
    assert (recovered["engine"], recovered["output_tokens"]) == (second, 6)


@pytest.mark.parametrize(("steps_before", "names"), [(0, ["queue", "prefill", "decode"]), (4, ["queue", "decode"])])
def test_a_request_whose_stream_breaks_goes_on_in_the_step_that_it_was_in(steps_before, names):
    collected = Collected(TWO, limits=make_limits(resume_grace_s=10))
    harness = collected.harness
    request_id, _ = harness.admit(20, 20)
    name = harness.engine_of(request_id)
    harness.deliver()
    for _ in range(steps_before):
        harness.step_all()
    harness.cut(name)
    harness.reconnect(name)
    harness.run()
    assert harness.count("resumed") == 1
    _, steps, _ = collected.take()
    assert get_names(steps)[-len(names) :] == names


def test_a_cancelled_request_ends_its_trace():
    collected = Collected(TWO)
    request_id, _ = collected.harness.admit(20, 20)
    collected.harness.step_all()
    collected.harness.router.cancel(request_id, "client_gone")
    root, steps, _ = collected.take()
    assert get_names(steps)[-1] == "decode"
    assert (root.status.status_code, root.attributes["error.type"]) == (StatusCode.ERROR, "client_gone")
    assert request_id not in collected.traces


def test_a_refused_request_has_a_trace_that_says_why():
    collected = Collected({}, limits=make_limits(max_waiting=1))
    collected.harness.router.apply_plan(make_plan(PD))
    collected.harness.admit()
    with pytest.raises(QueueFullError):
        collected.harness.admit()
    root, steps, _ = collected.take()
    assert get_names(steps) == ["admission"]
    assert (root.status.status_code, root.attributes["error.type"]) == (StatusCode.ERROR, "rate_limited")
    assert root.status.description.startswith("1 requests wait")


def test_a_refused_request_that_its_caller_does_not_sample_has_none():
    collected = Collected({}, limits=make_limits(max_waiting=1))
    collected.harness.router.apply_plan(make_plan(PD))
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    collected.harness.admit(trace_headers=headers)
    with pytest.raises(QueueFullError):
        collected.harness.admit(trace_headers=headers)
    assert not collected.exporter.get_finished_spans()


@pytest.mark.parametrize(("flags", "num_traces"), [("01", 1), ("00", 0)], ids=["sampled", "not sampled"])
def test_the_callers_trace_goes_on_if_the_caller_samples_it(flags, num_traces):
    collected = Collected(TWO)
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}"}
    request_id, _ = collected.harness.admit(trace_headers=headers)
    assert (request_id in collected.traces) is bool(num_traces)
    collected.harness.run()
    roots = [span for span in collected.exporter.get_finished_spans() if span.name == "request"]
    assert [(f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") for span in roots] == [
        (TRACE_ID, PARENT_ID)
    ] * num_traces


def test_a_share_of_the_requests_is_sampled(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.3")
    collected = Collected(TWO)
    for _ in range(200):
        collected.harness.admit(10, 2)
        collected.harness.run()
    roots = [span for span in collected.exporter.get_finished_spans() if span.name == "request"]
    # Six standard deviations.
    assert 20 <= len(roots) <= 100


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {ENDPOINT: ""},
        {ENDPOINT: "http://c:4317", "OTEL_SDK_DISABLED": " True "},
        {ENDPOINT: "http://c:4317", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_traced_unless_a_collector_is_named(environment):
    assert make_request_traces(environment, "router-1", Clock()) is None


def test_a_protocol_that_the_router_cannot_send_is_refused_by_name(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setattr("sys.argv", ["sluice_router", "--model", str(tmp_path), "--engines", "file:engines.json"])
    assert program.main() == 2
    message = "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/protobuf'; the router sends traces by 'grpc' only"
    assert message in capsys.readouterr().err


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    async def Export(self, request, context):  # noqa: N802 - gRPC's name
        for group in request.resource_spans:
            for scope in group.scope_spans:
                self.spans += [(span.trace_id.hex(), span.name) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def count(self, trace_id: str, name: str) -> int:
        return self.spans.count((trace_id, name))


async def test_a_router_sends_traces_of_http_and_grpc_calls_to_the_collector(tmp_path, monkeypatch):
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{port}")
    other_id = TRACE_ID[::-1]
    async with serving_ready(tmp_path) as router:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        async with aiohttp.ClientSession(headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}) as session:
            answer = await session.post(f"http://127.0.0.1:{router.ports['http']}/v1/completions", json=body)
            assert answer.status == 200
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.ports['grpc']}") as channel:
            sampling = sampling_pb2.SamplingParams(max_tokens=4, ignore_eos=True)
            call = router_pb2_grpc.RouterStub(channel).Generate(
                router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(values=[1, 2, 3]), sampling=sampling),
                metadata=(("traceparent", f"00-{other_id}-{PARENT_ID}-01"),),
            )
            assert [delta async for delta in call]
    gc.unfreeze()
    # What was left was sent before the router ended.
    for trace_id in (TRACE_ID, other_id):
        assert [collector.count(trace_id, name) for name in ("request", "admission", "queue", "prefill")] == [1] * 4
        assert collector.count(trace_id, "decode") >= 1
    await server.stop(0)


async def test_a_router_ends_although_no_collector_answers(tmp_path, monkeypatch):
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    async with serving_ready(tmp_path) as router:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            answer = await session.post(f"http://127.0.0.1:{router.ports['http']}/v1/completions", json=body)
            assert answer.status == 200
        await until(lambda: not router.router.state.requests.live)
    gc.unfreeze()
    assert asyncio.get_running_loop().is_running()
