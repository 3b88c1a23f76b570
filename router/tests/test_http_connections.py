"""The connection itself: malformed HTTP, limits, timeouts, disconnects, slow readers, closing. On both event loops."""

from __future__ import annotations

import asyncio
import json
import socket
import zlib

import pytest
from data_plane_harness import until
from edge_fakes import FakePlane, connect, read_until, request_bytes, say
from http_connections_harness import BODY, STREAM, read_response, starting_apis

from sluice_router.api.http.http_api import HttpSettings
from sluice_router.api.slow_readers import SlowReaderLimits


@pytest.fixture
async def plane():
    return FakePlane()


@pytest.fixture
async def start(plane, text):
    async with starting_apis(plane, text) as start_api:
        yield start_api


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
        found, headers, body = await read_response(reader)
        assert found == status, body
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert headers["content-type"].startswith("application/json")
        assert headers["x-request-id"].startswith("req-")
    async with connect(port) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_response(reader))[0] == 200
    assert not plane.admitted


async def test_compressed_body_is_limited_unpacked(start):
    _, port = await start(max_body_bytes=10_000)
    async with connect(port) as (reader, writer):
        packed = zlib.compress(b'{"prompt": "' + b"x" * 1_000_000 + b'"}')
        writer.write(request_bytes("/v1/completions", packed, {"Content-Encoding": "deflate"}))
        assert (await read_response(reader))[0] == 413


@pytest.mark.parametrize("sends_more", [True, False])
async def test_a_body_that_is_not_packed_as_it_says_is_the_clients_fault(start, caplog, sends_more):
    _, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", BODY, {"Content-Encoding": "gzip"}))
        if not sends_more:
            writer.write_eof()
        async with asyncio.timeout(5):
            answer = await reader.read()
    assert answer.count(b"HTTP/1.1 400") == 1
    assert b"Connection: close" in answer
    assert b"the body cannot be read" in answer
    assert not caplog.records


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("is_divided", [False, True], ids=["at once", "body behind the headers"])
async def test_body_that_is_not_packed_as_it_says_is_refused(start, plane, path, encoding, is_divided):
    """A fault that is logged would fail this test."""
    _, port = await start()
    async with connect(port) as (reader, writer):
        data = request_bytes(path, BODY, {"Content-Encoding": encoding})
        head, _, body = data.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        if is_divided:
            await asyncio.sleep(0.01)
        writer.write(body)
        status, headers, answer = await read_response(reader)
        expected = (400, "malformed_http") if path == "/v1/completions" else (404, "unsupported_endpoint")
        assert (status, json.loads(answer)["error"]["code"]) == expected
        assert headers["connection"] == "close"
        async with asyncio.timeout(5):
            assert await reader.read() == b""
    assert not plane.admitted


def test_a_router_keeps_clients_to_these_limits():
    assert HttpSettings() == HttpSettings(
        max_body_bytes=8 * 1024 * 1024,
        body_timeout_s=60,
        max_header_bytes=16 * 1024,
        header_timeout_s=10,
        idle_timeout_s=75,
        stream_interval_tokens=1,
        comment_interval_s=10,
        write_buffer_bytes=64 * 1024,
        slow_readers=SlowReaderLimits(max_stream_bytes=256 * 1024, max_paused_s=30, max_total_bytes=64 * 1024 * 1024),
    )


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
            await read_response(other)
            plane.clock_s = now_s + 3
            writer.write(data[10:])
            await (read_until(reader, b"\r\n0\r\n\r\n") if body is STREAM else read_response(reader))
    assert [request.arrival_s for request in plane.admitted] == [5.0, 100.0, 200.0]


@pytest.mark.parametrize("num_before", [0, 1, 2])
async def test_headers_that_do_not_end_close_the_connection_whichever_request_they_are_of(start, plane, num_before):
    _, port = await start(header_timeout_s=0.2)
    async with connect(port) as (reader, writer):
        for _ in range(num_before):
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await read_response(reader))[0] == 200
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        async with asyncio.timeout(5):
            assert await reader.read() == b""


async def test_idle_connection_is_closed(start):
    _, port = await start(idle_timeout_s=0.1)
    async with connect(port) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_response(reader))[0] == 200
        async with asyncio.timeout(5):
            assert await reader.read() == b""


async def test_body_that_does_not_come_times_out(start):
    _, port = await start(body_timeout_s=0.1)
    async with connect(port) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        status, headers, body = await read_response(reader)
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
        writer.write(head.replace(b"100-continue", b"tea") + b"\r\n\r\n" + body)
        assert json.loads((await read_response(reader))[2])["error"]["code"] == "expectation_failed"
        writer.write(head + b"\r\n\r\n")
        assert await read_until(reader, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await read_response(reader))[0] == 200


async def test_answers_are_counted_by_status_and_reason_and_refusals_quote_200_characters_of_a_path(start, plane, text):
    plane.script = say(text, "hello")
    api, port = await start()
    messages = []
    async with connect(port) as (reader, writer):
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/completions", {**BODY, "max_tokens": 0}),
            ("/" + "x" * 300, BODY),
        ):
            writer.write(request_bytes(path, body))
            _, _, answer = await read_response(reader)
            messages.append(json.loads(answer).get("error", {}).get("message"))
    assert messages[2] == f"POST /{'x' * 199} is not served by this router"
    assert api.metrics.answers == {
        ("http", "200", ""): 1,
        ("http", "400", "invalid_value"): 1,
        ("http", "404", "unsupported_endpoint"): 1,
    }


@pytest.mark.parametrize("excess", [0, 1])
async def test_path_and_headers_may_have_as_many_bytes_as_the_limit_and_no_more(start, excess):
    _, port = await start(max_header_bytes=100)
    # A header counts with its colon, space and line end.
    path = "/livez?".ljust(100 - len("Host: x\r\n") + excess, "a")
    async with connect(port) as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        status, _, body = await read_response(reader)
    if not excess:
        assert status == 200
        return
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "headers_too_large")
    assert error["message"] == "the request's headers have 101 bytes; the limit is 100"


async def test_too_large_body_is_not_asked_for(start):
    _, port = await start(max_body_bytes=1024)
    async with connect(port) as (reader, writer):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5000\r\n\r\n"
        )
        assert (await read_response(reader))[0] == 413


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
        status, _, body = await read_response(reader)
        assert status == 200
        assert json.loads(body)["choices"][0]["text"] == "hello"


async def test_pipelined_requests_are_answered_in_order_on_one_connection(start, plane, text):
    plane.script = say(text, "hello")
    _, port = await start()
    async with connect(port) as (reader, writer):
        writer.write(request_bytes("/v1/completions", STREAM) + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        stream = await read_until(reader, b"\r\n0\r\n\r\n")
        assert stream.count(b"data: [DONE]") == 1
        assert (await read_response(reader))[0] == 200


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
