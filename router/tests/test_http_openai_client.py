"""The official client against the edge."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
from edge_fakes import ANSWER

from sluice.v1 import engine_pb2
from sluice_router.api.http.http_api import HttpApi
from sluice_router.errors import EngineFaultError, NoEngineError, SloInfeasibleError


@pytest.fixture
async def port(plane, text):
    api = HttpApi(plane, text)
    yield await api.start("127.0.0.1", 0)
    await api.close(0.1)


@pytest.fixture
async def client(port):
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0) as made:
        yield made


async def test_completion_streams_every_character_once(client, plane):
    stream = await client.completions.create(model="tiny", prompt="hi", max_tokens=100, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len(chunks) > 5
    assert all(chunk.usage is None for chunk in chunks)


async def test_completion_whole(client):
    answer = await client.completions.create(model="tiny", prompt="hi", max_tokens=100)
    assert answer.choices[0].text == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 5
    assert answer.usage.model_extra["hand_offs"] == 1


async def test_chat_streams_with_usage(client, plane, text):
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(plane.admitted[0].prompt_token_ids) == text.encode_now(prompt, add_special_tokens=False)


async def test_chat_whole(client):
    answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"


async def test_length_limit_is_the_finish_reason(client):
    answer = await client.completions.create(model="tiny", prompt="hi", max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


async def test_stop_string_cuts_and_counts(client, plane):
    answer = await client.completions.create(model="tiny", prompt="hi", max_tokens=100, stop=["grü", "zzz"])
    assert answer.choices[0].text == "hello world, "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == "grü"
    assert answer.usage.completion_tokens < 20


async def test_stop_string_cuts_a_stream(client):
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stop=" the", stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello world, grüße 中文 🎉"


async def test_models(client):
    models = await client.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_completion_logprobs(client, text):
    answer = await client.completions.create(model="tiny", prompt="hi", max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:index])) for index in range(4)]
    assert len(logprobs.top_logprobs[0]) == 2


@pytest.mark.parametrize("stop", [None, "world;", "the end;"], ids=["no-stop", "held-back", "held-back-at-end"])
async def test_completion_logprobs_stream_equals_whole(client, stop):
    asked = {"model": "tiny", "prompt": "hi", "max_tokens": 100, "logprobs": 2, "stop": stop}
    whole = (await client.completions.create(**asked)).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs async for chunk in await client.completions.create(**asked, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for chunk in chunks for value in getattr(chunk, name)] == getattr(whole, name), name
    assert len(whole.tokens) > 20


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
async def test_impossible_tokens_have_the_least_logprob_that_json_can_say(client, plane, text, is_chat):
    plane.script = None
    if is_chat:
        messages = [{"role": "user", "content": "hi"}]
        asking = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=1)
    else:
        asking = client.completions.create(model="tiny", prompt="hi", logprobs=1)
    answer = asyncio.create_task(asking)
    await plane.wait(lambda: bool(plane.live))
    token_id, other_id = text.encode_now("xy", add_special_tokens=False)
    impossible = engine_pb2.TokenLogprobs(logprob=-math.inf, top_token_ids=[other_id], top_logprobs=[-math.inf])
    plane.emit("req-1", [token_id], logprobs=[impossible])
    plane.finish("req-1")
    logprobs = (await answer).choices[0].logprobs
    if is_chat:
        (entry,) = logprobs.content
        assert (entry.logprob, entry.top_logprobs[0].logprob) == (-9999.0, -9999.0)
    else:
        assert logprobs.token_logprobs == [-9999.0]
        assert logprobs.top_logprobs == [{"x": -9999.0, "y": -9999.0}]


async def test_chat_logprobs_stream_equals_whole(client):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert bytes(b for entry in streamed[:-1] for b in entry.bytes).decode() == ANSWER
    assert [len(entry.top_logprobs) for entry in streamed] == [3] * len(streamed)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        pytest.param(SloInfeasibleError("too late", retry_after_s=1.2), openai.RateLimitError, 429, id="infeasible"),
        pytest.param(NoEngineError("none", retry_after_s=3), openai.InternalServerError, 503, id="no-engine"),
        pytest.param(EngineFaultError("broken"), openai.InternalServerError, 500, id="fault"),
    ],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_failure_before_the_first_byte_has_a_status(client, plane, error, kind, status, stream):
    plane.refusal = error
    with pytest.raises(kind) as caught:
        await client.completions.create(model="tiny", prompt="hi", stream=stream)
    assert caught.value.status_code == status
    assert caught.value.response.headers["x-sluice-reason"] == error.code
    assert caught.value.body["code"] == error.code


async def test_failure_after_the_first_byte_is_an_event(client, plane):
    plane.script = None
    stream = await _start(client, plane)
    plane.fail("req-1", EngineFaultError("engines failed"))
    with pytest.raises(openai.APIError, match="engines failed"):
        [chunk async for chunk in stream]


async def _start(client, plane):
    task = asyncio.create_task(client.completions.create(model="tiny", prompt="hi", stream=True))
    await plane.wait(lambda: bool(plane.live))
    plane.emit("req-1", [100])
    return await task
