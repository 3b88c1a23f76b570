"""One HTTP/1.1 connection: aiohttp's parsing and keep-alive, with synchronous writes and time limits."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion11, RawRequestMessage

from sluice_router.api.http.http_errors import REQUEST_ID_HEADER, format_error
from sluice_router.api.http.response_streams import ClientStream, SseResponseStream
from sluice_router.errors import InvalidRequestError

MAX_HEADER_BYTES = 16 * 1024  # request line and headers together
HEADER_TIMEOUT_S = 10.0  # from the first byte of a request to the end of its headers
IDLE_TIMEOUT_S = 75.0  # between two requests of a connection
WRITE_BUFFER_BYTES = 64 * 1024  # unsent bytes at which a client counts as paused
# State of a connection in Linux's tcp_info once the peer has reset it.
TCP_CLOSED = 7
# What a client that has sent its last byte may get at any time, and does not take for a part of its answer: a comment
# between server-sent events (HTML Standard, 9.2.6), and an interim response before an answer (RFC 9110, 15.2).
COMMENT = b":\n\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# How long a client's reset may take to come; the sweep looks again.
RESET_WAIT_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Limits of a connection.

    Args:
        header_timeout_s: From the first byte of a request to the end of its headers.
        write_buffer_bytes: What the transport holds before the client counts as paused.
        max_paused_s: How long a client may stay paused.
        clock: The data plane's clock.
        mark: Headers of every answer to a request: its id, and what lets a page read it.
    """

    header_timeout_s: float
    write_buffer_bytes: int
    max_paused_s: float
    clock: Callable[[], float]
    mark: Callable[[web.BaseRequest], dict[str, str]]


class EdgeConnection(web.RequestHandler):
    """A client's connection.

    Args:
        settings: Its limits.
        server: aiohttp's server.
        loop: The event loop.
        arguments: aiohttp's.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        **arguments: Any,
    ) -> None:
        super().__init__(server, loop=loop, **arguments)
        self._settings = settings
        self._event_loop = loop
        self._first_byte_s: float | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_serving = False
        self._paused_since_s = 0.0
        self._on_lost: Callable[[], None] | None = None
        self._response_streams: Sequence[SseResponseStream] = ()
        self._stream: ClientStream | None = None
        self._is_half_closed = False
        self._last_message: tuple[object, StreamReader] | None = None
        self._num_answered = 0

    def begin_request(self) -> float:
        """Notes that a request's headers are complete.

        Returns:
            When its first byte came, on the data plane's clock.
        """
        self._is_serving = True
        self._cancel_header_timer()
        arrival_s, self._first_byte_s = self._first_byte_s, None
        return self._settings.clock() if arrival_s is None else arrival_s

    def end_request(self) -> None:
        """Notes that a request is answered."""
        self._is_serving = False
        self._num_answered += 1
        self._on_lost = None
        self._response_streams = ()
        self._stream = None
        if self._is_half_closed and not self._messages:
            # No further request can come.
            self.close()

    def close_when_idle(self) -> None:
        """Closes now, or as soon as the request under way is answered."""
        if self._is_serving:
            self.close()
        else:
            self.force_close()

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Has ``on_lost`` called, synchronously, when the client goes before the request is answered."""
        self._on_lost = on_lost
        if self.transport is None:
            on_lost()

    def attach(self, response_streams: Sequence[SseResponseStream], stream: ClientStream) -> None:
        """Calls an answer's streams when the client does not keep up, and when it has drained.

        Args:
            response_streams: Of the answer's choices.
            stream: Where they write.
        """
        self._response_streams = response_streams
        self._stream = stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sets when a client counts as paused, and how long the kernel waits for one that reads nothing."""
        cast("asyncio.Transport", transport).set_write_buffer_limits(high=self._settings.write_buffer_bytes)
        raw = transport.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._settings.max_paused_s * 1000))
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Starts the headers' clock with the first byte of a request."""
        if not self._is_serving and self._first_byte_s is None and data:
            self._first_byte_s = self._settings.clock()
        super().data_received(data)
        if self._messages:
            self._last_message = self._messages[-1]
        elif self._first_byte_s is not None and self._header_timer is None and not self._is_serving:
            # Most headers come whole, and need no timer.
            self._header_timer = self._event_loop.call_later(self._settings.header_timeout_s, self.force_close)

    def pause_writing(self) -> None:
        """Notes since when the client does not keep up."""
        self._paused_since_s = self._settings.clock()
        super().pause_writing()
        for response_stream in self._response_streams:
            response_stream.on_paused(self._paused_since_s)

    def abort_if_paused(self, now: float) -> None:
        """Closes at once if the client has been paused for too long; for answers that do not stream.

        Args:
            now: In seconds, on the data plane's clock.
        """
        is_late = self.writing_paused and now - self._paused_since_s > self._settings.max_paused_s
        if is_late and self.transport is not None:
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection when the client only sends no more, as ``nc -N`` does; an answer still goes out.

        A client that is gone sends the same end, and answers what is written next with a reset: that ends its request.
        With TLS there is no half-closed connection.

        Returns:
            Whether the connection stays open.
        """
        transport = self.transport
        if transport is None or transport.get_extra_info("sslcontext") is not None or not self._has_whole_request():
            return False
        self._is_half_closed = True
        if self._stream is not None:
            self._stream.write(COMMENT)
        elif self._speaks_http_1_1():
            transport.write(CONTINUE)
        self._event_loop.call_later(RESET_WAIT_S, self.abort_if_reset)
        return True

    def abort_if_reset(self) -> None:
        """Closes a half-closed connection whose client is gone. Nobody reads from it, so nothing else says so."""
        if not self._is_half_closed or self.transport is None or not hasattr(socket, "TCP_INFO"):
            return
        raw = self.transport.get_extra_info("socket")
        if raw is not None and raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSED:
            self.transport.abort()

    def _has_whole_request(self) -> bool:
        """Whether the last request is not answered yet and has come completely, or with a body that cannot be read.

        aiohttp counts what it reads.
        """
        last = self._last_message
        if last is None or self._request_count <= self._num_answered:
            return False
        return last[1].is_eof() or last[1].exception() is not None

    def _speaks_http_1_1(self) -> bool:
        head = None if self._last_message is None else self._last_message[0]
        return isinstance(head, RawRequestMessage) and head.version >= HttpVersion11

    def resume_writing(self) -> None:
        """Lets the stream go on."""
        super().resume_writing()
        for response_stream in self._response_streams:
            response_stream.on_drained()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancels the request in this very tick."""
        self._cancel_header_timer()
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answers what cannot be parsed, and our own faults, in OpenAI's form."""
        headers = self._settings.mark(request)
        if status >= 500:
            self.log_exception(
                "fault while answering %s %s of request %s",
                request.method,
                request.path,
                headers[REQUEST_ID_HEADER],
                exc_info=exc,
            )
            body = {"error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal"}}
        else:
            first_line = (message or "bad request").splitlines()[0]
            body = format_error(InvalidRequestError(f"malformed HTTP request: {first_line}", code="malformed_http"))
        response = web.json_response(body, status=status, headers=headers)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Logs our own faults; a body that cannot be read is the client's, and it is answered."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class EdgeServer(web.Server):
    """Makes a connection object per client.

    Args:
        handler: Answers requests.
        settings: Limits of a connection.
        loop: The event loop.
        arguments: aiohttp's, for each connection.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        settings: ConnectionSettings,
        loop: asyncio.AbstractEventLoop,
        **arguments: Any,
    ) -> None:
        super().__init__(handler, handler_cancellation=True, **arguments)
        self._settings = settings
        self._event_loop = loop
        self._arguments = arguments

    def __call__(self) -> EdgeConnection:
        """Makes a connection."""
        return EdgeConnection(self._settings, self, self._event_loop, **self._arguments)

    def sweep(self, now: float) -> None:
        """Closes connections whose clients have been paused for too long.

        Args:
            now: In seconds, on the data plane's clock.
        """
        for connection in self._edge_connections():
            connection.abort_if_paused(now)
            connection.abort_if_reset()

    def close_idle(self) -> None:
        """Closes connections that have no request under way; the others when it is answered."""
        for connection in self._edge_connections():
            connection.close_when_idle()

    def _edge_connections(self) -> list[EdgeConnection]:
        return [connection for connection in self.connections if isinstance(connection, EdgeConnection)]


class EdgeSite(web.SockSite):
    """A listener whose clients must end TLS's handshake in time.

    Args:
        runner: aiohttp's.
        sock: Listens.
        backlog: Most connections that wait to be accepted.
        ssl_context: Of encrypted connections; None: they are not.
        handshake_timeout_s: Longest handshake; asyncio's own limit is a minute.
    """

    def __init__(
        self,
        runner: web.ServerRunner,
        sock: socket.socket,
        *,
        backlog: int,
        ssl_context: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(runner, sock, backlog=backlog, ssl_context=ssl_context)
        self._handshake_timeout_s = handshake_timeout_s

    async def start(self) -> None:
        """Listens."""
        if self._ssl_context is None:
            await super().start()
            return
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None, "the runner is set up before its sites start"
        self._server = await asyncio.get_running_loop().create_server(
            server,
            sock=self._sock,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=self._handshake_timeout_s,
        )


def check_header_size(request: web.BaseRequest, limit: int = MAX_HEADER_BYTES) -> None:
    """Refuses request line and headers that have more bytes than ``limit``; raises ``InvalidRequestError``."""
    # Colon, space and line end; the parser has bounded each line and their number.
    size = len(request.raw_path) + sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > limit:
        message = f"the request's headers have {size} bytes; the limit is {limit}"
        raise InvalidRequestError(message, code="headers_too_large")


def connection_of(request: web.BaseRequest) -> EdgeConnection:
    """Returns the connection that a request came on."""
    connection = request.protocol
    assert isinstance(connection, EdgeConnection), "EdgeServer makes all connections"
    return connection


class WrittenResponse(web.StreamResponse):
    """Tells aiohttp of an answer that ``HttpStream`` has written.

    Args:
        keeps_connection: Whether the connection stays open behind it.
    """

    def __init__(self, *, keeps_connection: bool) -> None:
        super().__init__()
        self._keeps_connection = keeps_connection

    @property
    def prepared(self) -> bool:
        """Its head is out."""
        return True

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection stays open behind it."""
        return self._keeps_connection

    async def prepare(self, request: web.BaseRequest) -> None:
        """Writes nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Writes nothing."""
