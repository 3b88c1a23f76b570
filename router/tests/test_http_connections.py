"""The connection itself: malformed HTTP, limits, timeouts, disconnects, slow readers, closing. On both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import zlib

import pytest
from data_plane_harness import until
from edge_fakes import FakePlane, connect, read_until, request_bytes, say

from sluice_router.api.http_api import HttpApi
from sluice_router.api.http_settings import HttpSettings

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 100, "stream": False}
STREAM = {**BODY, "stream": True}


@pytest.fixture
async def plane():
    return FakePlane()


@pytest.fixture
async def start(plane, text):
    started = []

    async def _start(**settings):
        api = HttpApi(plane, text, HttpSettings(**settings))
        started.append(api)
        return api, await api.start("127.0.0.1", 0)

    yield _start
    for api in started:
        await api.close(0)


async def _read_response(reader):
    head = (await read_until(reader, b"\r\n\r\n")).decode()
    status = int(head.split(" ", 2)[1])
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])}
    body = await reader.readexactly(int(headers["content-length"])) if "content-length" in headers else b""
    return status, headers, body


MALFORMED = [
    ("not-http", b"hello there\r\n\r\n", 400),
    ("bad-version", b"GET /livez HTTP/9.9\r\n\r\n", 400),
    ("bad-method", b"G@T /livez HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("bad-header", b"GET /livez HTTP/1.1\r\nHost x\r\n\r\n", 400),
    ("space-before-colon", b"GET /livez HTTP/1.1\r\nHost : x\r\n\r\n", 400),
    ("nul-in-header", b"GET /livez HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n", 400),
    (
        "length-and-chunked",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (
        "two-lengths",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
        400,
    ),
    ("negative-length", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    ("bad-chunk", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ("long-line", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("long-header", b"GET /livez HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000 + b"\r\n\r\n", 400),
    (
        "many-headers",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: b\r\n" % i for i in range(500)) + b"\r\n",
        400,
    ),
    (
        "large-headers",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: %b\r\n" % (i, b"b" * 4000) for i in range(5)) + b"\r\n",
        400,
    ),
    (
        "other-expectation",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: tea\r\nContent-Length: 2\r\n\r\n{}",
        400,
    ),
    ("length-over", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n", 413),
    (
        "chunks-over",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1000\r\n" + b"x" * 4096 + b"\r\n" + b"1000\r\n" + b"x" * 4096 + b"\r\n0\r\n\r\n",
        413,
    ),
]


@pytest.mark.parametrize(("sent", "status"), [pytest.param(sent, status, id=name) for name, sent, status in MALFORMED])
async def test_malformed_http_is_answered_in_openais_form_and_closed(start, plane, sent, status):
    _, port = await start(max_body_bytes=8000)
    async with connect(port) as (reader, writer):
        writer.write(sent)
        found, headers, body = await _read_response(reader)
        assert found == status, body
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert headers["content-type"].startswith("application/json")
    async with connect(port) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await _read_response(reader))[0] == 200
    assert not plane.admitted


async def test_compressed_body_is_limited_unpacked(start):
    _, port = await start(max_body_bytes=10_000)
    async with connect(port) as (reader, writer):
        packed = zlib.compress(b'{"prompt": "' + b"x" * 1_000_000 + b'"}')
        writer.write(request_bytes("/v1/completions", packed, {"Content-Encoding": "deflate"}))
        assert (await _read_response(reader))[0] == 413


async def test_headers_that_do_not_end_close_the_connection(start):
    _, port = await start(header_timeout_s=0.1)
    async with connect(port) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        async with asyncio.timeout(5):
            assert await reader.read() == b""


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_each_request_of_a_connection_arrives_with_its_own_first_byte(start, plane, text, body):
    plane.script = say(text, "hello")
    _, port = await start()
    data = request_bytes("/v1/completions", body)
    async with connect(port) as (reader, writer), connect(port) as (other, other_writer):
        for now_s in (5.0, 100.0, 200.0):
            plane.clock_s = now_s
            writer.write(data[:10])
            # What is answered here was sent later: the first bytes have arrived.
            other_writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            await _read_response(other)
            plane.clock_s = now_s + 3
            writer.write(data[10:])
            await (read_until(reader, b"\r\n0\r\n\r\n") if body is STREAM else _read_response(reader))
    assert [request.arrival_s for request in plane.admitted] == [5.0, 100.0, 200.0]


@pytest.mark.parametrize("num_before", [0, 1, 2])
async def test_headers_that_do_not_end_close_the_connection_whichever_request_they_are_of(start, plane, num_before):
    _, port = await start(header_timeout_s=0.2)
    async with connect(port) as (reader, writer):
        for _ in range(num_before):
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await _read_response(reader))[0] == 200
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        async with asyncio.timeout(5):
            assert await reader.read() == b""


async def test_idle_connection_is_closed(start):
    _, port = await start(idle_timeout_s=0.1)
    async with connect(port) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await _read_response(reader))[0] == 200
        async with asyncio.timeout(5):
            assert await reader.read() == b""


async def test_body_that_does_not_come_times_out(start):
    _, port = await start(body_timeout_s=0.1)
    async with connect(port) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        status, headers, body = await _read_response(reader)
        assert status == 504
        assert headers["connection"] == "close"
        assert json.loads(body)["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("is_divided", [False, True], ids=["at once", "body behind the headers"])
async def test_answer_outlasts_header_and_idle_timeouts(start, plane, is_divided):
    _, port = await start(header_timeout_s=0.05, idle_timeout_s=0.05)
    async with connect(port) as (reader, writer):
        data = request_bytes("/v1/completions", STREAM, {"Expect": "100-continue"} if is_divided else None)
        head, _, body = data.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        if is_divided:
            await read_until(reader, b"100 Continue\r\n\r\n")
        writer.write(body)
        await plane.wait(lambda: bool(plane.live))
        await asyncio.sleep(0.15)
        plane.emit("req-1", [100])
        plane.finish("req-1")
        assert (await read_until(reader, b"0\r\n\r\n")).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")


async def test_expectation_is_answered_before_the_body(start, plane, text):
    plane.script = say(text, "hello")
    _, port = await start()
    head, _, body = request_bytes("/v1/completions", BODY, {"Expect": "100-continue"}).partition(b"\r\n\r\n")
    async with connect(port) as (reader, writer):
        writer.write(head + b"\r\n\r\n")
        assert await read_until(reader, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await _read_response(reader))[0] == 200


async def test_too_large_body_is_not_asked_for(start):
    _, port = await start(max_body_bytes=1024)
    async with connect(port) as (reader, writer):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5000\r\n\r\n"
        )
        assert (await _read_response(reader))[0] == 413


async def test_chunked_body_in_pieces(start, plane, text):
    plane.script = say(text, "hello")
    _, port = await start()
    data = json.dumps(BODY).encode()
    async with connect(port) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in data:
            writer.write(b"1\r\n%c\r\n" % byte)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        status, _, body = await _read_response(reader)
        assert status == 200
        assert json.loads(body)["choices"][0]["text"] == "hello"


async def test_pipelined_requests_are_answered_in_order_on_one_connection(start, plane, text):
    plane.script = say(text, "hello")
    _, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", STREAM) + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        stream = await read_until(reader, b"\r\n0\r\n\r\n")
        assert stream.count(b"data: [DONE]") == 1
        assert (await _read_response(reader))[0] == 200


@pytest.mark.parametrize("headers", [{}, {"Connection": "keep-alive"}], ids=["plain", "keep-alive"])
async def test_http_1_0_stream_ends_with_the_connection(start, plane, text, headers):
    plane.script = say(text, "hello")
    _, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", STREAM, headers, version="1.0"))
        async with asyncio.timeout(5):
            answer = await reader.read()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")


async def test_no_delay_is_set(start, plane):
    api, port = await start()
    async with connect(port) as (_, writer):
        writer.write(request_bytes("/v1/completions", STREAM))
        await plane.wait(lambda: bool(plane.live))
        (connection,) = api._server.connections
        raw = connection.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_one_write_per_engine_message(start, plane, text):
    _, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", STREAM))
        await plane.wait(lambda: bool(plane.live))
        ids = text.encode_now("hello world", add_special_tokens=False)
        plane.emit("req-1", ids[:1])
        await read_until(reader, b"\n\n\r\n")
        plane.emit("req-1", ids[1:])
        event = await read_until(reader, b"\n\n\r\n")
        assert event.count(b"data: ") == 1


async def test_interval_sends_every_kth_token_after_the_first(start, plane, text):
    _, port = await start(stream_interval_tokens=3)
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", STREAM))
        await plane.wait(lambda: bool(plane.live))
        letters = [text.encode_now(letter, add_special_tokens=False)[0] for letter in "abcdefgh"]
        plane.emit("req-1", letters[:1])
        first = await read_until(reader, b"\n\n\r\n")
        for letter in letters[1:]:
            plane.emit("req-1", [letter])
        plane.finish("req-1")
        rest = await read_until(reader, b"\r\n0\r\n\r\n")
        texts = [json.loads(e.split(b"\n\n")[0])["choices"][0]["text"] for e in (first + rest).split(b"data: ")[1:-1]]
        assert texts == ["a", "bcd", "efg", "h"]


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_client_that_goes_while_queued_is_cancelled(start, plane, body):
    api, port = await start()
    async with connect(port) as (_, writer):
        writer.write(request_bytes("/v1/completions", body))
        await plane.wait(lambda: bool(plane.live))
    await plane.wait(lambda: plane.cancelled == [("req-1", "client_gone")])
    assert not plane.live
    await until(lambda: api.metrics.answers == {("http", "499", "client_gone"): 1})


async def test_client_that_goes_while_nothing_is_sent_is_cancelled(start, plane):
    """Between two tokens far apart, only what is written to it tells that a client has gone."""
    _, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", STREAM))
        await plane.wait(lambda: bool(plane.live))
        plane.emit("req-1", [100])
        await read_until(reader, b"\n\n\r\n")
    await plane.wait(lambda: plane.cancelled == [("req-1", "client_gone")])


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("when", ["with-the-request", "while-queued", "in-mid-stream"])
async def test_client_that_sends_no_more_gets_its_answer(start, plane, body, version, when):
    _, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", body, version=version))
        if when == "with-the-request":
            writer.write_eof()
        await plane.wait(lambda: bool(plane.live))
        if when == "while-queued":
            writer.write_eof()
        plane.emit("req-1", [100])
        start_of_answer = await read_until(reader, b"\n\n") if body["stream"] else b""
        if when == "in-mid-stream":
            writer.write_eof()
            if body["stream"]:
                # The comment: the router has seen the end.
                start_of_answer += await read_until(reader, b":\n\n")
        plane.emit("req-1", [101])
        plane.finish("req-1")
        async with asyncio.timeout(5):
            answer = start_of_answer + await reader.read()
    assert not plane.cancelled
    assert answer.count(b" 200 OK") == 1
    if body["stream"]:
        assert answer.count(b'"text":') == 3
        assert answer.count(b"data: [DONE]") == 1
    else:
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2


async def test_requests_sent_before_the_end_are_all_answered(start, plane, text):
    plane.script = say(text, "hello")
    _, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", BODY) * 3)
        writer.write_eof()
        async with asyncio.timeout(5):
            answer = await reader.read()
    assert answer.count(b" 200 OK") == 3


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", request_bytes("/v1/completions", BODY)[:-3]], ids=len)
async def test_client_that_ends_before_its_request_is_closed(start, plane, sent):
    _, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(5):
            assert await reader.read() == b""
    assert not plane.admitted


async def test_client_that_goes_in_mid_stream_harms_no_other(start, plane):
    _, port = await start()
    async with connect(port) as (submissions, stays_writer):
        stays_writer.write(request_bytes("/v1/completions", STREAM))
        await plane.wait(lambda: len(plane.live) == 1)
        async with connect(port) as (goes, goes_writer):
            goes_writer.write(request_bytes("/v1/completions", STREAM))
            await plane.wait(lambda: len(plane.live) == 2)
            plane.emit("req-1", [100])
            plane.emit("req-2", [100])
            await read_until(goes, b"\n\n\r\n")
            goes_writer.transport.abort()
            for _ in range(50):  # tokens keep coming whatever the connection's state
                plane.emit("req-2", [100])
                plane.emit("req-1", [100])
                await asyncio.sleep(0)
        await plane.wait(lambda: bool(plane.cancelled))
        assert plane.cancelled == [("req-2", "client_gone")]
        plane.finish("req-1")
        events = await read_until(submissions, b"\r\n0\r\n\r\n")
        assert events.count(b'"finish_reason":null') == 51


@contextlib.asynccontextmanager
async def _stall(plane, port, count=1):
    """Starts streams whose clients read nothing of their own accord."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(count):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.settimeout(0)
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
            reader, writer = await stack.enter_async_context(connect(None, sock=raw, limit=1024))
            writer.write(request_bytes("/v1/completions", {**STREAM, "max_tokens": 500}))
            clients.append(reader)
        await plane.wait(lambda: len(plane.live) == count)
        yield clients


async def test_slow_reader_gets_every_character_once_and_in_large_chunks(start, plane, text):
    api, port = await start(write_buffer_bytes=1024, max_stream_buffered_bytes=64 * 1024 * 1024)
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
    api, port = await start(write_buffer_bytes=1024, max_stream_buffered_bytes=100_000)
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
        assert "connection" not in (await _read_response(reader))[1]
        api.announce_close()
        writer.write(request_bytes("/v1/completions", BODY))
        status, headers, _ = await _read_response(reader)
        assert (status, headers["connection"], headers["server"]) == (200, "close", "sluice")
    async with connect(port) as (reader, writer):
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        status, _, body = await _read_response(reader)
        assert (status, json.loads(body)) == (503, {"status": "not ready", "reason": "closing"})


async def test_total_limit_sheds_the_largest_first(start, plane, text):
    limits = {"max_stream_buffered_bytes": 10**9, "max_total_buffered_bytes": 600_000}
    api, port = await start(write_buffer_bytes=1024, **limits)
    ids = text.encode_now("hello world ", add_special_tokens=False) * 50
    async with _stall(plane, port, count=3):
        while len(api.slow_readers) < 3:
            for number in (1, 2, 3):
                plane.emit(f"req-{number}", ids)
            await asyncio.sleep(0)
        for _ in range(1000):
            plane.emit("req-2", ids)
        api.slow_readers.sweep(plane.now())
        assert plane.cancelled == [("req-2", "slow_reader")]
        assert api.slow_readers.num_shed == {"total_bytes": 1}


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
