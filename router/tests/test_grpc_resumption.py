"""Calls of ``Router.Generate`` that go on with the output of an earlier one."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import grpc
import pytest
from edge_fakes import ANSWER, FakePlane

from sluice.v1 import router_pb2, router_pb2_grpc, sampling_pb2
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.grpc.grpc_api import GrpcApi, RouterService
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders


@contextlib.asynccontextmanager
async def serving_two(text):
    """Two routers before the same engines."""
    first, second = FakePlane(), FakePlane()
    second.resumable = first.resumable
    apis = [GrpcApi(plane, text, EdgeMetrics(SlowReaders(SlowReaderLimits()))) for plane in (first, second)]
    try:
        async with contextlib.AsyncExitStack() as stack:
            ports = [await api.start("127.0.0.1", 0) for api in apis]
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) for port in ports
            ]
            yield first, second, [router_pb2_grpc.RouterStub(channel) for channel in channels]
    finally:
        for api in apis:
            await api.close(0)


def ask(**fields) -> router_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(max_tokens=99, num_logprobs=1)
    return router_pb2.GenerateRequest(text="hi", request_id="mine", sampling=sampling, is_resumable=True, **fields)


def go_on(capability: str, num_output_tokens: int, **fields) -> router_pb2.GenerateRequest:
    point = router_pb2.ResumePoint(capability=capability, num_output_tokens=num_output_tokens)
    return router_pb2.GenerateRequest(**{"request_id": "mine", "resume": point, **fields})


def add_up(deltas) -> tuple[list[int], str, list[float]]:
    tokens = [token for delta in deltas for token in delta.token_ids]
    logprobs = [entry.logprob for delta in deltas for entry in delta.logprobs]
    return tokens, "".join(delta.text for delta in deltas), logprobs


@pytest.mark.parametrize("stop", [[], ["the end"]], ids=["ends by itself", "ends by a stop string"])
async def test_each_token_is_followed_by_the_rest(text, stop):
    tokens = text.encode_now(ANSWER, add_special_tokens=False)
    async with serving_two(text) as (first, _, (router, other)):
        first.script = lambda _: tokens
        whole = [delta async for delta in router.Generate(ask(stop=stop))]
        assert [bool(delta.resume_capability) for delta in whole] == [True] + [False] * (len(whole) - 1)
        for number in range(len(whole)):
            num_tokens = sum(len(delta.token_ids) for delta in whole[:number])
            rest = [delta async for delta in other.Generate(go_on(whole[0].resume_capability, num_tokens))]
            assert add_up(rest) == add_up(whole[number:])
            assert rest[0].first_output_index == num_tokens
            assert [delta.resume_capability for delta in rest] == [whole[0].resume_capability] + [""] * (len(rest) - 1)
            assert (rest[-1].finish_reason, rest[-1].usage.output_tokens) == (
                whole[-1].finish_reason,
                whole[-1].usage.output_tokens,
            )


async def test_a_call_that_broke_goes_on(text):
    async with serving_two(text) as (first, second, (router, other)):
        call = router.Generate(ask())
        task = asyncio.create_task(call.read())
        await first.wait(lambda: bool(first.live))
        [request_id] = first.live
        first.emit(request_id, [70])
        capability = (await task).resume_capability
        call.cancel()
        await first.wait(lambda: bool(first.detached))
        first.emit(request_id, [71])
        assert first.cancelled == []
        task = asyncio.create_task(read_all(other.Generate(go_on(capability, 1))))
        await second.wait(lambda: bool(second.adopted))
        second.emit(request_id, [72])
        second.finish(request_id)
        assert add_up(await task)[0] == [71, 72]


async def test_a_caller_that_comes_back_may_go_again_before_its_first_part_and_has_another_deadline(text):
    async with serving_two(text) as (first, second, (router, other)):
        second.clock_s = 1000.0
        call = router.Generate(ask())
        task = asyncio.create_task(call.read())
        await first.wait(lambda: bool(first.live))
        [request_id] = first.live
        assert first.admitted[0].deadline_s is None
        first.emit(request_id, [70])
        capability = (await task).resume_capability
        again = other.Generate(go_on(capability, 1), timeout=50.0)
        task = asyncio.create_task(again.read())
        await second.wait(lambda: bool(second.adopted))
        # gRPC rounds time-outs.
        assert 1000.0 < second.live[request_id].request.deadline_s < 1052.0
        again.cancel()
        await second.wait(lambda: bool(second.detached))
        assert (second.detached, second.cancelled) == ([request_id], [])
        with pytest.raises(asyncio.CancelledError):
            await task


async def read_all(call) -> list[router_pb2.GenerateResponse]:
    return [delta async for delta in call]


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (go_on("a" * 32, 0), grpc.StatusCode.NOT_FOUND, "unknown"),
        (go_on("short", 0), grpc.StatusCode.INVALID_ARGUMENT, "resume.capability"),
        (go_on("a" * 32, 0, text="hi"), grpc.StatusCode.INVALID_ARGUMENT, "leave the prompt out"),
    ],
    ids=["unknown", "no capability", "with a prompt"],
)
async def test_what_cannot_be_resumed_is_refused(text, request_, status, reason):
    async with serving_two(text) as (first, _, (router, _other)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(router.Generate(request_))
        assert caught.value.code() is status
        assert reason in caught.value.details()
        assert first.admitted == []


async def test_a_call_that_breaks_before_its_first_part_ends_its_request(text):
    async with serving_two(text) as (first, _, (router, _other)):
        call = router.Generate(ask())
        task = asyncio.create_task(call.read())
        await first.wait(lambda: bool(first.live))
        task.cancel()
        call.cancel()
        await first.wait(lambda: bool(first.cancelled))
        assert first.detached == []


async def test_a_client_that_goes_while_the_first_part_is_written_does_not_come_back(text):
    """It has not got the capability."""

    async def write(_part):
        raise asyncio.CancelledError

    plane = FakePlane(lambda _: [70, 71])
    context = SimpleNamespace(invocation_metadata=lambda: (), time_remaining=lambda: None, write=write)
    service = RouterService(plane, text, EdgeMetrics(SlowReaders(SlowReaderLimits())))
    with pytest.raises(asyncio.CancelledError):
        await service.Generate(ask(), context)
    assert (plane.cancelled, plane.detached) == ([("req-1", "client_gone")], [])


async def test_a_client_that_goes_while_it_does_not_keep_up_is_no_slow_reader_any_more(text):
    plane, readers, seen = FakePlane(), SlowReaders(SlowReaderLimits()), []

    async def write(_part):
        plane.emit("req-1", [71])
        seen.append(len(readers))
        raise asyncio.CancelledError

    context = SimpleNamespace(invocation_metadata=lambda: (), time_remaining=lambda: None, write=write)
    task = asyncio.create_task(RouterService(plane, text, EdgeMetrics(readers)).Generate(ask(), context))
    await plane.wait(lambda: bool(plane.live))
    plane.emit("req-1", [70])
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (seen, len(readers)) == ([1], 0)


async def test_headers_of_http_are_refused_by_name(text):
    async with serving_two(text) as (first, _, (router, _other)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(router.Generate(ask(), metadata=(("x-sluice-resumable", "true"),)))
        assert "is_resumable" in caught.value.details()
        assert first.admitted == []
