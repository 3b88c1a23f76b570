"""The OpenAI-compatible API on real engines, with OpenAI's own client, and its answers to bad input."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from cluster import Cluster

pytestmark = pytest.mark.engine


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url()}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat_streams_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=20,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"


async def test_completions_with_logprobs_and_stop_strings(client: openai.AsyncOpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 32, "temperature": 0}
    whole = await client.completions.create(**arguments, logprobs=3, extra_body={"ignore_eos": True})
    text = whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 32
    stop = text[10:14]
    cut = await client.completions.create(**arguments, stop=[stop], extra_body={"ignore_eos": True})
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


# Random weights write white space without end wherever a schema allows it, so these constraints allow none.
CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json-schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"enum": [11, 22]}, "strict": True},
            }
        },
        lambda text: json.loads(text) in {11, 22},
    ),
    "regex": ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, lambda text: bool(re.fullmatch("[a-c]{3}-[0-9]{2}", text))),
    "choice": ({"guided_choice": ["left", "right"]}, lambda text: text in {"left", "right"}),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
async def test_constraints_hold(client: openai.AsyncOpenAI, name: str) -> None:
    constraint, holds = CONSTRAINTS[name]
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "answer"}],
        max_tokens=40,
        temperature=1,
        seed=3,
        extra_body=constraint,
    )
    text = answer.choices[0].message.content or ""
    assert holds(text), text


COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 4}

BAD_INPUTS: dict[str, tuple[dict[str, Any] | str, int, tuple[str, ...]]] = {
    "overlong-prompt": ({**COMPLETION, "prompt": [5] * 5000}, 400, ("5000", "4096")),
    "prompt-and-max-tokens": ({**COMPLETION, "prompt": [5] * 4000, "max_tokens": 200}, 400, ("4000", "200", "4096")),
    "bad-json": ("{", 400, ("JSON",)),
    "unknown-model": ({**COMPLETION, "model": "gpt-x"}, 404, ("gpt-x", "tiny")),
    "temperature": ({**COMPLETION, "temperature": 9}, 400, ("temperature", "9", "2")),
    "max-tokens": ({**COMPLETION, "max_tokens": 0}, 400, ("max_tokens", "0", "1")),
    "no-prompt": ({"model": "tiny"}, 400, ("prompt",)),
    "many-stops": ({**COMPLETION, "stop": ["a"] * 17}, 400, ("stop", "17", "16")),
    "unsupported-field": ({**COMPLETION, "best_of": 3}, 400, ("best_of",)),
    "bad-regex": ({**COMPLETION, "guided_regex": "(?<=x)y"}, 400, ("regex",)),
    "token-id": ({**COMPLETION, "prompt": [99999]}, 400, ("99999", "2048")),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
async def test_bad_input_is_named(cluster: Cluster, name: str) -> None:
    body, code, words = BAD_INPUTS[name]
    data = body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{cluster.url()}/v1/completions", data=data, headers=headers) as answer,
    ):
        content = await answer.json()
    assert answer.status == code, content
    message = content["error"]["message"]
    assert all(word in message for word in words), message
    assert set(content["error"]) == {"message", "type", "param", "code"}


async def test_a_client_that_goes_away_frees_its_blocks(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"model": "tiny", "prompt": [7] * 900, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        async with session.post(f"{cluster.url()}/v1/completions", json=body) as answer:
            await answer.content.readany()
    cluster.wait_idle(20)


async def test_a_request_can_be_explained(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.with_raw_response.create(model="tiny", prompt="why", max_tokens=4)
    request_id = answer.headers["x-request-id"]
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{cluster.url()}/debug/requests/{request_id}") as explained,
    ):
        assert explained.status == 200
        content = await explained.text()
    assert "engine-" in content
    assert "feasible" in content
