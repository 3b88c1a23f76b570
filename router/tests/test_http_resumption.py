"""Streams that clients go on with: the ids of their events, what follows each of them, and who may ask for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from edge_fakes import ANSWER, LENGTH, STOP, FakePlane
from examples import resumable_client
from http_requests_harness import make_chat, make_completion

from sluice_router.api.http.http_api import HttpApi, HttpSettings
from sluice_router.errors import NoEngineError, ShuttingDownError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESUMABLE = {"x-sluice-resumable": "true", "x-request-id": "mine"}
USAGE = {"stream_options": {"include_usage": True}}


@dataclass
class Events:
    """What a client has got of a stream."""

    ids: list[str] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False

    def take(self, lines: list[str]) -> None:
        event_id = ""
        for line in lines:
            if line.startswith("id: "):
                event_id = line[4:]
            elif line == "data: [DONE]":
                self.is_done = True
            elif line.startswith("data: "):
                self.ids.append(event_id)
                self.chunks.append(json.loads(line[6:]))
                event_id = ""

    def behind(self, number: int) -> Events:
        return Events(self.ids[number:], self.chunks[number:], self.is_done)

    def sum(self) -> dict[str, Any]:
        """Adds up what the chunks bring, however they are cut."""
        choices = [chunk["choices"][0] for chunk in self.chunks if chunk["choices"]]
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        return {
            "text": "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices),
            "roles": [choice["delta"]["role"] for choice in choices if choice.get("delta", {}).get("role")],
            "tokens": [token for choice in choices for token in choice.get("token_ids", ())],
            "prompts": [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice],
            "offsets": [offset for item in logprobs for offset in item.get("text_offset", ())],
            "logprobs": [entry for item in logprobs for entry in item.get("content") or item.get("token_logprobs", ())],
            "ends": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            "usages": [chunk["usage"]["completion_tokens"] for chunk in self.chunks if chunk.get("usage")],
            "ids": {chunk["id"] for chunk in self.chunks},
            "is_done": self.is_done,
        }


@contextlib.asynccontextmanager
async def serving_two(text):
    """Two routers before the same engines."""
    first, second = FakePlane(), FakePlane()
    second.resumable = first.resumable
    apis = [HttpApi(plane, text) for plane in (first, second)]
    ports = [await api.start("127.0.0.1", 0) for api in apis]
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            yield client, first, second, [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for api in apis:
            await api.close(0.1)


async def post(client, url, body, **headers):
    return await client.post(url, json=body, headers={**RESUMABLE, **headers})


async def emit_when_asked(plane: FakePlane, tokens: list[int]) -> None:
    await plane.wait(lambda: bool(plane.live))
    plane.emit(next(iter(plane.live)), tokens)


async def read_and_leave(client, plane, url, tokens, body) -> tuple[Events, dict[str, str]]:
    """Reads a stream until these tokens have come, and breaks the connection; returns what the client then sends."""
    task = asyncio.create_task(emit_when_asked(plane, tokens))
    events, lines = Events(), []
    async with client.stream("POST", url, json={**body, "stream": True}, headers=RESUMABLE) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if f"id: {len(tokens)}" in lines and not line:
                break
    await task
    events.take(lines)
    return events, {"x-sluice-resume": response.headers["x-sluice-resume"], "Last-Event-ID": events.ids[-1]}


BODIES = {
    "completion": (COMPLETION, make_completion(max_tokens=99, **USAGE)),
    "completion with tokens": (COMPLETION, make_completion(max_tokens=99, logprobs=2, return_token_ids=True, **USAGE)),
    "chat": (CHAT, make_chat(max_tokens=99)),
    "chat with logprobs": (CHAT, make_chat(max_tokens=99, logprobs=True, top_logprobs=1, **USAGE)),
    "stop string": (COMPLETION, make_completion(max_tokens=99, stop=["the end"], **USAGE)),
    "held back to the end": (COMPLETION, make_completion(max_tokens=99, stop=["the end!"], **USAGE)),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_each_event_is_followed_by_the_rest_of_the_answer(text, kind):
    path, body = BODIES[kind]
    tokens = text.encode_now(ANSWER, add_special_tokens=False)
    async with serving_two(text) as (client, first, _, urls):
        first.script = lambda _: tokens
        response = await post(client, urls[0] + path, {**body, "stream": True})
        whole = Events()
        whole.take(response.text.splitlines())
        assert whole.is_done
        assert len(whole.chunks) > 8
        numbers = [int(event_id.partition("-")[0]) for event_id in whole.ids]
        assert numbers == sorted(numbers)
        assert len(set(whole.ids)) == len(whole.ids)
        sent = {"x-sluice-resume": response.headers["x-sluice-resume"]}
        for number in range(len(whole.ids) + 1):
            last = {"Last-Event-ID": whole.ids[number - 1]} if number else {}
            response = await post(client, urls[1] + path, {}, **sent, **last)
            assert response.status_code == 200, response.text
            rest = Events()
            rest.take(response.text.splitlines())
            expected = whole.behind(number).sum()
            assert {**rest.sum(), "ids": expected["ids"] if not rest.chunks else rest.sum()["ids"]} == expected


@pytest.mark.parametrize("survivor", [0, 1], ids=["same router", "another router"])
async def test_a_stream_goes_on_where_its_connection_broke(text, survivor):
    tokens = text.encode_now(ANSWER, add_special_tokens=False)
    async with serving_two(text) as (client, first, second, urls):
        body = make_completion(max_tokens=99, return_token_ids=True)
        events, sent = await read_and_leave(client, first, urls[0] + COMPLETION, tokens[:3], body)
        await first.wait(lambda: bool(first.detached))
        # What comes meanwhile is not lost.
        [request_id] = first.live
        first.emit(request_id, tokens[3:6])
        plane = (first, second)[survivor]
        task = asyncio.create_task(post(client, urls[survivor] + COMPLETION, body, **sent))
        await plane.wait(lambda: bool(plane.adopted))
        plane.emit(request_id, tokens[6:])
        plane.finish(request_id, LENGTH)
        events.take((await task).text.splitlines())
        assert events.sum()["tokens"] == tokens
        assert events.sum()["text"] == ANSWER
        assert events.is_done
        assert first.cancelled == second.cancelled == []


async def test_the_client_that_still_reads_hears_that_another_has_taken_its_place(text):
    tokens = text.encode_now(ANSWER, add_special_tokens=False)
    async with serving_two(text) as (client, first, second, urls):
        task = asyncio.create_task(emit_when_asked(first, tokens[:2]))
        stream = client.stream("POST", urls[0] + CHAT, json=make_chat(stream=True), headers=RESUMABLE)
        async with stream as response:
            await task
            capability = response.headers["x-sluice-resume"]
            last = {"x-sluice-resume": capability, "Last-Event-ID": "1"}
            other = asyncio.create_task(post(client, urls[1] + CHAT, {}, **last))
            lines = [line async for line in response.aiter_lines()]
        await second.wait(lambda: bool(second.live))
        second.finish(next(iter(second.live)), STOP)
        await other
    assert any('"taken_over"' in line for line in lines)
    assert first.detached == []
    assert first.cancelled == []


async def test_a_client_that_leaves_before_the_head_cannot_come_back(text):
    async with serving_two(text) as (client, first, _, urls):
        task = asyncio.create_task(post(client, urls[0] + CHAT, make_chat(stream=True)))
        await first.wait(lambda: bool(first.live))
        task.cancel()
        await first.wait(lambda: bool(first.cancelled))
        assert first.detached == []


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"x-sluice-resume": "a" * 32}, 404, "unknown_stream"),
        ({"x-request-id": "another"}, 404, "unknown_stream"),
        ({"x-sluice-resume": "short"}, 400, "invalid_value"),
        ({"Last-Event-ID": "x"}, 400, "invalid_value"),
        ({"Last-Event-ID": "9999"}, 404, "unknown_stream"),
    ],
    ids=["wrong capability", "another request", "no capability", "no id", "more than there is"],
)
async def test_what_cannot_be_resumed_is_refused(text, change, status, code):
    async with serving_two(text) as (client, first, _, urls):
        first.script = lambda _: text.encode_now(ANSWER, add_special_tokens=False)
        response = await post(client, urls[0] + CHAT, make_chat(stream=True))
        sent = {"x-sluice-resume": response.headers["x-sluice-resume"], "Last-Event-ID": "3", **change}
        response = await post(client, urls[1] + CHAT, {}, **sent)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_a_stream_goes_on_at_its_own_endpoint_alone(text):
    async with serving_two(text) as (client, first, _, urls):
        first.script = lambda _: text.encode_now(ANSWER, add_special_tokens=False)
        response = await post(client, urls[0] + CHAT, make_chat(stream=True))
        sent = {"x-sluice-resume": response.headers["x-sluice-resume"]}
        response = await post(client, urls[0] + COMPLETION, {}, **sent)
        assert response.status_code == 400
        assert "began as chat" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "value", "reason"),
    [
        ({}, "true", "stream is not true"),
        ({"stream": True, "n": 2}, "true", "one choice"),
        ({"stream": True}, "yes", "true or false"),
        ({"stream": True, "stop": [f"{index:02}" + "ü" * 998 for index in range(16)]}, "true", "stop strings"),
    ],
)
async def test_what_no_client_could_resume_is_refused_when_it_is_asked_for(text, fields, value, reason):
    async with serving_two(text) as (client, first, _, urls):
        response = await post(client, urls[0] + CHAT, make_chat(**fields), **{"x-sluice-resumable": value})
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]
        assert first.admitted == []


@pytest.mark.parametrize("value", [None, "false"])
async def test_other_streams_have_neither_ids_nor_a_capability(text, value):
    async with serving_two(text) as (client, first, _, urls):
        first.script = lambda _: text.encode_now(ANSWER, add_special_tokens=False)
        headers = {} if value is None else {"x-sluice-resumable": value}
        response = await client.post(urls[0] + CHAT, json=make_chat(stream=True), headers=headers)
        assert "x-sluice-resume" not in response.headers
        assert "id: " not in response.text
        assert first.admitted[0].resume_key == b""


async def test_a_router_that_cannot_go_on_leaves_the_answer_alone(text):
    async with serving_two(text) as (client, first, second, urls):
        body = make_completion(max_tokens=99)
        _, sent = await read_and_leave(client, first, urls[0] + COMPLETION, [5, 6], body)
        second.refusal = ShuttingDownError("leaving", retry_after_s=1.0)
        response = await post(client, urls[1] + COMPLETION, body, **sent)
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert second.cancelled == []


async def test_the_client_asks_the_next_router_and_waits_for_one(text):
    tokens = text.encode_now(ANSWER, add_special_tokens=False)
    async with serving_two(text) as (client, first, second, urls):
        first.script = lambda _: tokens
        second.refusal = NoEngineError("none", retry_after_s=0.01)
        progress = resumable_client.Progress()
        order = ["http://127.0.0.1:9", urls[1], urls[0]]
        chunks = resumable_client.stream(client, order, CHAT, make_chat(max_tokens=99), progress=progress)
        texts = [chunk["choices"][0]["delta"].get("content", "") async for chunk in chunks]
        assert "".join(texts) == ANSWER
        assert progress.num_resumed == 0
        assert progress.last_event_id.endswith("-finish")


async def test_the_client_says_why_an_answer_is_lost(text):
    async with serving_two(text) as (client, first, _, urls):
        progress = resumable_client.Progress(capability="a" * 32, last_event_id="3")
        chunks = resumable_client.stream(client, urls, CHAT, make_chat(), progress=progress)
        with pytest.raises(resumable_client.StreamError) as caught:
            await anext(chunks)
        assert caught.value.code == "unknown_stream"
        assert first.admitted == []


async def test_the_client_goes_on_when_its_router_leaves(text):
    tokens = text.encode_now(ANSWER, add_special_tokens=False)
    async with serving_two(text) as (client, first, second, urls):
        body, texts, has_begun = make_chat(max_tokens=99), [], asyncio.Event()

        async def read() -> None:
            async for chunk in resumable_client.stream(client, urls, CHAT, body):
                texts.append(chunk["choices"][0]["delta"].get("content", ""))
                has_begun.set()

        task = asyncio.create_task(read())
        await emit_when_asked(first, tokens[:4])
        [request_id] = first.live
        await has_begun.wait()
        first.fail(request_id, ShuttingDownError("leaving", retry_after_s=1.0))
        await second.wait(lambda: bool(second.adopted))
        second.emit(request_id, tokens[4:])
        second.finish(request_id, LENGTH)
        await task
        assert "".join(texts) == ANSWER


async def test_the_client_sends_its_request_again_where_nothing_of_the_answer_came(text):
    async with serving_two(text) as (client, first, second, urls):
        first.script = second.script = lambda _: text.encode_now(ANSWER, add_special_tokens=False)
        progress = resumable_client.Progress(capability="a" * 32)
        chunks = resumable_client.stream(client, urls, CHAT, make_chat(max_tokens=99), progress=progress)
        texts = [chunk["choices"][0]["delta"].get("content", "") async for chunk in chunks]
        assert "".join(texts) == ANSWER
        assert (len(first.admitted), len(second.admitted)) == (0, 1)


async def test_a_client_that_comes_back_may_go_again_before_there_is_anything_new(text):
    tokens = text.encode_now(ANSWER, add_special_tokens=False)
    async with serving_two(text) as (client, first, second, urls):
        body = make_completion(max_tokens=99)
        _, sent = await read_and_leave(client, first, urls[0] + COMPLETION, tokens[:3], body)
        [request_id] = first.live
        task = asyncio.create_task(post(client, urls[1] + COMPLETION, {}, **sent))
        await second.wait(lambda: bool(second.adopted))
        task.cancel()
        await second.wait(lambda: bool(second.detached))
        assert (second.detached, second.cancelled) == ([request_id], [])


async def test_a_body_may_come_once_more_and_be_as_large_as_any(text):
    api = HttpApi(FakePlane(), text, HttpSettings(max_body_bytes=100))
    url = f"http://127.0.0.1:{await api.start('127.0.0.1', 0)}{COMPLETION}"
    headers = {"x-sluice-resume": "a" * 32, "x-request-id": "mine"}
    async with httpx.AsyncClient(trust_env=False) as client:
        answers = [await client.post(url, content=b"x" * size, headers=headers) for size in (0, 100, 101)]
    await api.close(0)
    assert [answer.json()["error"]["code"] for answer in answers] == [
        "unknown_stream",
        "unknown_stream",
        "body_too_large",
    ]
