"""A client's connection on a played transport: what each call of the event loop makes of it, without a network."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.http import HttpVersion, HttpVersion10, HttpVersion11

from sluice_router.api.http.http_body import answer_expectation
from sluice_router.api.http.http_connection import (
    COMMENT,
    CONTINUE,
    RESET_WAIT_S,
    ConnectionSettings,
    EdgeConnection,
    EdgeServer,
    connection_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
GET_1_0 = b"GET /livez HTTP/1.0\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
ESTABLISHED, CLOSED = 1, 7
# What the connection itself calls later; aiohttp has timers too.
OWN_TIMERS = ("force_close", "abort_if_reset")


class PlayedSocket:
    """What the kernel is told and says."""

    # aiohttp sets nothing of TCP.
    family = socket.AF_UNIX

    def __init__(self) -> None:
        self.options: list[tuple[int, int, int]] = []
        self.state = ESTABLISHED

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)

    def getsockopt(self, *option: int) -> bytes:
        assert option == (socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return bytes([self.state])


class PlayedTransport(asyncio.Transport):
    """Keeps what is written, and what is asked of it."""

    def __init__(self, raw: PlayedSocket | None, *, is_tls: bool = False) -> None:
        super().__init__({"socket": raw, "sslcontext": object() if is_tls else None})
        self.written = b""
        self.told: list[Any] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.told.append((high, low))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.told.append("close")

    def abort(self) -> None:
        self.told.append("abort")

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class PlayedTimers:
    """A connection's own timers. Their loop is the running one: aiohttp's tasks take no other from Python 3.12 on."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._call_later = loop.call_later
        loop.call_later = self.call_later  # type: ignore[assignment]
        self.timers: list[tuple[float, Callable[..., Any], PlayedTimers.Handle]] = []

    class Handle:
        is_cancelled = False

        def cancel(self) -> None:
            self.is_cancelled = True

    def call_later(self, delay_s: float, callback: Callable[..., Any], *args: Any, **context: Any) -> Any:
        if getattr(callback, "__name__", "") not in OWN_TIMERS:
            return self._call_later(delay_s, callback, *args, **context)
        assert not args
        self.timers.append((delay_s, callback, self.Handle()))
        return self.timers[-1][2]

    def take(self) -> list[tuple[float, str]]:
        """Delays and callbacks of what is set and not cancelled."""
        taken = [(delay_s, call.__name__) for delay_s, call, handle in self.timers if not handle.is_cancelled]
        self.timers.clear()
        return taken


class Streams:
    """An answer's stream, and the response stream of its choice."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def on_paused(self, now: float) -> None:
        self.calls.append(now)

    def on_drained(self) -> None:
        self.calls.append("drained")

    def on_lost(self) -> None:
        self.calls.append("lost")


class Table:
    """A server with one connection, whose requests are answered when the test says so.

    Args:
        raw: The connection's socket, if it has one.
        is_tls: It is encrypted.
    """

    def __init__(self, raw: PlayedSocket | None = None, *, is_tls: bool = False) -> None:
        self.now_s = 100.0
        self.timers = PlayedTimers()
        self.go_on = asyncio.Event()
        self.arrivals_s: list[float] = []
        self.serving = asyncio.Event()
        settings = ConnectionSettings(
            header_timeout_s=3.0,
            write_buffer_bytes=1000,
            max_paused_s=1.5,
            clock=lambda: self.now_s,
            mark=lambda _: {"x-request-id": "req-7"},
        )
        loop = asyncio.get_running_loop()
        self.server = EdgeServer(self.handle, settings, loop, access_log=None, keepalive_timeout=60)
        self.raw = raw
        self.transport = PlayedTransport(raw, is_tls=is_tls)
        self.connection = self.server()
        self.connection.connection_made(self.transport)
        self.limits, self.transport.told = self.transport.told, []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = connection_of(request)
        assert connection is self.connection
        self.arrivals_s.append(connection.begin_request())
        self.serving.set()
        try:
            await self.go_on.wait()
            return web.Response(text="here")
        finally:
            connection.end_request()

    async def receive(self, data: bytes) -> None:
        """Bytes come; if they complete a request, its handler begins."""
        self.connection.data_received(data)
        await self.turn()

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def answer(self) -> None:
        """Answers the request that is served now."""
        self.go_on.set()
        self.go_on.clear()
        await self.turn()


@pytest.fixture
async def table() -> Table:
    return Table(PlayedSocket())


@pytest.mark.parametrize("has_socket", [True, False])
async def test_a_connection_sets_its_limits(*, has_socket: bool) -> None:
    table = Table(PlayedSocket() if has_socket else None)
    assert table.limits == [(1000, None)]
    if table.raw is not None:
        # Its fraction of a second counts.
        assert [option for option in table.raw.options if option[0] == socket.IPPROTO_TCP] == [
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1500)
        ]


async def test_headers_that_come_whole_need_no_timer(table: Table) -> None:
    await table.receive(GET)
    assert (table.arrivals_s, table.timers.take()) == ([100.0], [])


async def test_headers_have_one_timer_from_their_first_byte_and_their_end_stops_it(table: Table) -> None:
    await table.receive(b"")
    assert table.timers.take() == []
    await table.receive(GET[:5])
    table.now_s = 101.0
    await table.receive(GET[5:10])
    ((delay_s, callback, handle),) = table.timers.timers
    assert (delay_s, callback) == (3.0, table.connection.force_close)
    table.now_s = 102.0
    await table.receive(GET[10:])
    assert (table.arrivals_s, handle.is_cancelled) == ([100.0], True)


async def test_what_comes_during_an_answer_is_no_first_byte_and_the_next_request_has_its_own(table: Table) -> None:
    await table.receive(GET)
    table.now_s = 101.0
    await table.receive(GET[:5])
    assert table.timers.take() == []
    await table.answer()
    table.now_s = 102.0
    await table.receive(GET[5:9])
    assert [delay_s for delay_s, _ in table.timers.take()] == [3.0]
    await table.receive(GET[9:])
    assert table.arrivals_s == [100.0, 102.0]


async def test_a_lost_connection_has_no_timer(table: Table) -> None:
    await table.receive(GET[:5])
    table.connection.connection_lost(None)
    assert table.timers.take() == []


async def test_streams_hear_of_a_client_that_does_not_keep_up_until_the_answer_ends(table: Table) -> None:
    streams = Streams()
    await table.receive(GET)
    table.connection.attach([streams, streams], streams)  # type: ignore[list-item, arg-type]
    table.now_s = 107.0
    table.connection.pause_writing()
    assert table.connection.writing_paused
    table.connection.resume_writing()
    assert not table.connection.writing_paused
    assert streams.calls == [107.0, 107.0, "drained", "drained"]
    await table.answer()
    table.connection.pause_writing()
    table.connection.resume_writing()
    assert len(streams.calls) == 4


async def test_who_watches_hears_of_a_lost_client_at_once_and_once(table: Table) -> None:
    streams = Streams()
    await table.receive(GET)
    table.connection.watch(streams.on_lost)
    assert streams.calls == []
    table.connection.connection_lost(None)
    assert streams.calls == ["lost"]
    table.connection.connection_lost(None)
    assert streams.calls == ["lost"]
    table.connection.watch(streams.on_lost)
    assert streams.calls == ["lost", "lost"]


async def test_an_answered_request_hears_of_no_lost_client(table: Table) -> None:
    streams = Streams()
    await table.receive(GET)
    table.connection.watch(streams.on_lost)
    await table.answer()
    table.connection.connection_lost(None)
    assert streams.calls == []


@pytest.mark.parametrize(
    ("since_s", "until_s", "expected"),
    [(None, 900.0, []), (100.0, 101.5, []), (100.0, 101.6, ["abort"]), (200.0, 101.6, [])],
    ids=["reads", "paused for as long as it may", "for longer", "since later"],
)
async def test_a_client_that_is_paused_for_too_long_is_cut(
    table: Table, since_s: float | None, until_s: float, expected: list[str]
) -> None:
    if since_s is not None:
        table.now_s = since_s
        table.connection.pause_writing()
    table.server.sweep(until_s)
    assert table.transport.told == expected


async def test_a_client_that_is_paused_and_gone_is_left_alone(table: Table) -> None:
    table.connection.pause_writing()
    table.connection.connection_lost(None)
    table.connection.abort_if_paused(900.0)
    assert "abort" not in table.transport.told


@pytest.mark.parametrize(
    ("sent", "is_kept", "written"),
    [
        ([], False, b""),
        ([POST[:-1]], False, b""),
        ([POST], True, CONTINUE),
        ([GET_1_0], True, b""),
        ([b"no HTTP\r\n\r\n"], True, b""),
        ([POST, GET[:5]], True, CONTINUE),
        ([POST, POST[:-1]], False, b""),
    ],
    ids=["nothing", "a part", "whole", "HTTP 1.0", "malformed", "half a head behind", "half a body behind"],
)
async def test_the_end_of_a_client_keeps_the_connection_while_an_answer_is_due(
    table: Table, *, sent: list[bytes], is_kept: bool, written: bytes
) -> None:
    for data in sent:
        table.connection.data_received(data)
    assert table.connection.eof_received() is is_kept
    assert table.transport.written == written
    expected = [(RESET_WAIT_S, "abort_if_reset")] if is_kept else []
    assert [timer for timer in table.timers.take() if timer[1] != "force_close"] == expected


async def test_the_end_of_a_client_in_mid_stream_is_answered_with_a_comment(table: Table) -> None:
    streams = Streams()
    await table.receive(POST)
    table.connection.attach([], streams)  # type: ignore[arg-type]
    assert table.connection.eof_received()
    assert (streams.written, table.transport.written) == ([COMMENT], b"")


async def test_the_end_of_a_client_that_has_its_answer_closes(table: Table) -> None:
    await table.receive(POST)
    await table.answer()
    assert not table.connection.eof_received()


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "with TLS"])
async def test_the_end_of_a_client_closes_what_cannot_be_half_closed(*, is_lost: bool) -> None:
    table = Table(PlayedSocket(), is_tls=not is_lost)
    await table.receive(POST)
    if is_lost:
        table.connection.connection_lost(None)
    assert not table.connection.eof_received()


async def test_a_half_closed_connection_closes_behind_its_last_answer(table: Table) -> None:
    table.connection.data_received(GET + GET)
    await table.turn()
    table.connection.eof_received()
    await table.answer()
    assert table.transport.told == []
    assert len(table.arrivals_s) == 2
    await table.answer()
    assert table.transport.told == ["close"]
    assert table.transport.written.count(b"200 OK") == 2


async def test_an_open_connection_stays_open_behind_its_answer(table: Table) -> None:
    await table.receive(GET)
    await table.answer()
    assert table.transport.told == []


@pytest.mark.parametrize("state", [ESTABLISHED, CLOSED], ids=["alive", "reset"])
@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_half_closed_connection_that_was_reset_is_cut(table: Table, *, state: int, has_ended: bool) -> None:
    assert table.raw is not None
    await table.receive(GET)
    if has_ended:
        table.connection.eof_received()
    table.raw.state = state
    table.server.sweep(100.0)
    assert table.transport.told == (["abort"] if has_ended and state == CLOSED else [])


@pytest.mark.parametrize("has_socket", [True, False])
async def test_a_half_closed_connection_without_a_socket_or_client_is_left_alone(*, has_socket: bool) -> None:
    table = Table(PlayedSocket() if has_socket else None)
    await table.receive(GET)
    table.connection.eof_received()
    if table.raw is not None:
        table.raw.state = CLOSED
        table.connection.connection_lost(None)
    table.connection.abort_if_reset()
    assert "abort" not in table.transport.told


async def test_a_server_that_closes_cuts_idle_connections_and_lets_answers_end(table: Table) -> None:
    idle, idle_transport = table.server(), PlayedTransport(None)
    idle.connection_made(idle_transport)
    await table.receive(GET)
    await table.answer()
    await table.receive(GET)
    table.server.close_idle()
    await table.turn()
    assert (table.transport.told, idle_transport.told[1:]) == ([], ["close"])
    await table.answer()
    assert table.transport.told == ["close"]
    assert table.transport.written.count(b"200 OK") == 2


@pytest.mark.parametrize("message", [None, "a line\nand another"])
async def test_what_cannot_be_parsed_is_answered(table: Table, message: str | None) -> None:
    answer = table.connection.handle_error(None, 400, None, message)  # type: ignore[arg-type]
    assert answer.headers["x-request-id"] == "req-7"
    assert isinstance(answer, web.Response)
    assert (answer.status, answer.keep_alive) == (400, False)
    shown = {None: "bad request", "a line\nand another": "a line"}[message]
    expected = {
        "message": f"malformed HTTP request: {shown}",
        "type": "invalid_request_error",
        "param": None,
        "code": "malformed_http",
    }
    assert json.loads(answer.text or "")["error"] == expected


@pytest.mark.parametrize("state", ["open", "closing", "lost"])
async def test_who_waits_to_be_asked_for_a_body_is_asked_while_the_connection_is_open(table: Table, state: str) -> None:
    transport = (
        None if state == "lost" else SimpleNamespace(is_closing=lambda: state == "closing", write=table.transport.write)
    )
    request = SimpleNamespace(headers={"Expect": "100-Continue"}, version=HttpVersion11, transport=transport)
    answer_expectation(request)  # type: ignore[arg-type]
    assert table.transport.written == (CONTINUE if state == "open" else b"")


@pytest.mark.parametrize(("expects", "version"), [(None, HttpVersion11), ("100-continue", HttpVersion10)])
async def test_nobody_else_is_asked(table: Table, expects: str | None, version: HttpVersion) -> None:
    headers = {} if expects is None else {"Expect": expects}
    answer_expectation(SimpleNamespace(headers=headers, version=version, transport=table.transport))  # type: ignore[arg-type]
    assert table.transport.written == b""


async def test_connections_are_of_this_server(table: Table) -> None:
    assert isinstance(table.connection, EdgeConnection)
    assert table.server.connections == [table.connection]
