"""Clients that read slowly or not at all, and connections of a router that drains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
from dataclasses import dataclass

import pytest
from aiohttp import web
from edge_fakes import FakePlane, connect, read_until, request_bytes, say
from http_connections_harness import BODY, STREAM, read_response, starting_apis

from sluice_router.api.http.http_api import HttpApi, HttpSettings
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders


@pytest.fixture
async def plane():
    return FakePlane()


@pytest.fixture
async def start(plane, text):
    async with starting_apis(plane, text) as start_api:
        yield start_api


@contextlib.asynccontextmanager
async def _stall(plane, port, count=1, n=1):
    """Starts streams whose clients read nothing of their own accord."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(count):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.settimeout(0)
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
            reader, writer = await stack.enter_async_context(connect(None, sock=raw, limit=1024))
            writer.write(request_bytes("/v1/completions", {**STREAM, "max_tokens": 500, "n": n}))
            clients.append(reader)
        await plane.wait(lambda: len(plane.live) == count * n)
        yield clients


async def test_slow_reader_gets_every_character_once_and_in_large_chunks(start, plane, text):
    api, port = await start(write_buffer_bytes=1024, slow_readers=SlowReaderLimits(max_stream_bytes=64 * 1024 * 1024))
    ids = text.encode_now("hello world ", add_special_tokens=False)
    async with _stall(plane, port) as (reader,):
        num_messages = 0
        while not len(api.slow_readers):
            plane.emit("req-1", ids * 200)
            num_messages += 1
            await asyncio.sleep(0)
        for _ in range(100):
            plane.emit("req-1", ids)
            await asyncio.sleep(0)
        plane.finish("req-1")
        received = b""
        async with asyncio.timeout(60):
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += await reader.read(65536)
    events = [json.loads(event.split(b"\n\n")[0]) for event in received.split(b"data: ")[1:-1]]
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == "hello world " * (200 * num_messages + 100)
    assert len(texts) < num_messages + 20
    assert len(api.slow_readers) == 0


async def test_slow_reader_is_shed_at_its_limit_and_others_are_not(start, plane, text):
    api, port = await start(write_buffer_bytes=1024, slow_readers=SlowReaderLimits(max_stream_bytes=100_000))
    ids = text.encode_now("hello world ", add_special_tokens=False) * 50
    async with _stall(plane, port) as (slow,), connect(port, limit=2**24) as (other, other_writer):
        other_writer.write(request_bytes("/v1/completions", STREAM))
        await plane.wait(lambda: len(plane.live) == 2)
        response_stream = plane.live["req-1"].response_stream
        largest = 0
        while "req-1" in plane.live:
            plane.emit("req-1", ids)
            largest = max(largest, response_stream.num_buffered_bytes)
            plane.emit("req-2", ids[:1])
            await asyncio.sleep(0)
        assert plane.cancelled == [("req-1", "slow_reader")]
        assert api.slow_readers.num_shed == {"stream_bytes": 1}
        assert largest < 100_000 + 2 * len("hello world " * 50)
        plane.finish("req-2")
        assert b"[DONE]" in await read_until(other, b"\r\n0\r\n\r\n")
        assert b"[DONE]" not in await _read_rest(slow)


async def _read_rest(reader):
    """Reads what the kernel still has of an aborted connection."""
    data = b""
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(65536):
                data += part
    return data


async def test_paused_for_too_long_is_shed_even_after_the_end(start, plane, text):
    api, port = await start(write_buffer_bytes=1024)
    plane.clock_s = 0.0
    ids = text.encode_now("hello world ", add_special_tokens=False) * 50
    async with _stall(plane, port) as (slow,):
        while not len(api.slow_readers):
            plane.emit("req-1", ids)
            await asyncio.sleep(0)
        plane.finish("req-1")
        api.slow_readers.sweep(29.0)
        assert len(api.slow_readers) == 1
        api.slow_readers.sweep(31.0)
        assert len(api.slow_readers) == 0
        assert api.slow_readers.num_shed == {"paused": 1}
        assert b"[DONE]" not in await _read_rest(slow)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_slow_reader_that_goes_is_none_any_more_and_was_not_shed(start, plane, text, n):
    api, port = await start(write_buffer_bytes=1024)
    ids = text.encode_now("hello world ", add_special_tokens=False) * 50
    request_ids = [f"req-{number + 1}" for number in range(n)]
    async with _stall(plane, port, n=n):
        while len(api.slow_readers) < n:
            for request_id in request_ids:
                assert plane.emit(request_id, ids)
            await asyncio.sleep(0)
    await plane.wait(lambda: not plane.live)
    assert plane.cancelled == [(request_id, "client_gone") for request_id in request_ids]
    assert len(api.slow_readers) == 0
    api.slow_readers.sweep(plane.now() + 600.0)
    assert not api.slow_readers.num_shed


async def test_whole_answer_that_is_not_read_is_cut_in_time(start, plane, text):
    api, port = await start(write_buffer_bytes=1024)
    plane.clock_s = 0.0
    ids = text.encode_now("hello world ", add_special_tokens=False) * 50_000
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(0)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    async with connect(None, sock=raw, limit=1024) as (reader, writer):
        writer.write(request_bytes("/v1/completions", BODY))
        await plane.wait(lambda: bool(plane.live))
        (connection,) = api._server.connections
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        plane.emit("req-1", ids)
        plane.finish("req-1")
        async with asyncio.timeout(5):
            while not connection.writing_paused:  # noqa: ASYNC110 - the transport has no event
                await asyncio.sleep(0)
        api._server.sweep(29.0)
        assert not connection.transport.is_closing()
        api._server.sweep(31.0)
        assert len(await _read_rest(reader)) < len("hello world ") * 50_000


async def test_answers_say_close_while_the_router_drains(start, plane, text):
    plane.script = say(text, "hello")
    api, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", BODY))
        assert "connection" not in (await read_response(reader))[1]
        await api.announce_close()
        writer.write(request_bytes("/v1/completions", BODY))
        status, headers, _ = await read_response(reader)
        assert (status, headers["connection"], headers["server"]) == (200, "close", "sluice")
    async with connect(port) as (reader, writer):
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        status, _, body = await read_response(reader)
        assert (status, json.loads(body)) == (503, {"status": "not ready", "reason": "closing"})


async def test_total_limit_sheds_the_largest_first(start, plane, text):
    limits = SlowReaderLimits(max_stream_bytes=10**9, max_paused_s=600, max_total_bytes=600_000)
    api, port = await start(write_buffer_bytes=1024, slow_readers=limits)
    ids = text.encode_now("hello world ", add_special_tokens=False) * 50
    async with _stall(plane, port, count=3):
        while len(api.slow_readers) < 3:
            assert len(plane.live) == 3
            for number in (1, 2, 3):
                plane.emit(f"req-{number}", ids)
            await asyncio.sleep(0)
        for _ in range(1000):
            plane.emit("req-2", ids)
        api.slow_readers.sweep(plane.now())
        assert plane.cancelled == [("req-2", "slow_reader")]
        assert api.slow_readers.num_shed == {"total_bytes": 1}


@dataclass(eq=False)
class PausedReader:
    num_buffered_bytes: int
    paused_since_s: float
    is_shed: bool = False

    def shed(self) -> None:
        assert not self.is_shed
        self.is_shed = True


def test_who_is_shed_for_its_pause_makes_room_for_the_others():
    slow_readers = SlowReaders(SlowReaderLimits(max_paused_s=30.0, max_total_bytes=1000))
    late, early = PausedReader(900, paused_since_s=0.0), PausedReader(200, paused_since_s=20.0)
    for reader in (late, early):
        slow_readers.add(reader)
    slow_readers.sweep(30.5)
    assert (late.is_shed, early.is_shed) == (True, False)
    assert slow_readers.num_shed == {"paused": 1}
    assert len(slow_readers) == 1


async def test_close_lets_answers_end_and_then_says_close(start, plane):
    api, port = await start()
    async with connect(port) as (reader, writer), connect(port) as (idle, _):
        writer.write(request_bytes("/v1/completions", STREAM))
        await plane.wait(lambda: bool(plane.live))
        closing = asyncio.create_task(api.close(5))
        async with asyncio.timeout(5):
            assert await idle.read() == b""
        plane.emit("req-1", [100])
        plane.finish("req-1")
        head = await read_until(reader, b"\r\n\r\n")
        assert b"Connection: close" in head
        async with asyncio.timeout(5):
            assert (await reader.read()).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
            await closing
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_close_lets_answers_end_though_the_server_was_idle_before(start, plane, monkeypatch):
    clean_up, num_cut = web.ServerRunner.cleanup, []

    async def count_and_clean_up(runner):
        num_cut.append(len(plane.live))
        await clean_up(runner)

    monkeypatch.setattr(web.ServerRunner, "cleanup", count_and_clean_up)
    api, port = await start()
    async with connect(port) as (reader, writer), connect(port) as (idle, _):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        await read_response(reader)
        writer.write(request_bytes("/v1/completions", STREAM))
        await plane.wait(lambda: bool(plane.live))
        closing = asyncio.create_task(api.close(600))
        async with asyncio.timeout(5):
            assert await idle.read() == b""
        plane.emit("req-1", [100])
        plane.finish("req-1")
        async with asyncio.timeout(5):
            assert (await reader.read()).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
            await closing
    assert num_cut == [0]


async def test_close_cuts_what_outlasts_the_grace_time(start, plane):
    api, port = await start()
    async with connect(port) as (_, writer):
        writer.write(request_bytes("/v1/completions", STREAM))
        await plane.wait(lambda: bool(plane.live))
        async with asyncio.timeout(5):
            await api.close(0.05)
        assert plane.cancelled == [("req-1", "client_gone")]


async def test_burst_of_new_clients_is_accepted_in_few_loop_iterations(start):
    """uvloop accepts one connection per listener and turn of the loop."""
    _, port = await start()
    with contextlib.ExitStack() as sockets:
        clients = [sockets.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(160)]
        for client in clients:
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        turns, unanswered = 0, clients
        while unanswered:
            await asyncio.sleep(0)
            turns += 1
            answered, _, _ = select.select(unanswered, [], [], 0)
            unanswered = [client for client in unanswered if client not in answered]
        assert turns < len(clients) / 2


class LoudPlane(FakePlane):
    """Has more metrics than any buffer takes."""

    num_bytes = 64 << 20

    def format_metrics(self) -> bytes:
        return b"x" * self.num_bytes


async def test_a_client_that_reads_a_whole_answer_too_slowly_is_cut(text):
    api = HttpApi(LoudPlane(), text, HttpSettings(slow_readers=SlowReaderLimits(max_paused_s=0.05)))
    port = await api.start("127.0.0.1", 0)
    loop, num_read = asyncio.get_running_loop(), 0
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(0)
        await loop.sock_connect(raw, ("127.0.0.1", port))
        await loop.sock_sendall(raw, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        # It reads on, so that the kernel has no reason to cut it.
        with contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(raw, 1024):
                num_read += len(data)
    assert num_read < LoudPlane.num_bytes
    await api.close(0)


async def test_a_server_that_closes_waits_for_each_of_its_answers(start, plane):
    api, port = await start()
    async with connect(port) as (first, writer), connect(port) as (second, other):
        writer.write(request_bytes("/v1/completions", BODY))
        await plane.wait(lambda: len(plane.live) == 1)
        other.write(request_bytes("/v1/completions", BODY))
        await plane.wait(lambda: len(plane.live) == 2)
        closing = asyncio.create_task(api.close(30.0))
        for number, reader in enumerate((first, second)):
            request_id = f"req-{number + 1}"
            plane.emit(request_id, [100])
            plane.finish(request_id)
            assert (await read_response(reader))[0] == 200
            assert api._is_idle.is_set() is bool(number)
        async with asyncio.timeout(20):
            await closing
