"""Streams go on at another router after theirs was killed: every token once and in order, as stock vLLM makes them."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from examples import resumable_client

if TYPE_CHECKING:
    from cluster import Cluster
    from workload import Answer, Request

pytestmark = pytest.mark.engine

ROUTERS = ("router-0", "router-1")
NUM_STREAMS = 12


def make_body(request: Request, **fields: Any) -> dict[str, Any]:
    """The request over HTTP, with token ids in its answer."""
    usage = {"include_usage": True}
    body = {"model": "tiny", "prompt": request.prompt_token_ids, "return_token_ids": True, "stream_options": usage}
    return {**body, **request.sampling, **fields}


class Stream:
    """One resuming client and what it has got."""

    def __init__(self, cluster: Cluster, request: Request, *, first: int) -> None:
        self.cluster = cluster
        self.request = request
        self.first = first
        self.progress = resumable_client.Progress()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}

    async def run(self, client: httpx.AsyncClient) -> None:
        urls = [self.cluster.url(name) for name in ROUTERS]
        order = [urls[(self.first + step) % len(urls)] for step in range(len(urls))]
        chunks = resumable_client.stream(
            client, order, "/v1/completions", make_body(self.request), progress=self.progress, give_up_s=25
        )
        async for chunk in chunks:
            if not chunk["choices"]:
                self.usage = chunk["usage"]
                continue
            [choice] = chunk["choices"]
            assert self.finish_reason is None, "a chunk came behind the end"
            self.token_ids += choice["token_ids"]
            self.finish_reason = choice["finish_reason"]
            if choice["logprobs"] is not None:
                self.logprobs += choice["logprobs"]["token_logprobs"]

    def check(self, answer: Answer) -> None:
        name = self.request.name
        assert self.token_ids == answer.token_ids, name
        assert self.finish_reason == answer.finish_reason, name
        assert self.usage["completion_tokens"] == len(answer.token_ids), name
        assert self.usage["prompt_tokens"] == len(self.request.prompt_token_ids), name
        if answer.logprobs is not None:
            assert self.logprobs == pytest.approx(answer.logprobs, abs=1e-4), name


async def wait_tokens(streams: list[Stream], num_tokens: int) -> None:
    async with asyncio.timeout(60):
        while sum(len(stream.token_ids) for stream in streams) < num_tokens:  # noqa: ASYNC110  streams have no event
            await asyncio.sleep(0.005)


async def test_streams_go_on_at_another_router_when_theirs_is_killed(
    cluster: Cluster, known_long: list[tuple[Request, Answer]]
) -> None:
    rng = random.Random(4)
    known = rng.sample(known_long, 2 * NUM_STREAMS)
    num_resumed = 0
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for name in ROUTERS:
            now, known = known[:NUM_STREAMS], known[NUM_STREAMS:]
            streams = [Stream(cluster, request, first=index % 2) for index, (request, _) in enumerate(now)]
            tasks = [asyncio.create_task(stream.run(client)) for stream in streams]
            await wait_tokens(streams, sum(len(answer.token_ids) for _, answer in now) // 3)
            before = cluster.pid(name)
            cluster.kill(name, signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*tasks), 90)
            for stream, (_, answer) in zip(streams, now, strict=True):
                stream.check(answer)
            num_resumed += sum(stream.progress.num_resumed for stream in streams)
            await asyncio.to_thread(cluster.wait_router_replaced, name, before)
    print(f"{num_resumed} streams went on at another router")
    assert num_resumed >= NUM_STREAMS // 2
