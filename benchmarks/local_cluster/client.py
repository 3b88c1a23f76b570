"""The router as a benchmark sees it: requests with a stamp per token, moves, status, metrics, decisions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import grpc
from prometheus_client.parser import text_string_to_metric_families

from sluice.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc, sampling_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

HOST = "127.0.0.1"
# Name of a sample and its labels, in the order of their names.
MetricKey = tuple[str, tuple[tuple[str, str], ...]]


class StreamFailedError(RuntimeError):
    """A request that the benchmark relies on failed."""


@dataclass(slots=True)
class TokenStream:
    """What came of one request so far; mutable, written by ``Client.generate`` alone.

    Args:
        sent_s: When it was sent, on ``time.perf_counter``'s clock, as all stamps.
        request_id: The router's id, once known.
        token_times_s: Arrival of each token; tokens of one message have one stamp.
        token_ids: The tokens.
        num_hand_offs: Moves that the router counted; known at the end.
        is_done: The stream has ended.
    """

    sent_s: float = field(default_factory=time.perf_counter)
    request_id: str = ""
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_hand_offs: int = 0
    is_done: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, delta: router_pb2.GenerateResponse) -> None:
        """Stamps the tokens of a message."""
        now_s = time.perf_counter()
        self.request_id = delta.request_id
        self.token_times_s.extend(now_s for _ in delta.token_ids)
        self.token_ids.extend(delta.token_ids)
        if delta.finish_reason:
            self.num_hand_offs = delta.usage.num_hand_offs
        self._news.set()

    def end(self) -> None:
        """Wakes whoever waits for tokens that will not come."""
        self.is_done = True
        self._news.set()

    async def wait_tokens(self, count: int) -> bool:
        """Waits until ``count`` tokens have come.

        Returns:
            False when the stream ended before.
        """
        while len(self.token_times_s) < count and not self.is_done:
            self._news.clear()
            await self._news.wait()
        return len(self.token_times_s) >= count

    async def wait_more(self, count: int) -> bool:
        """Waits for ``count`` tokens from now on; False when the stream ended before."""
        return await self.wait_tokens(len(self.token_times_s) + count)


@dataclass(frozen=True, slots=True)
class BenchmarkClient:
    """Connections to one router."""

    api: router_pb2_grpc.RouterAsyncStub
    control: control_pb2_grpc.ControlAsyncStub
    http: aiohttp.ClientSession

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, *, grpc_port: int, control_port: int, http_port: int) -> AsyncIterator[Self]:
        """Opens connections; closes them at the end of the block.

        Args:
            grpc_port: Port of the client API.
            control_port: Port of the control API.
            http_port: Port of the OpenAI API.
        """
        async with (
            grpc.aio.insecure_channel(f"{HOST}:{grpc_port}") as api,
            grpc.aio.insecure_channel(f"{HOST}:{control_port}") as control,
            aiohttp.ClientSession(f"http://{HOST}:{http_port}") as http,
        ):
            yield cls(router_pb2_grpc.RouterStub(api), control_pb2_grpc.ControlStub(control), http)

    async def generate(self, stream: TokenStream, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        """Runs a greedy request of exactly ``max_tokens`` tokens to its end.

        Args:
            stream: Takes the stamps; may be watched meanwhile.
            prompt_token_ids: The prompt.
            max_tokens: Length of the output.

        Raises:
            StreamFailedError: It failed; names the status.
        """
        call = self.api.Generate(
            router_pb2.GenerateRequest(
                token_ids=router_pb2.TokenIds(values=prompt_token_ids),
                sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            )
        )
        try:
            async for delta in call:
                stream.take(delta)
        except grpc.aio.AioRpcError as error:
            raise StreamFailedError(f"{error.code().name}: {error.details()}") from error
        finally:
            stream.end()

    async def move(self, request_id: str, engine_id: str) -> str:
        """Asks for a move; returns why it was not begun, or an empty string."""
        answer = await self.control.Move(control_pb2.MoveRequest(request_id=request_id, engine_id=engine_id))
        return answer.reason

    async def read_status(self) -> control_pb2.GetStatusResponse:
        """Reads the state of the router and its engines."""
        return await self.control.GetStatus(control_pb2.GetStatusRequest(), timeout=5.0)

    async def explain(self, request_id: str) -> list[dict[str, Any]]:
        """Reads the decisions about a request, oldest first."""
        async with self.http.get(f"/debug/requests/{request_id}") as response:
            response.raise_for_status()
            story = await response.json()
        events: list[dict[str, Any]] = story["events"]
        return events

    async def read_metrics(self, port: int | None = None) -> dict[MetricKey, float]:
        """Scrapes Prometheus metrics.

        Args:
            port: Of an engine's metrics; None: the router's own.
        """
        url = "/metrics" if port is None else f"http://{HOST}:{port}/metrics"
        async with self.http.get(url) as response:
            response.raise_for_status()
            text = await response.text()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def sum_growth(
    before: dict[MetricKey, float], after: dict[MetricKey, float], name: str, labels: Sequence[str]
) -> dict[tuple[str, ...], float]:
    """Sums by how much a counter grew between two scrapes, by the values of some labels; zeros are left out.

    Args:
        before: First scrape.
        after: Second one.
        name: Sample, ``_total`` included.
        labels: Labels to keep.
    """
    sums: dict[tuple[str, ...], float] = {}
    for key, value in after.items():
        growth = value - before.get(key, 0.0)
        if key[0] == name and growth:
            values = dict(key[1])
            kept = tuple(values.get(label, "") for label in labels)
            sums[kept] = sums.get(kept, 0.0) + growth
    return sums


def list_errors(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """Lists the errors in a group of groups, each text once."""
    found: dict[str, BaseException] = {}
    for error in group.exceptions:
        for single in list_errors(error) if isinstance(error, BaseExceptionGroup) else [error]:
            found.setdefault(str(single), single)
    return list(found.values())
