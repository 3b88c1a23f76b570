"""Answers with several choices, by ``n`` and by lists of prompts: every choice is a request that flows by itself."""

from __future__ import annotations

import asyncio
import itertools
from array import array

import openai
import pytest
from edge_fakes import LENGTH, FakePlane, connect, read_until, request_bytes

from sluice.v1 import sampling_pb2
from sluice_core.records import RequestId
from sluice_router.api.choices import PreparedRequest, derive_seed, list_choices
from sluice_router.api.http.http_api import HttpApi
from sluice_router.api.http.http_generation import HttpGeneration
from sluice_router.api.openai_requests import CompletionBody, check
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.errors import EngineFaultError, QueueFullError
from sluice_router.scheduling.requests import NewRequest
from sluice_router.text.output import OutputSettings

MESSAGES = [{"role": "user", "content": "hi"}]
PROMPTS = ["one", "two", [5, 6, 7]]


@pytest.fixture
async def port(plane, text):
    # Each prompt has an answer of its own, so that a choice cannot pass for another.
    plane.script = lambda request: [*request.prompt_token_ids, 2]
    api = HttpApi(plane, text)
    yield await api.start("127.0.0.1", 0)
    await api.close(0.1)


@pytest.fixture
async def client(port):
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompts", [["one"], ["one", "two", "the end"], [[5, 6], [7, 8, 9]]], ids=len)
async def test_list_of_prompts_is_answered_in_order(client, plane, text, prompts, n):
    answer = await client.completions.create(model="tiny", prompt=prompts, n=n, max_tokens=50)
    ids = [text.encode_now(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts for _ in range(n)]
    assert [list(request.prompt_token_ids) for request in plane.admitted] == ids
    assert [choice.index for choice in answer.choices] == list(range(len(ids)))
    assert [text.encode_now(choice.text, add_special_tokens=False) for choice in answer.choices] == ids
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage.prompt_tokens == sum(map(len, ids[::n])), "a prompt counts once"
    assert answer.usage.completion_tokens == sum(len(one) + 1 for one in ids)
    assert answer.usage.model_extra["hand_offs"] == len(ids)


@pytest.mark.parametrize("n", [1, 3])
async def test_stream_carries_every_choice_and_ends_once(client, text, n):
    stream = await client.completions.create(
        model="tiny", prompt=["hello", "world"], n=n, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usages = [""] * 2 * n, [None] * 2 * n, []
    async for chunk in stream:
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "nothing follows a choice's end"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        if chunk.usage is not None:
            usages.append(chunk.usage)
    assert texts == ["hello"] * n + ["world"] * n
    assert reasons == ["stop"] * 2 * n
    assert len(usages) == 1
    assert usages[0].prompt_tokens == sum(len(text.encode_now(p, add_special_tokens=False)) for p in ("hello", "world"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_chat_with_n(client, plane, stream):
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=7, stream=stream)
    if stream:
        contents = {0: [], 1: [], 2: []}
        async for chunk in answer:
            contents[chunk.choices[0].index].append(chunk.choices[0].delta)
        assert [deltas[0].role for deltas in contents.values()] == ["assistant"] * 3
        texts = ["".join(delta.content or "" for delta in deltas) for deltas in contents.values()]
    else:
        texts = [choice.message.content for choice in answer.choices]
    assert texts[0].startswith("user\nhi")
    assert texts == texts[:1] * 3
    assert [request.sampling.seed for request in plane.admitted] == [7, 8, 9]


async def test_choices_have_ids_of_their_own(client, plane):
    answer = await client.completions.create(
        model="tiny", prompt=["a", "b", "c"], extra_headers={"x-request-id": "mine"}
    )
    assert [request.client_request_id for request in plane.admitted] == ["mine", "mine-1", "mine-2"]
    assert answer.id == f"cmpl-{plane.admitted[0].request_id}"
    await client.completions.create(model="tiny", prompt="a", n=2)
    first, second = plane.admitted[3:]
    assert (first.client_request_id, second.client_request_id) == ("", f"{first.request_id}-1")
    assert len({request.request_id for request in plane.admitted}) == 5


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (0, [0, 1, 2]),
        (-2, [-2, -3, -4]),
        (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)]),
        (-(2**63), [-(2**63), 2**63 - 1, 2**63 - 2]),
    ],
    ids=["zero", "below", "largest", "smallest"],
)
def test_seeds_of_samples_differ_and_are_never_vllms_none(seed, seeds):
    assert [derive_seed(seed, sample) for sample in range(3)] == seeds
    assert -1 not in [derive_seed(seed, sample) for sample in range(128)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_failure_of_one_choice_before_the_first_byte_fails_the_answer(client, plane, stream):
    plane.script = None
    asked = asyncio.create_task(client.completions.create(model="tiny", prompt=PROMPTS[0], n=3, stream=stream))
    await plane.wait(lambda: len(plane.live) == 3)
    plane.fail("req-2", EngineFaultError("engines failed"))
    with pytest.raises(openai.InternalServerError, match="engines failed"):
        await asked
    await plane.wait(lambda: not plane.live)
    assert {request_id for request_id, _ in plane.cancelled} == {"req-1", "req-3"}


async def test_failure_of_one_choice_ends_the_stream_and_the_other_choices(client, plane):
    plane.script = None
    asked = asyncio.create_task(client.completions.create(model="tiny", prompt="hi", n=3, stream=True))
    await plane.wait(lambda: len(plane.live) == 3)
    plane.emit("req-1", [100])
    stream = await asked
    plane.fail("req-2", EngineFaultError("engines failed"))
    # Still in the same tick, before the edge's task has heard of it.
    plane.emit("req-1", [101])
    plane.finish("req-1", LENGTH)
    with pytest.raises(openai.APIError, match="engines failed"):
        [chunk async for chunk in stream]
    await plane.wait(lambda: not plane.live)
    assert [request_id for request_id, _ in plane.cancelled] == ["req-3"]


async def test_nothing_follows_the_end_mark_of_a_stream_that_failed(plane, port):
    plane.script = None
    body = {"prompt": "hi", "n": 2, "stream": True}
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", body, {"Connection": "close"}))
        await plane.wait(lambda: len(plane.live) == 2)
        plane.emit("req-1", [100])
        await read_until(reader, b"}\n\n")
        plane.fail("req-2", EngineFaultError("engines failed"))
        plane.emit("req-1", [101])
        rest = await reader.read()
    assert rest.count(b"data: [DONE]") == 1
    assert rest.rstrip().removesuffix(b"0").rstrip().endswith(b"data: [DONE]")


async def test_client_that_goes_ends_every_choice(plane, port):
    plane.script = None
    async with connect(port) as (_, writer):
        writer.write(request_bytes("/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True}))
        await plane.wait(lambda: len(plane.live) == 4)
    await plane.wait(lambda: not plane.live)
    assert len(plane.cancelled) == 4


async def test_refusal_of_a_later_choice_ends_the_earlier_ones(client, plane):
    plane.script = None
    asked = asyncio.create_task(client.completions.create(model="tiny", prompt=["a", "b", "c"]))
    await plane.wait(lambda: len(plane.live) == 1)
    plane.refusal = QueueFullError("too many requests wait", retry_after_s=1)
    with pytest.raises(openai.RateLimitError):
        await asked
    assert [request_id for request_id, _ in plane.cancelled] == ["req-1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_between_two_choices_ends_those_that_have_begun(text, stream):
    plane = FakePlane()
    generation = HttpGeneration(plane, text, SlowReaders(SlowReaderLimits()), 1, 10.0)
    request = NewRequest(
        request_id=plane.make_request_id(),
        prompt_token_ids=array("I", [5]),
        sampling=sampling_pb2.SamplingParams(max_tokens=9),
        arrival_s=0.0,
    )
    prepared = list_choices([PreparedRequest(request=request, output=OutputSettings())], 3, plane.make_request_id)
    body = check(CompletionBody, {"prompt": [5], "n": 3, "stream": stream})
    # Nothing is read of the HTTP request before all choices are admitted.
    answering = asyncio.create_task(generation.answer(None, body, prepared, {}))
    await asyncio.sleep(0)
    assert list(plane.live) == ["req-1"]
    answering.cancel()
    await asyncio.wait([answering])
    assert (plane.cancelled, list(plane.live)) == ([("req-1", "client_gone")], [])


def test_choices_of_each_prompt_count_seeds_from_the_requests_own():
    sampling = sampling_pb2.SamplingParams(seed=-5)
    prompts = [
        PreparedRequest(
            request=NewRequest(
                request_id=RequestId("r"), prompt_token_ids=array("I", [number]), sampling=sampling, arrival_s=0.0
            ),
            output=OutputSettings(),
        )
        for number in (7, 8)
    ]
    numbers = itertools.count(1)
    choices = [choice.request for choice in list_choices(prompts, 2, lambda: RequestId(f"r{next(numbers)}"))]
    assert [(list(choice.prompt_token_ids), choice.sampling.seed) for choice in choices] == [
        ([7], -5),
        ([7], -6),
        ([8], -5),
        ([8], -6),
    ]
    assert [(choice.request_id, choice.client_request_id) for choice in choices] == [
        ("r", ""),
        ("r1", "r-1"),
        ("r2", "r-2"),
        ("r3", "r-3"),
    ]
