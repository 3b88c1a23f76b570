"""Whole exchanges over gRPC, and answers to browsers, as they were recorded in ``grpc_exchanges.txt``.

After a change of behaviour that is wanted, write it anew, and read the difference before it is committed:

    SLUICE_WRITE_RECORDS=1 .venv/bin/python -m pytest -n0 router/tests/test_grpc_exchanges.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from edge_fakes import FakePlane, say
from google.protobuf import text_format

from sluice.v1 import router_pb2, router_pb2_grpc, sampling_pb2
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.grpc.grpc_api import GrpcApi
from sluice_router.api.http.http_api import format_ignored
from sluice_router.api.objectives import read_objectives
from sluice_router.api.openai_requests import FieldError
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.errors import (
    DeadlineError,
    EngineFaultError,
    NoEngineError,
    NotAllowedError,
    QueueFullError,
    ShuttingDownError,
    SloInfeasibleError,
)
from sluice_router.security.cors import CorsPolicy

RECORD = Path(__file__).with_name("grpc_exchanges.txt")
Ask, Sampling = router_pb2.GenerateRequest, sampling_pb2.SamplingParams
USER = router_pb2.ChatMessage(role="user", content="hi")

ASKED: dict[str, Ask] = {
    "text": Ask(text="hi"),
    "tokens": Ask(token_ids=router_pb2.TokenIds(values=[5, 6])),
    "messages": Ask(messages=router_pb2.ChatMessages(values=[USER])),
    "system": Ask(messages=router_pb2.ChatMessages(values=[router_pb2.ChatMessage(role="system", content="s"), USER])),
    "an id": Ask(text="hi", request_id="mine"),
    "a bad id": Ask(text="hi", request_id="a b\n"),
    "one token": Ask(text="hi", sampling=Sampling(max_tokens=1)),
    "stop": Ask(text="hi", stop=["wor"], include_stop_str_in_output=True),
    "logprobs": Ask(text="hi", sampling=Sampling(num_logprobs=2)),
    "another model": Ask(text="hi", model="other"),
    "sampling": Ask(text="hi", sampling=Sampling(temperature=0.5, top_p=0.5, top_k=3, seed=7, min_tokens=2)),
    "temperature 0": Ask(text="hi", sampling=Sampling(temperature=0.0)),
    "objectives": Ask(text="hi", ttft_slo_milliseconds=7, tpot_slo_milliseconds=8, slo_class="batch", priority=3),
    "nothing": Ask(),
    "empty text": Ask(text=""),
    "no tokens": Ask(token_ids=router_pb2.TokenIds()),
    "no messages": Ask(messages=router_pb2.ChatMessages()),
    "a role": Ask(messages=router_pb2.ChatMessages(values=[router_pb2.ChatMessage(role="king", content="x")])),
    "a class": Ask(text="hi", slo_class="gold"),
    "unknown token": Ask(token_ids=router_pb2.TokenIds(values=[10**6])),
    "long text": Ask(text=" hello" * 600),
    "very long text": Ask(text=" hello" * 60_000),
    "very long messages": Ask(
        messages=router_pb2.ChatMessages(values=[router_pb2.ChatMessage(role="user", content=" hello" * 60_000)])
    ),
    "too many tokens": Ask(text="hi", sampling=Sampling(max_tokens=5000)),
    "bad temperature": Ask(text="hi", sampling=Sampling(temperature=-1.0)),
    "bad top_p": Ask(text="hi", sampling=Sampling(top_p=2.0)),
    "regex": Ask(text="hi", sampling=Sampling(structured_output=sampling_pb2.StructuredOutput(regex="[0-9]+"))),
    "broken regex": Ask(text="hi", sampling=Sampling(structured_output=sampling_pb2.StructuredOutput(regex="[0-"))),
}
METADATA: dict[str, tuple[tuple[str, str], ...]] = {
    "objectives": (("x-sluice-slo-ttft-ms", "5"), ("x-sluice-priority", "2")),
    "bad objective": (("x-sluice-slo-ttft-ms", "fast"),),
    "trace": (("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"),),
}
ERRORS = (
    NotAllowedError("the reason", param="priority", code="priority_not_allowed"),
    QueueFullError("the reason", retry_after_s=2.2),
    NoEngineError("the reason", retry_after_s=0.4),
    SloInfeasibleError("the reason", retry_after_s=7.0),
    ShuttingDownError("the reason", retry_after_s=1.0),
    DeadlineError("the reason"),
    EngineFaultError("the reason"),
)


async def ask(router: Any, request: Ask, metadata: tuple[tuple[str, str], ...] = (), **options: Any) -> list[str]:
    lines = []
    call = router.Generate(request, metadata=metadata, **options)
    try:
        # How many tokens a message has is a matter of speed.
        whole, said = router_pb2.GenerateResponse(), ""
        async for delta in call:
            assert delta.first_output_index == (len(whole.token_ids) if delta.token_ids else delta.first_output_index)
            said += delta.text
            whole.MergeFrom(delta)
        whole.text = said
        whole.ClearField("first_output_index")
        lines.append(f"  {text_format.MessageToString(whole, as_one_line=True)}")
    except grpc.aio.AioRpcError as error:
        trailers = sorted((key, value) for key, value in error.trailing_metadata() or () if key != "date")
        lines.append(f"  {error.code().name} {error.details()} {trailers}")
    return lines


def describe_admitted(plane: FakePlane) -> list[str]:
    lines = []
    for request in plane.admitted:
        sampling = re.sub(r"\s+", " ", str(request.sampling)).strip()
        lines.append(
            f"  -> {request.request_id} {list(request.prompt_token_ids)[:40]} {{{sampling}}} {request.slo_class!r}"
            f" {request.ttft_slo_s} {request.tpot_slo_s} {request.priority} {request.deadline_s is not None}"
            f" {request.client_request_id!r} {request.owner!r} {sorted(request.trace_headers or {})}"
        )
    plane.admitted.clear()
    return lines


async def tell(text: Any) -> list[str]:
    """Carries all exchanges out; returns what came of them."""
    plane = FakePlane(say(text, "hello world"))
    metrics = EdgeMetrics(SlowReaders(SlowReaderLimits()))
    api = GrpcApi(plane, text, metrics)
    port = await api.start("127.0.0.1", 0)
    told: list[str] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        router = router_pb2_grpc.RouterStub(channel)
        for name, request in ASKED.items():
            told += [name, *await ask(router, request), *describe_admitted(plane)]
        for name, metadata in METADATA.items():
            told += [f"metadata {name}", *await ask(router, Ask(text="hi"), metadata), *describe_admitted(plane)]
        told += ["a deadline", *await ask(router, Ask(text="hi"), timeout=50), *describe_admitted(plane)]
        for error in ERRORS:
            plane.refusal = error
            told += [f"refused {error.code}", *await ask(router, Ask(text="hi"))]
        models = await router.ListModels(router_pb2.ListModelsRequest())
        told += ["models", f"  {text_format.MessageToString(models, as_one_line=True)}"]
        told += [f"answers {sorted(metrics.answers.items())}"]
    await api.close(0)
    return told


async def test_exchanges_are_as_recorded(text) -> None:
    told = "\n".join(await tell(text)) + "\n"
    if "SLUICE_WRITE_RECORDS" in os.environ:
        RECORD.write_text(told)
    assert told == RECORD.read_text()


PREFLIGHT = {"Origin": "https://a", "Access-Control-Request-Method": "POST"}


@pytest.mark.parametrize(
    ("origins", "method", "headers", "allowed"),
    [
        ({"https://a"}, "OPTIONS", PREFLIGHT, {"https://a"}),
        ({"*"}, "OPTIONS", PREFLIGHT, {"*"}),
        ({"https://b"}, "OPTIONS", PREFLIGHT, set()),
        (set(), "OPTIONS", PREFLIGHT, None),
        ({"*"}, "POST", PREFLIGHT, None),
        ({"*"}, "OPTIONS", {"Origin": "https://a"}, None),
        ({"*"}, "OPTIONS", {"Access-Control-Request-Method": "POST"}, None),
    ],
)
def test_browsers_that_ask_first_are_answered_without_content(origins, method, headers, allowed) -> None:
    answer = CorsPolicy(frozenset(origins)).answer_preflight(method, headers)
    if allowed is None:
        assert answer is None
        return
    assert answer is not None
    assert answer.status == 204
    assert ("Access-Control-Max-Age" in answer.headers) == bool(allowed)
    assert "Access-Control-Allow-Headers" not in answer.headers
    asked = {**headers, "Access-Control-Request-Headers": "x-mine, authorization"}
    again = CorsPolicy(frozenset(origins)).answer_preflight(method, asked)
    assert again is not None
    if allowed:
        assert again.headers["Access-Control-Allow-Headers"] == "x-mine, authorization"


def test_ignored_fields_are_named_as_far_as_a_header_may_hold_them() -> None:
    assert format_ignored([]) == {}
    assert format_ignored(["store", "a,b", "\u00fc\n", "z"]) == {"x-sluice-ignored": "store, a?b, ??, z"}
    assert len(format_ignored(["x" * 5000])["x-sluice-ignored"]) == len(
        format_ignored(["x" * 9000])["x-sluice-ignored"]
    )


@pytest.mark.parametrize("text", ["\u00b2", "\u0663", "1_0", " 7 x", "12345678901", "0", "--5", "", "-", "1.0"])
def test_objectives_are_numbers_that_everybody_reads_alike(text) -> None:
    with pytest.raises(FieldError, match="x-sluice-slo-ttft-ms: must be an integer from 1 to"):
        read_objectives({"x-sluice-slo-ttft-ms": text}, None)


def test_objectives_may_be_as_large_as_they_are_said_to_be() -> None:
    found = read_objectives({"x-sluice-slo-ttft-ms": "1", "x-sluice-priority": " -3 "}, None)
    assert (found.ttft_slo_s, found.priority) == (0.001, -3)
