"""Answers over HTTP: headers, usage, ids, pages and errors."""

from __future__ import annotations

from urllib.parse import quote

import harness_faults
import httpx
import pytest
from edge_fakes import FakePlane, say
from http_requests_harness import make_chat, make_completion, serving_client

from sluice_router.errors import NoEngineError, ShuttingDownError
from sluice_router.scheduling.requests import ServedModel
from sluice_router.security.access_control import ClientAccess


@pytest.fixture
async def plane(text):
    return FakePlane(say(text, "hello world"))


@pytest.fixture
async def client(plane, text):
    async with serving_client(plane, text) as made:
        yield made


async def test_stream_has_its_headers(client):
    response = await client.post("/v1/completions", json=make_completion(stream=True, user="me"))
    names = ("content-type", "cache-control", "x-sluice-ignored", "server")
    assert [response.headers[name] for name in names] == [
        "text/event-stream; charset=utf-8",
        "no-cache",
        "user",
        "sluice",
    ]


async def test_usage_tells_how_the_request_was_served(client):
    usage = (await client.post("/v1/completions", json=make_completion(prompt=[5, 6, 7], max_tokens=2))).json()["usage"]
    assert usage == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
        "ttft_ms": 12.5,
        "tpot_ms": 5.0,
        "hand_offs": 1,
        "recoveries": 2,
        "slo_met": True,
    }


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_request_id_is_echoed_or_given(client, plane, stream):
    given = await client.post("/v1/completions", json=make_completion(stream=stream), headers={"x-request-id": "mine"})
    made = await client.post("/v1/completions", json=make_completion(stream=stream))
    assert given.headers["x-request-id"] == "mine"
    assert made.headers["x-request-id"] == "req-2"
    assert plane.admitted[0].client_request_id == "mine"
    assert plane.admitted[1].request_id == "req-2"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("mine", "mine"), (None, "req-1"), ("r" * 129, "req-1"), ("a\tb", "req-1")],
    ids=["given", "none", "too-long", "not-printable"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/debug/requests/none"])
async def test_refusals_carry_an_id(client, plane, path, given, shown):
    headers = {} if given is None else {"x-request-id": given}
    method = "GET" if path.startswith("/debug") else "POST"
    refused = await client.request(method, path, json={"prompt": 7}, headers=headers)
    assert refused.status_code >= 400
    assert refused.headers["x-request-id"] == shown


async def test_refusal_of_the_data_plane_carries_an_id(client, plane):
    plane.refusal = NoEngineError("no engine", retry_after_s=1)
    assert (await client.post("/v1/completions", json=make_completion())).headers["x-request-id"] == "req-1"


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [("/v1/completions", make_completion(), "cmpl-"), ("/v1/chat/completions", make_chat(), "chatcmpl-")],
    ids=["completion", "chat"],
)
async def test_id_of_an_answer_is_explained(client, plane, path, body, prefix):
    answer_id = (await client.post(path, json=body, headers={"x-request-id": "mine"})).json()["id"]
    assert answer_id == prefix + plane.admitted[0].request_id
    plane.stories[plane.admitted[0].request_id] = {"events": ["one"]}
    assert (await client.get(f"/debug/requests/{answer_id}")).json() == {"events": ["one"]}
    plane.stories[answer_id] = {"events": ["a client's own id"]}
    assert (await client.get(f"/debug/requests/{answer_id}")).json() == {"events": ["a client's own id"]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(client, plane, text, path):
    limit = 512 * text.max_token_characters
    field = "prompt" if path == "/v1/completions" else "messages"
    bodies = {
        size: make_completion(prompt="." * size)
        if field == "prompt"
        else make_chat(messages=[{"role": "user", "content": "." * size}])
        for size in (513, limit + 1)
    }
    tokenized = "sluice_tokenize_seconds_count {}"
    for size, num_tokenized in ((limit + 1, "0.0"), (513, "1.0")):
        response = await client.post(path, json=bodies[size])
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
        assert "512 tokens" in error["message"]
        assert (f"no more than {limit} can fit" in error["message"]) == (size > limit)
        assert tokenized.format(num_tokenized) in (await client.get("/metrics")).text
    assert not plane.admitted


async def test_unknown_model(client):
    response = await client.post("/v1/completions", json=make_completion(model="gpt-7"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "tiny" in response.json()["error"]["message"]


async def test_retry_after_is_rounded_up(client, plane):
    plane.refusal = NoEngineError("no engine", retry_after_s=1.01)
    response = await client.post("/v1/completions", json=make_completion())
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    plane.refusal = ShuttingDownError("leaving")
    response = await client.post("/v1/completions", json=make_completion())
    assert response.json()["error"]["code"] == response.headers["x-sluice-reason"] == "draining"
    assert "retry-after" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("PUT", "/livez", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "unsupported_endpoint"),
        ("POST", "/v1/responses", 404, "unsupported_endpoint"),
        ("GET", "/", 404, "unsupported_endpoint"),
        ("POST", "/v1/completions/", 404, "unsupported_endpoint"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other%2Fmodel", 404, "model_not_found"),
        ("GET", "/debug/requests/none", 404, "unknown_request"),
    ],
)
async def test_other_paths_and_methods(client, method, path, status, code):
    response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers["x-sluice-reason"] == code
    allowed = "POST" if path == "/v1/completions" else "GET, HEAD"
    assert response.headers.get("allow") == (allowed if status == 405 else None)


async def test_pages(client, plane):
    assert (await client.get("/version")).json()["version"]
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 512
    plane.model = ServedModel(name="tiny", max_model_len_tokens=99, created_s=7)
    shown = {"id": "tiny", "object": "model", "created": 7, "owned_by": "sluice", "max_model_len": 99}
    assert (await client.get("/v1/models/tiny")).json() == shown
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": [shown]}
    plane.stories["req-9"] = {"events": []}
    assert (await client.get("/debug/requests/req-9")).json() == {"events": []}
    for path in ("/health", "/readyz"):
        plane.not_ready_reason = ""
        assert (await client.get(path)).status_code == 200
        assert (await client.head(path)).status_code == 200
        plane.not_ready_reason = "no plan"
        response = await client.get(path)
        assert (response.status_code, response.json()["reason"]) == (503, "no plan")


@pytest.mark.parametrize("request_id", ["a?b", "../../version", "a%2Fb", "a/b", "a#b", "a b"])
async def test_any_id_is_explained(client, plane, request_id):
    plane.stories[request_id] = {"events": [request_id]}
    url = httpx.URL(f"{client.base_url}/debug/requests/{quote(request_id, safe='')}")
    assert (await client.get(url)).json() == {"events": [request_id]}


async def test_metrics_count_answers_by_status_and_reason(client, plane):
    await client.post("/v1/completions", json=make_completion())
    await client.post("/v1/completions", json=make_completion(temperature=9))
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'sluice_answers_total{protocol="http",reason="",status="200"} 1.0' in response.text
    assert 'sluice_answers_total{protocol="http",reason="invalid_value",status="400"} 1.0' in response.text
    assert "sluice_tokenize_seconds_count 1.0" in response.text


async def test_no_plan_yet_is_not_an_unknown_model(client, plane):
    plane.model = ServedModel(name="", max_model_len_tokens=0, created_s=0)
    plane.refusal = NoEngineError("no plan is in force", retry_after_s=1)
    assert (await client.post("/v1/completions", json=make_completion())).status_code == 503
    assert (await client.get("/v1/models")).json()["data"] == []


async def test_our_own_fault_is_an_answer_too(plane, text):
    plane.refusal = ZeroDivisionError("a bug")
    page = "https://chat.example.com"
    async with serving_client(plane, text, ClientAccess(origins=frozenset({page}))) as client:
        response = await client.post("/v1/completions", json=make_completion(), headers={"Origin": page})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert response.headers["access-control-allow-origin"] == page
    assert "a bug" not in response.text
    # What the client can tell is what the log says.
    shown = response.headers["x-request-id"]
    assert shown == "req-1"
    assert [f"request {shown}" in fault and "ZeroDivisionError: a bug" in fault for fault in harness_faults.take()] == [
        True
    ]
