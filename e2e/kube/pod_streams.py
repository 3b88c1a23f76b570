"""Streams through a cluster's Service while the cluster changes, each compared with stock vLLM's answer."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import httpx
from cluster import Result
from resuming_streams import ResumingStream
from test_exactness import check

from sluice_operator.api.ports import GRPC_PORT, HTTP_PORT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster import Client
    from pod_cluster import PodCluster
    from workload import Answer, Request

T = TypeVar("T")

NUM_LANES = 4
STREAM_S = 120.0
CONNECT_S = 5.0
PAUSE_S = 0.2
# Clients read at a limited pace: otherwise streams would take both cores, on which engines have to start.
REST_S = 1.0
# Error messages of a stream whose router ends: the client sends the request again.
BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


async def stream_while(
    cluster: PodCluster, known: list[tuple[Request, Answer]], act: Callable[[], T], *, may_break: bool = False
) -> tuple[T, Counter[str]]:
    """Keeps streams running while ``act`` runs in a thread. Every answer must be exact.

    Args:
        cluster: The cluster.
        known: Requests and their answers.
        act: Changes the cluster; starts once every lane has a running stream.
        may_break: Whether a stream may end with a known error, and is then sent again.

    Returns:
        The result of ``act``, and the number of streams by outcome.
    """
    lanes = [Lane(cluster, known[number::NUM_LANES], may_break=may_break) for number in range(NUM_LANES)]
    return await _run_while(lanes, act)


async def resume_while(
    cluster: PodCluster, known: list[tuple[Request, Answer]], act: Callable[[], T]
) -> tuple[T, Counter[str]]:
    """As ``stream_while``, with clients that go on where an answer broke off, half over HTTP and half over gRPC."""
    lanes = [
        ResumingLane(cluster, known[number :: 2 * NUM_LANES], is_http=number % 2 == 0)
        for number in range(2 * NUM_LANES)
    ]
    return await _run_while(lanes, act)


async def _run_while(lanes: Sequence[Lane], act: Callable[[], T]) -> tuple[T, Counter[str]]:
    async def conduct() -> T:
        async with asyncio.timeout(STREAM_S):
            for lane in lanes:
                await lane.has_begun.wait()
        try:
            return await asyncio.to_thread(act)
        finally:
            for lane in lanes:
                lane.is_over = True

    async with asyncio.TaskGroup() as tasks:
        conducted = tasks.create_task(conduct())
        for lane in lanes:
            tasks.create_task(lane.run())
    return conducted.result(), sum((lane.fared for lane in lanes), Counter())


class Lane:
    """One client, which sends one request after the other.

    Args:
        cluster: The cluster.
        known: Requests and their answers.
        may_break: Whether a stream may end with a known error.
    """

    def __init__(self, cluster: PodCluster, known: list[tuple[Request, Answer]], *, may_break: bool) -> None:
        self._cluster = cluster
        self._known = known
        self._may_break = may_break
        self.has_begun = asyncio.Event()
        self.is_over = False
        self.fared: Counter[str] = Counter()

    async def run(self) -> None:
        """Sends requests until told to stop; the running stream is then the last one."""
        async with self._cluster.connect() as client:
            for request, answer in itertools.cycle(self._known):
                result = await self._insist(client, request)
                check(result, answer)
                self.fared["exact"] += 1
                self.fared["moved"] += result.num_hand_offs > 0
                if not self.is_over:
                    await asyncio.sleep(REST_S)
                if self.is_over:
                    return

    async def _insist(self, client: Client, request: Request) -> Result:
        while True:
            result = WatchedResult(self.has_begun, request.name)
            try:
                await asyncio.wait_for(client.generate(request, result=result), STREAM_S)
            except grpc.aio.AioRpcError as error:
                if not self._may_break or error.code() not in BROKEN:
                    raise
                self.fared["broken"] += 1
                await asyncio.sleep(PAUSE_S)
            else:
                return result


class ResumingLane(Lane):
    """One client that goes on with its answer at any router.

    Args:
        cluster: The cluster.
        known: Requests and their answers.
        is_http: It uses HTTP, else gRPC.
    """

    def __init__(self, cluster: PodCluster, known: list[tuple[Request, Answer]], *, is_http: bool) -> None:
        super().__init__(cluster, known, may_break=False)
        self._is_http = is_http

    async def run(self) -> None:
        """See ``Lane.run``."""
        service = await self._cluster.find_service()
        timeout = httpx.Timeout(STREAM_S, connect=CONNECT_S)
        async with httpx.AsyncClient(trust_env=False, timeout=timeout) as client:
            for number, (request, answer) in enumerate(itertools.cycle(self._known)):
                # A resumed answer is known by its request's id.
                stream = ResumingStream(replace(request, name=f"{request.name}-{number}"))
                if self._is_http:
                    await stream.run_http(client, [f"http://{service}:{HTTP_PORT}"])
                else:
                    await stream.run_grpc(lambda: [f"{service}:{GRPC_PORT}"])
                stream.check(answer)
                self.has_begun.set()
                self.fared["exact"] += 1
                self.fared["resumed"] += stream.num_resumed > 0
                if self.is_over:
                    return


class WatchedResult(Result):
    """A result that signals its first token.

    Args:
        has_begun: Set with the first token.
        name: The request's name.
    """

    def __init__(self, has_begun: asyncio.Event, name: str) -> None:
        super().__init__(name=name)
        self._has_begun = has_begun

    def take(self, delta: Any) -> None:
        super().take(delta)
        if self.token_ids:
            self._has_begun.set()
