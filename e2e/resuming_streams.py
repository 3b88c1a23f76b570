"""Clients that go on with their streams at any router, over HTTP and gRPC, and what they have got."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from examples import resumable_client

from sluice.v1 import router_pb2, router_pb2_grpc, sampling_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import httpx
    from workload import Answer, Request

GIVE_UP_S = 30.0
REASONS = {sampling_pb2.FINISH_REASON_STOP: "stop", sampling_pb2.FINISH_REASON_LENGTH: "length"}


class ResumingStream:
    """One client and what it has got.

    Args:
        request: What it asks for.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_resumed = 0

    def check(self, answer: Answer) -> None:
        """Checks that tokens, logprobs, reason and usage are the answer's."""
        name = self.request.name
        assert self.token_ids == answer.token_ids, name
        assert self.finish_reason == answer.finish_reason, name
        assert self.num_output_tokens == len(answer.token_ids), name
        assert self.num_prompt_tokens == len(self.request.prompt_token_ids), name
        if answer.logprobs is not None:
            assert self.logprobs == pytest.approx(answer.logprobs, abs=1e-4), name

    async def run_http(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        """Streams over HTTP."""
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": self.request.prompt_token_ids,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **self.request.sampling,
        }
        progress = resumable_client.Progress(request_id=self.request.name)
        chunks = resumable_client.stream(client, urls, "/v1/completions", body, progress=progress, give_up_s=GIVE_UP_S)
        async for chunk in chunks:
            self.num_resumed = progress.num_resumed
            if not chunk["choices"]:
                usage = chunk["usage"]
                self.num_prompt_tokens, self.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                continue
            [choice] = chunk["choices"]
            assert self.finish_reason is None, "a chunk came behind the end"
            self.token_ids += choice["token_ids"]
            self.finish_reason = choice["finish_reason"]
            if choice["logprobs"] is not None:
                self.logprobs += choice["logprobs"]["token_logprobs"]

    async def run_grpc(self, list_addresses: Callable[[], Sequence[str]]) -> None:
        """Streams over gRPC; addresses may change while it does."""
        capability = ""
        lost_since_s: float | None = None
        for turn in itertools.count():
            addresses = list_addresses()
            try:
                async with grpc.aio.insecure_channel(addresses[turn % len(addresses)]) as channel:
                    async for part in router_pb2_grpc.RouterStub(channel).Generate(self._ask(capability)):
                        self.num_resumed += bool(capability and part.resume_capability)
                        capability = part.resume_capability or capability
                        lost_since_s = None
                        self._take(part)
                        if part.finish_reason:
                            return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            now = time.monotonic()
            lost_since_s = now if lost_since_s is None else lost_since_s
            assert now - lost_since_s < GIVE_UP_S, f"{self.request.name}: no router went on"
            await asyncio.sleep(0.1)

    def _ask(self, capability: str) -> router_pb2.GenerateRequest:
        if capability:
            point = router_pb2.ResumePoint(capability=capability, num_output_tokens=len(self.token_ids))
            return router_pb2.GenerateRequest(request_id=self.request.name, resume=point)
        return router_pb2.GenerateRequest(
            token_ids=router_pb2.TokenIds(values=self.request.prompt_token_ids),
            sampling=self.request.to_proto(),
            request_id=self.request.name,
            is_resumable=True,
        )

    def _take(self, part: router_pb2.GenerateResponse) -> None:
        if part.token_ids:
            assert part.first_output_index == len(self.token_ids), f"{self.request.name}: token order"
        self.token_ids.extend(part.token_ids)
        self.logprobs.extend(entry.logprob for entry in part.logprobs)
        self.finish_reason = REASONS.get(part.finish_reason)
        self.num_prompt_tokens, self.num_output_tokens = part.usage.prompt_tokens, part.usage.output_tokens
