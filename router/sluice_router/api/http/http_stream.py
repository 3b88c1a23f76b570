"""A streamed answer over HTTP: its head, its chunks and its end, past aiohttp."""

from __future__ import annotations

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion11

from sluice_router.api.http.http_connection import connection_of
from sluice_router.api.http.response_streams import ClientStream
from sluice_router.api.openai_responses import CONTENT_TYPE

SERVER = "sluice"
# Of the head of every stream.
FIXED_LINES = (f"Content-Type: {CONTENT_TYPE}", "Cache-Control: no-cache", f"Server: {SERVER}")
# What HTTP/1.1 puts around a chunk: its size in hexadecimal before it (RFC 9112, section 7.1). Most events are short.
LINE_END = b"\r\n"
CHUNK_SIZES = tuple(b"%x\r\n" % size for size in range(1024))
LAST_CHUNK = b"\r\n0\r\n\r\n"


class HttpStream(ClientStream):
    """A streamed answer, written past aiohttp's coroutines: head and first events in one piece, and the end in one.

    Args:
        connection: The client's connection.
        is_chunked: Whether the body is sent in HTTP chunks; HTTP/1.0 has none.

    Attributes:
        is_lost: The client had gone when something was to be written.
        keeps_connection: Whether the head says that the connection stays open behind it.
    """

    __slots__ = ("_connection", "_held", "_is_chunked", "_is_over", "_transport", "is_lost", "keeps_connection")

    def __init__(self, connection: web.RequestHandler, *, is_chunked: bool) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._is_chunked = is_chunked
        self._held: list[bytes] | None = None
        self._is_over = False
        self.is_lost = False
        self.keeps_connection = True

    @property
    def is_writable(self) -> bool:
        """False while the transport is full."""
        return not self._connection.writing_paused

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes in the transport."""
        return 0 if self._transport is None or self._is_over else self._transport.get_write_buffer_size()

    def hold(self, head: bytes) -> None:
        """Begins with the answer's head, and keeps what is written until ``release``."""
        self._held = [head]

    def release(self) -> None:
        """Writes what was kept."""
        held, self._held = self._held, None
        if held:
            self._send(b"".join(held))

    def write(self, data: bytes) -> None:
        """Writes; to a closed transport, nothing."""
        if data and not self._is_over:
            self._send(_frame(data, LINE_END) if self._is_chunked else data)

    def abort(self) -> None:
        """Closes at once."""
        if self._transport is not None and not self._is_over:
            self._transport.abort()

    def end(self, data: bytes) -> None:
        """Writes the last bytes, at least one, and drops what is written from here on."""
        if not self._is_over:
            self._is_over = True
            self._send(_frame(data, LAST_CHUNK) if self._is_chunked else data)

    def _send(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
        elif self._transport is None or self._transport.is_closing():
            # uvloop raises on a closed transport, and the client's end is heard of elsewhere.
            self.is_lost = True
        else:
            self._transport.write(data)


def _frame(data: bytes, end: bytes) -> bytes:
    size = len(data)
    return b"".join((CHUNK_SIZES[size] if size < len(CHUNK_SIZES) else b"%x\r\n" % size, data, end))


def open_stream(request: web.BaseRequest, headers: dict[str, str], *, keeps_connection: bool) -> HttpStream:
    """Begins a stream with the answer's head, which it holds until it is released.

    Args:
        request: The HTTP request.
        headers: Of the answer.
        keeps_connection: Whether the connection stays open behind it.
    """
    version = request.version
    is_chunked = version >= HttpVersion11
    lines = [f"HTTP/{version.major}.{version.minor} 200 OK", *FIXED_LINES, f"Date: {rfc822_formatted_time()}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if is_chunked:
        lines.append("Transfer-Encoding: chunked")
        if not keeps_connection:
            lines.append("Connection: close")
    stream = HttpStream(connection_of(request), is_chunked=is_chunked)
    stream.keeps_connection = keeps_connection
    stream.hold("\r\n".join([*lines, "", ""]).encode())
    return stream
