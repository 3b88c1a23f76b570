"""Whole exchanges over HTTP: answers of every form, refusals, and what reached the data plane, as they were recorded.

``http_exchanges.txt`` has them in words. After a change of behaviour that is wanted, write it anew, and read the
difference before it is committed:

    SLUICE_WRITE_RECORDS=1 .venv/bin/python -m pytest -n0 router/tests/test_http_exchanges.py
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

from edge_fakes import FakePlane, say
from http_requests_harness import make_chat, make_completion, serving_client

from sluice_router.errors import (
    DeadlineError,
    EngineFaultError,
    InvalidRequestError,
    NoEngineError,
    NotAllowedError,
    QueueFullError,
    ShuttingDownError,
    SloInfeasibleError,
)

RECORD = Path(__file__).with_name("http_exchanges.txt")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

C, H = "/v1/completions", "/v1/chat/completions"
Exchange = tuple[str, dict[str, Any]]
ASKED: dict[str, Exchange] = {
    "completion": (C, make_completion()),
    "completion of tokens": (C, make_completion(prompt=[5, 6, 7])),
    "two prompts": (C, make_completion(prompt=["hi", "hello"])),
    "two lists of tokens": (C, make_completion(prompt=[[5, 6], [7]])),
    "echo": (C, make_completion(echo=True)),
    "two choices": (C, make_completion(n=2, seed=5)),
    "logprobs": (C, make_completion(logprobs=2)),
    "logprobs 0": (C, make_completion(logprobs=0)),
    "token ids": (C, make_completion(return_token_ids=True)),
    "stop": (C, make_completion(stop="wor")),
    "stops": (C, make_completion(stop=["never", "lo w"], include_stop_str_in_output=True)),
    "one token": (C, make_completion(max_tokens=1)),
    "no end": (C, make_completion(ignore_eos=True, max_tokens=3, min_tokens=2)),
    "sampling": (
        C,
        make_completion(
            temperature=0.3,
            top_p=0.5,
            top_k=7,
            min_p=0.1,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            repetition_penalty=1.3,
            logit_bias={"5": 1.5},
            seed=9,
            stop_token_ids=[8, 9],
            skip_special_tokens=False,
            allowed_token_ids=[5, 6, 7],
            bad_words=["no"],
        ),
    ),
    "user and unknown fields": (C, make_completion(user="u", store=True, best_of=1, suffix=None, metadata={})),
    "objectives": (
        C,
        make_completion(sluice={"slo_tpot_ms": 80, "slo_ttft_ms": 7, "slo_class": "batch", "priority": 1}),
    ),
    "priority": (C, make_completion(priority=3)),
    "salt": (C, make_completion(cache_salt="salt")),
    "stream": (C, make_completion(**STREAM)),
    "stream with usage": (C, make_completion(**USAGE)),
    "stream with usage in each": (
        C,
        make_completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    ),
    "stream of two choices": (C, make_completion(n=2, **USAGE)),
    "stream with echo": (C, make_completion(echo=True, **STREAM)),
    "stream with logprobs and ids": (C, make_completion(logprobs=1, return_token_ids=True, **STREAM)),
    "stream with stop": (C, make_completion(stop="wor", **STREAM)),
    "chat": (H, make_chat()),
    "chat with system": (
        H,
        make_chat(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]),
    ),
    "chat of parts": (H, make_chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}])),
    "chat with max_completion_tokens": (H, make_chat(max_completion_tokens=2)),
    "chat with both limits": (H, make_chat(max_completion_tokens=2, max_tokens=4)),
    "chat with logprobs": (H, make_chat(logprobs=True, top_logprobs=2)),
    "chat of two": (H, make_chat(n=2)),
    "chat stream": (H, make_chat(**USAGE)),
    "chat stream with logprobs": (H, make_chat(logprobs=True, **STREAM)),
    "chat stream of two": (H, make_chat(n=2, **STREAM)),
    "chat goes on": (
        H,
        make_chat(
            messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}],
            continue_final_message=True,
            add_generation_prompt=False,
        ),
    ),
    "chat with a schema": (
        H,
        make_chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    ),
    "chat with an object": (H, make_chat(response_format={"type": "json_object"})),
    "chat with plain text": (H, make_chat(response_format={"type": "text"})),
    "choice": (C, make_completion(structured_outputs={"choice": ["a", "b"]})),
    "regex": (C, make_completion(structured_outputs={"regex": "[0-9]+"})),
    # Refused
    "no model": (C, {"prompt": "hi"}),
    "another model": (C, make_completion(model="other")),
    "no prompt": (C, {"model": "tiny"}),
    "empty prompt": (C, make_completion(prompt="")),
    "prompt of nothing": (C, make_completion(prompt=[])),
    "prompt of another type": (C, make_completion(prompt={"a": 1})),
    "too many choices": (C, make_completion(n=1000)),
    "no choice": (C, make_completion(n=0)),
    "temperature": (C, make_completion(temperature=-1)),
    "top_p": (C, make_completion(top_p=2)),
    "max_tokens": (C, make_completion(max_tokens=0)),
    "max_tokens of text": (C, make_completion(max_tokens="many")),
    "longer than the model": (C, make_completion(max_tokens=5000)),
    "prompt longer than the model": (C, make_completion(prompt=" hello" * 600)),
    "logprobs of too many": (C, make_completion(logprobs=1000)),
    "top_logprobs alone": (H, make_chat(top_logprobs=2)),
    "unknown token": (C, make_completion(prompt=[10**6])),
    "too many stops": (C, make_completion(stop=["a"] * 40)),
    "empty stop": (C, make_completion(stop="")),
    "unknown bias": (C, make_completion(logit_bias={"1000000": 1})),
    "bias of text": (C, make_completion(logit_bias={"x": 1})),
    "stream_options alone": (C, make_completion(stream_options={"include_usage": True})),
    "no messages": (H, make_chat(messages=[])),
    "a role": (H, make_chat(messages=[{"role": "king", "content": "hi"}])),
    "no content": (H, make_chat(messages=[{"role": "user"}])),
    "an image": (H, make_chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])),
    "tools": (H, make_chat(tools=TOOLS)),
    "a class": (C, make_completion(sluice={"slo_class": "gold"})),
    "an objective of 0": (C, make_completion(sluice={"slo_ttft_ms": 0})),
    "an unknown objective": (C, make_completion(sluice={"speed": 1})),
    "a format": (H, make_chat(response_format={"type": "xml"})),
    "two constraints": (C, make_completion(structured_outputs={"choice": ["a"], "regex": "b"})),
    "a broken regex": (C, make_completion(structured_outputs={"regex": "[0-"})),
    "a broken schema": (C, make_completion(structured_outputs={"json": '{"type": 5}'})),
}
HEADERS: dict[str, dict[str, str]] = {
    "request id": {"x-request-id": "mine-1"},
    "bad request id": {"x-request-id": "a b\tc"},
    "long request id": {"x-request-id": "x" * 300},
    "objectives": {"x-sluice-slo-ttft-ms": "5", "x-sluice-slo-tpot-ms": "6", "x-sluice-priority": "-2"},
    "bad objective": {"x-sluice-slo-ttft-ms": "fast"},
    "bad priority": {"x-sluice-priority": "1.5"},
    "deadline": {"x-request-timeout": "3"},
    "trace": {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
    "text": {"content-type": "text/plain"},
}
ERRORS = {
    error.code: error
    for error in (
        InvalidRequestError("the reason", param="prompt"),
        NotAllowedError("the reason", param="priority", code="priority_not_allowed"),
        QueueFullError("the reason", retry_after_s=2.2),
        NoEngineError("the reason", retry_after_s=0.4),
        SloInfeasibleError("the reason", retry_after_s=7.0),
        ShuttingDownError("the reason", retry_after_s=1.0),
        DeadlineError("the reason"),
        EngineFaultError("the reason"),
    )
}
# From Python 3.12 on, what the headers decide is answered before the body has come, and the connection closes.
ANSWERED_BY_HEADERS = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
PATHS = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/models/other"),
    ("GET", "/health"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("HEAD", "/health"),
    ("GET", "/nowhere"),
    ("POST", "/v1/models"),
    ("GET", "/v1/completions"),
    ("DELETE", "/v1/chat/completions"),
    ("OPTIONS", "/v1/completions"),
    ("GET", "/debug/requests/req-1"),
    ("GET", "/debug/requests/cmpl-req-1"),
    ("GET", "/debug/requests/" + "x" * 200),
    ("GET", "/v1/models/" + "y" * 200),
)


def describe(answer: Any) -> list[str]:
    """Writes an answer down without what changes from day to day."""
    headers = {name: value for name, value in sorted(answer.headers.items()) if name not in ("date", "server")}
    body = answer.text
    body = re.sub(r'"created": ?\d+', '"created":0', body)
    headers.pop("content-length", None)
    if answer.status_code in ANSWERED_BY_HEADERS:
        headers.pop("connection", None)
    return [f"  {answer.status_code} {headers}", *(f"  | {line}" for line in body.splitlines() if line)]


def describe_admitted(plane: FakePlane) -> list[str]:
    lines = []
    for request in plane.admitted:
        sampling = re.sub(r"\s+", " ", str(request.sampling)).strip()
        deadline_s = None if request.deadline_s is None else round(request.deadline_s - request.arrival_s, 3)
        lines.append(
            f"  -> {request.request_id} {list(request.prompt_token_ids)[:40]} {{{sampling}}} {request.slo_class!r}"
            f" {request.ttft_slo_s} {request.tpot_slo_s} {request.priority} {deadline_s} {request.client_request_id!r}"
            f" {request.owner!r} {request.cache_salt!r} {sorted(request.trace_headers or {})}"
        )
    plane.admitted.clear()
    plane.cancelled.clear()
    return lines


async def tell(text: Any) -> list[str]:
    """Carries all exchanges out; returns what came of them."""
    told: list[str] = []
    plane = FakePlane(say(text, "hello world"))
    plane.clock_s = 50.0
    plane.stories["req-1"] = {"request_id": "req-1", "events": []}
    async with serving_client(plane, text) as client:
        for name, (path, body) in ASKED.items():
            answer = await client.post(path, json=body)
            told += [f"{name}: POST {path}", *describe(answer), *describe_admitted(plane)]
        for name, headers in HEADERS.items():
            answer = await client.post(C, content=json.dumps(make_completion()), headers=headers)
            told += [f"header {name}", *describe(answer), *describe_admitted(plane)]
        packed = gzip.compress(json.dumps(make_completion()).encode())
        for name, content, encoding in (
            ("gzip", packed, "gzip"),
            ("no JSON", b"{", ""),
            ("a list", b"[]", ""),
            ("no UTF-8", b'{"model": "\xff"}', ""),
            ("too large", b" " * 20_001, ""),
        ):
            headers = {"content-encoding": encoding} if encoding else {}
            answer = await client.post(C, content=content, headers=headers)
            told += [f"body {name}", *describe(answer), *describe_admitted(plane)]
        pieces = [b'{"model": "ti', b'ny", "pro', b'mpt": "hi"}']

        async def send() -> Any:
            for piece in pieces:
                yield piece
                await asyncio.sleep(0.01)

        told += ["body in pieces", *describe(await client.post(C, content=send())), *describe_admitted(plane)]
        for method, path in PATHS:
            answer = await client.request(method, path)
            told += [f"{method} {path}", *describe(answer)]
        plane.not_ready_reason = "no plan yet"
        told += ["not ready", *describe(await client.get("/readyz"))]
        plane.not_ready_reason = ""
        for name, error in ERRORS.items():
            plane.refusal = error
            told += [f"refused {name}", *describe(await client.post(C, json=make_completion()))]
            plane.refusal = None
            for body in (make_completion(), make_completion(**STREAM)):
                plane.script = None
                told += [f"fails {name}, {body}", *await fail_under_way(client, plane, body, error)]
                plane.script = say(text, "hello world")
    return told


async def fail_under_way(client: Any, plane: FakePlane, body: dict[str, Any], error: Any) -> list[str]:
    """Sends a request that fails after its first token."""
    asking = asyncio.ensure_future(client.post(C, json=body))
    await plane.wait(lambda: bool(plane.live))
    (request_id,) = plane.live
    plane.emit(request_id, [7])
    plane.fail(request_id, error)
    lines = describe(await asking)
    plane.admitted.clear()
    return lines


async def test_exchanges_are_as_recorded(text) -> None:
    told = "\n".join(await tell(text)) + "\n"
    if "SLUICE_WRITE_RECORDS" in os.environ:
        RECORD.write_text(told)
    assert told == RECORD.read_text()
