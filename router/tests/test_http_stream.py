"""A streamed answer on its way to the transport: how many writes it takes, and what becomes of a client that left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from edge_fakes import FakePlane, connect, read_until, request_bytes, say

from sluice_router.api.http.http_api import HttpApi
from sluice_router.api.http.http_stream import HttpStream

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class Transport:
    """Keeps what is written, write by write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.writes.append(data)

    def get_write_buffer_size(self) -> int:
        return 7

    def abort(self) -> None:
        self.is_closed = True


class Connection:
    """What a stream sees of a connection."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.writing_paused = False


@pytest.fixture
def connection() -> Connection:
    return Connection()


def make_stream(connection: Any, *, is_chunked: bool = True) -> HttpStream:
    stream = HttpStream(connection, is_chunked=is_chunked)
    stream.hold(HEAD)
    return stream


def test_head_and_first_events_are_one_write(connection):
    stream = make_stream(connection)
    stream.write(b"role")
    stream.write(b"token")
    assert connection.transport.writes == []
    stream.release()
    stream.write(b"next")
    assert connection.transport.writes == [HEAD + b"4\r\nrole\r\n5\r\ntoken\r\n", b"4\r\nnext\r\n"]


@pytest.mark.parametrize("size", [1, 15, 16, 1023, 1024, 1025, 70_000])
def test_each_chunk_says_its_size_in_hexadecimal(connection, size):
    stream = make_stream(connection)
    stream.release()
    stream.write(b"x" * size)
    stream.end(b"y" * size)
    head = f"{size:x}\r\n".encode()
    assert connection.transport.writes[1:] == [
        head + b"x" * size + b"\r\n",
        head + b"y" * size + b"\r\n" + LAST_CHUNK,
    ]


def test_an_answer_that_is_whole_at_once_is_one_write(connection):
    stream = make_stream(connection)
    stream.end(b"all")
    stream.release()
    assert connection.transport.writes == [HEAD + b"3\r\nall\r\n" + LAST_CHUNK]


def test_the_end_is_one_write_and_nothing_follows_it(connection):
    stream = make_stream(connection)
    stream.release()
    stream.end(b"end")
    stream.write(b"late")
    stream.end(b"later")
    stream.abort()
    assert connection.transport.writes == [HEAD, b"3\r\nend\r\n" + LAST_CHUNK]
    assert stream.num_buffered_bytes == 0
    assert not connection.transport.is_closed


def test_http_1_0_gets_the_bytes_as_they_are(connection):
    stream = make_stream(connection, is_chunked=False)
    stream.write(b"token")
    stream.release()
    stream.end(b"end")
    assert connection.transport.writes == [HEAD + b"token", b"end"]


def test_a_write_to_a_closed_transport_is_dropped_and_noted(connection):
    stream = make_stream(connection)
    stream.release()
    assert not stream.is_lost
    connection.transport.is_closed = True
    stream.end(b"end")
    assert stream.is_lost
    assert connection.transport.writes == [HEAD]


def test_a_stream_tells_of_its_transport_and_closes_it(connection):
    stream = make_stream(connection)
    assert (stream.is_writable, stream.num_buffered_bytes, stream.is_lost, stream.keeps_connection) == (
        True,
        7,
        False,
        True,
    )
    connection.writing_paused = True
    assert not stream.is_writable
    stream.abort()
    assert connection.transport.is_closed


@pytest.mark.parametrize("is_held", [True, False])
def test_nothing_is_written_of_nothing(connection, is_held):
    """A chunk of no bytes would end the answer."""
    stream = make_stream(connection)
    if not is_held:
        stream.release()
    stream.write(b"")
    stream.release()
    stream.release()
    assert connection.transport.writes == [HEAD]


def test_a_connection_that_was_lost_before_the_answer_has_no_transport(connection):
    connection.transport = None
    stream = make_stream(connection)
    stream.write(b"token")
    assert (stream.num_buffered_bytes, stream.is_lost) == (0, False)
    stream.release()
    assert stream.is_lost
    stream.abort()
    stream.end(b"end")


HEADS = [
    # version, Connection of the request, the router drains, chunked, Connection of the answer, stays open
    ("1.1", None, False, True, None, True),
    ("1.1", "keep-alive", False, True, None, True),
    ("1.1", "close", False, True, "close", False),
    ("1.1", None, True, True, "close", False),
    ("1.0", None, False, False, None, False),
    ("1.0", "keep-alive", False, False, None, False),
    ("1.0", "keep-alive", True, False, None, False),
]


@pytest.mark.parametrize(("version", "asked", "is_closing", "is_chunked", "said", "stays"), HEADS)
async def test_the_head_says_how_the_stream_ends(text, version, asked, is_closing, is_chunked, said, stays):
    api = HttpApi(FakePlane(say(text, "hello world")), text)
    port = await api.start("127.0.0.1", 0)
    if is_closing:
        await api.announce_close()
    async with connect(port) as (reader, writer):
        headers = {} if asked is None else {"Connection": asked}
        body = {"prompt": "hi", "stream": True, "max_tokens": 1}
        writer.write(request_bytes("/v1/completions", body, headers, version=version))
        first, *lines = (await read_until(reader, b"\r\n\r\n")).decode().rstrip().split("\r\n")
        found = dict(line.split(": ", 1) for line in lines)
        assert first == f"HTTP/{version} 200 OK"
        assert len(found) == len(lines)
        assert (found.get("Transfer-Encoding"), found.get("Connection")) == ("chunked" if is_chunked else None, said)
        await read_until(reader, LAST_CHUNK if is_chunked else b"data: [DONE]\n\n")
        if stays:
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await read_until(reader, b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        else:
            async with asyncio.timeout(60):
                assert await reader.read() == b""
    await api.close(0)


async def test_a_connection_serves_stream_after_stream(text):
    api = HttpApi(FakePlane(say(text, "hello world")), text)
    port = await api.start("127.0.0.1", 0)
    request = request_bytes("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 1})
    async with connect(port) as (reader, writer):
        for _ in range(3):
            writer.write(request)
            head = await read_until(reader, b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n")
            assert b"\r\nTransfer-Encoding: chunked\r\n" in head
            assert b"\r\nServer: sluice\r\nDate: " in head
            assert b"Connection" not in head
            body = await read_until(reader, b"\r\n" + LAST_CHUNK)
            assert body.endswith(b"data: [DONE]\n\n\r\n" + LAST_CHUNK)
    await api.close(0.1)


async def test_a_client_that_asks_for_the_end_of_the_connection_gets_it_behind_the_stream(text):
    api = HttpApi(FakePlane(say(text, "hello world")), text)
    port = await api.start("127.0.0.1", 0)
    async with connect(port) as (reader, writer):
        body = {"prompt": "hi", "stream": True, "max_tokens": 1}
        writer.write(request_bytes("/v1/completions", body, {"Connection": "close"}))
        assert b"\r\nConnection: close\r\n" in await read_until(reader, b"\r\n\r\n")
        async with asyncio.timeout(60):
            assert (await reader.read()).endswith(LAST_CHUNK)
    await api.close(0.1)
