"""One call of ``sluice.v1.Engine/Attach``: gRPC over HTTP/2 on the event loop itself, with ``h2``.

grpc.aio hands every message through two threads before the loop sees it, which costs ten times what the message does.
Without coroutines, so that it is compiled.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from sluice.v1 import engine_pb2
from sluice_router.event_loop_bursts import BurstQueue
from sluice_router.observability.metrics import EngineTraffic

logger = logging.getLogger(__name__)

METHOD = f"/{engine_pb2.DESCRIPTOR.services_by_name['Engine'].full_name}/Attach"
# An iteration with its logprobs exceeds gRPC's usual 4 MiB.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
# What an engine may send before it hears that it was read; large, because the loop reads at once or is overloaded.
RECEIVE_WINDOW_BYTES = 16 * 1024 * 1024
# A frame's length (3 bytes), type, flags and stream (4 bytes) stand before it.
FRAME_HEADER_BYTES = 9
LENGTH_BYTES = 3
# A gRPC message is preceded by a flag, compressed or not, and its length (4 bytes, big endian).
PREFIX_BYTES = 5
# HTTP/2's name in TLS.
ALPN = "h2"
# A frame of 4 bytes of type WINDOW_UPDATE (8), without flags, and the largest window. Source: RFC 9113, section 6.9.
WINDOW_UPDATE = b"\0\0\4\x08\0"
MAX_WINDOW_BYTES = 2**31 - 1
# How long the last bytes of a stream have to leave.
CLOSE_S = 1.0
STATUS_NAMES = {str(code.value[0]): code.name.lower() for code in grpc.StatusCode}
# Headers are our own and gRPC's: h2 need not check their form.
_CONFIGURATION = H2Configuration(
    client_side=True,
    header_encoding="utf-8",
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
)


class StreamEndedError(Exception):
    """The stream is over; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """How a stream is encrypted, and who must be at its other end.

    Args:
        context: Shows our certificate and knows whose to trust.
        engine_name: Name that the engine's certificate must be for.
    """

    context: ssl.SSLContext
    engine_name: str


class EngineStream:
    """A call in progress, and the ``asyncio.Protocol`` of its connection; ``engine_connections.connect`` makes it.

    Args:
        authority: host:port, for the engine.
        traffic: Where its bytes are counted, HTTP/2's own included.
        burst_queue: The loop's, for messages of all streams.
        loop: The event loop.
        is_encrypted: The transport is.
    """

    def __init__(
        self,
        authority: str,
        traffic: EngineTraffic,
        burst_queue: BurstQueue,
        loop: asyncio.AbstractEventLoop,
        *,
        is_encrypted: bool = False,
    ) -> None:
        self._authority = authority
        self._is_encrypted = is_encrypted
        self._traffic = traffic
        self._burst_queue = burst_queue
        self._loop = loop
        self._http = H2Connection(_CONFIGURATION)
        self._transport: asyncio.Transport | None = None
        self._stream_id = 0
        # Type, flags and stream of frames that carry message bytes and nothing else.
        self._plain_data = b""
        self._frames = bytearray()
        self._received = bytearray()
        self._num_unacknowledged = 0
        self._messages: deque[engine_pb2.AttachResponse] = deque()
        self._is_queued = False
        self._handler: Callable[[engine_pb2.AttachResponse], None] | None = None
        self._outgoing: deque[memoryview] = deque()
        self._fault = ""
        self._first: asyncio.Future[engine_pb2.AttachResponse] | None = None
        self._has_first = False
        self._closed: asyncio.Future[str] = loop.create_future()
        self._disconnected: asyncio.Future[None] = loop.create_future()

    # --- for the connection --------------------------------------------------------------------------------------

    def send(self, message: engine_pb2.AttachRequest) -> None:
        """Writes a message, or queues it behind those that wait for the engine's window; after the end, drops it."""
        if self._fault:
            return
        data = message.SerializeToString()
        self._outgoing.append(memoryview(b"\0" + len(data).to_bytes(4, "big") + data))
        self._write()

    def read_first(self) -> asyncio.Future[engine_pb2.AttachResponse]:
        """Waits for the first message, or raises ``StreamEndedError`` if there is none."""
        first = self._first = self._loop.create_future()
        self._advance()
        return first

    def serve(self, handler: Callable[[engine_pb2.AttachResponse], None]) -> asyncio.Future[str]:
        """Hands all further messages to ``handler``, synchronously and in order.

        Returns:
            Why the stream ended.
        """
        self._handler = handler
        self._advance()
        return asyncio.shield(self._closed)

    def cancel(self, fault: str = "cancelled") -> None:
        """Ends the call at once; messages that were not handled are dropped."""
        self._messages.clear()
        if not self._fault and self._stream_id:
            self._http.reset_stream(self._stream_id, ErrorCodes.CANCEL)
            self._write_frames()
            if self._transport is not None:
                self._transport.close()
        self._end(fault)

    def wait_disconnected(self) -> asyncio.Future[None]:
        """Waits until the connection of an ended call is closed."""
        return asyncio.shield(self._disconnected)

    # --- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins the call."""
        self._transport = cast("asyncio.Transport", transport)
        if self._is_encrypted and transport.get_extra_info("ssl_object").selected_alpn_protocol() != ALPN:
            self._end("unavailable: the engine's port does not speak HTTP/2")
            return
        self._http.local_settings = Settings(
            client=True,
            initial_values={SettingCodes.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW_BYTES, SettingCodes.ENABLE_PUSH: 0},
        )
        self._http.initiate_connection()
        self._http.increment_flow_control_window(RECEIVE_WINDOW_BYTES)
        self._stream_id = self._http.get_next_available_stream_id()
        self._plain_data = b"\0\0" + self._stream_id.to_bytes(4, "big")
        self._http.send_headers(
            self._stream_id,
            [
                (":method", "POST"),
                (":scheme", "https" if self._is_encrypted else "http"),
                (":path", METHOD),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "sluice-router"),
            ],
        )
        self._write_frames()

    def data_received(self, data: bytes) -> None:
        """Takes what the engine sent."""
        self._traffic.num_bytes_up += len(data)
        if self._fault:
            return
        self._frames += data
        try:
            self._take_frames()
        except (ProtocolError, DecodeError, StreamEndedError) as error:
            self._end(f"internal: {error}")
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the call."""
        fault = str(exc or "the connection was closed")
        if self._is_encrypted and not self._has_first:
            # In TLS 1.3 a server checks the client's certificate after the client has begun to speak.
            fault += "; the engine may have refused this router's certificate"
        self._end(f"unavailable: {fault}")
        self._disconnected.set_result(None)

    def eof_received(self) -> None:
        """Lets the connection be closed, which ends the call."""

    def pause_writing(self) -> None:
        """Writes on: HTTP/2's windows bound what waits."""

    def resume_writing(self) -> None:
        """Changes nothing; see ``pause_writing``."""

    # --- inward --------------------------------------------------------------------------------------------------

    def _take_frames(self) -> None:
        """Takes the frames that are whole."""
        frames, start = self._frames, 0
        while len(frames) - start >= FRAME_HEADER_BYTES and not self._fault:
            payload = start + FRAME_HEADER_BYTES
            end = payload + int.from_bytes(frames[start : start + LENGTH_BYTES], "big")
            if len(frames) < end:
                break
            # h2 spends as much on a frame of message bytes as the router on ten of its tokens. A frame of this stream,
            # without padding or an end, changes nothing that h2 would have to know but the windows: it goes past h2.
            if frames[start + LENGTH_BYTES : payload] == self._plain_data:
                self._take_data(frames[payload:end])
                self._num_unacknowledged += end - payload
            elif not self._take_window_update(frames, start):
                self._take_events(self._http.receive_data(bytes(frames[start:end])))
                # Answers to settings and pings, and what a larger window takes.
                self._write()
            start = end
        del frames[:start]
        if self._num_unacknowledged > RECEIVE_WINDOW_BYTES // 4:
            self._acknowledge()

    def _take_window_update(self, frames: bytearray, start: int) -> bool:
        """Opens a window by an engine's frame, past h2; returns whether it was one that is right."""
        if frames[start : start + len(WINDOW_UPDATE)] != WINDOW_UPDATE:
            return False
        payload = start + FRAME_HEADER_BYTES
        stream_id = int.from_bytes(frames[payload - 4 : payload], "big")
        increment = int.from_bytes(frames[payload : payload + 4], "big")
        if stream_id not in (0, self._stream_id) or increment < 1:
            return False
        window = self._http if stream_id == 0 else self._http.streams[stream_id]
        if window.outbound_flow_control_window + increment > MAX_WINDOW_BYTES:
            return False
        window.outbound_flow_control_window += increment
        if self._outgoing:
            self._write()
        return True

    def _take_events(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, DataReceived):
                self._take_data(event.data)
                self._http.acknowledge_received_data(event.flow_controlled_length, self._stream_id)
            elif isinstance(event, ResponseReceived | TrailersReceived):
                self._take_headers({str(name): str(value) for name, value in event.headers})
            elif isinstance(event, StreamEnded):
                self._end("the engine ended the stream")
            elif isinstance(event, StreamReset):
                self._end(f"cancelled: the engine reset the stream (HTTP/2 error {event.error_code})")
            elif isinstance(event, ConnectionTerminated):
                reason = (event.additional_data or b"").decode(errors="replace")
                self._end(f"unavailable: the engine closed the connection ({reason or event.error_code})")

    def _take_headers(self, headers: dict[str, str]) -> None:
        status, http_status = headers.get("grpc-status"), headers.get(":status", "200")
        if status is not None and status != "0":
            name = STATUS_NAMES.get(status, f"status {status}")
            self._end(f"{name}: {unquote(headers.get('grpc-message', ''))}")
        elif http_status != "200":
            self._end(f"unavailable: the engine's port answers with HTTP status {http_status}")

    def _take_data(self, data: bytes | bytearray) -> None:
        """Gathers bytes into messages."""
        received = self._received
        received += data
        start = 0
        while len(received) - start >= PREFIX_BYTES:
            size = int.from_bytes(received[start + 1 : start + PREFIX_BYTES], "big")
            if received[start] or size > MAX_MESSAGE_BYTES:
                raise StreamEndedError(
                    f"a message of {size} bytes, compression {received[start]}: neither is agreed on"
                )
            end = start + PREFIX_BYTES + size
            if len(received) < end:
                break
            self._messages.append(engine_pb2.AttachResponse.FromString(bytes(received[start + PREFIX_BYTES : end])))
            start = end
        del received[:start]

    def _acknowledge(self) -> None:
        """Opens the engine's windows, of the connection and of the stream, again by what was read."""
        number, self._num_unacknowledged = self._num_unacknowledged, 0
        self._write_bytes(_format_window_update(0, number) + _format_window_update(self._stream_id, number))

    def _advance(self) -> None:
        """Handles what has come, one message per iteration of the loop, engines in turn: a burst delays nobody else."""
        if self._first is not None and (self._messages or self._fault):
            self._has_first = True
            first, self._first = self._first, None
            if not first.done():  # who waits may have given up
                self._answer_first(first)
        if self._handler is not None and not self._is_queued and (self._messages or self._fault):
            self._is_queued = True
            self._burst_queue.run(self._handle_next)

    def _answer_first(self, first: asyncio.Future[engine_pb2.AttachResponse]) -> None:
        if self._messages:
            first.set_result(self._messages.popleft())
        else:
            first.set_exception(StreamEndedError(self._fault))

    def _handle_next(self) -> None:
        """Handles one message; the end is reported after the last."""
        if self._messages and self._handler is not None:
            message = self._messages.popleft()
            try:
                self._handler(message)
            except Exception:  # the outermost frame of a loop callback
                # The data plane handles faults of engines itself; what comes here is our own, and costs this stream.
                logger.exception("stream to %s: a message could not be handled", self._authority)
                self.cancel("a message could not be handled")
        self._is_queued = False
        if self._messages:
            self._advance()
        elif self._fault and not self._closed.done():
            self._closed.set_result(self._fault)

    # --- outward -------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Writes what the engine's window takes."""
        if self._fault:
            return
        # As inward, frames of message bytes go past h2, which keeps the windows and has its own frames to send first.
        http, stream = self._http, self._http.streams[self._stream_id]
        frames: list[bytes | memoryview] = [http.data_to_send()]
        while self._outgoing:
            room = min(http.outbound_flow_control_window, stream.outbound_flow_control_window)
            data = self._outgoing[0]
            size = min(room, http.max_outbound_frame_size, len(data))
            if size <= 0:
                break
            frames += (size.to_bytes(LENGTH_BYTES, "big"), self._plain_data, data[:size])
            http.outbound_flow_control_window -= size
            stream.outbound_flow_control_window -= size
            if size < len(data):
                self._outgoing[0] = data[size:]
            else:
                self._outgoing.popleft()
        self._write_bytes(b"".join(frames))

    def _write_frames(self) -> None:
        self._write_bytes(self._http.data_to_send())

    def _write_bytes(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._traffic.num_bytes_down += len(data)
            self._transport.write(data)

    def _end(self, fault: str) -> None:
        """Ends the call, with the first reason given."""
        if self._fault:
            return
        self._fault = fault
        self._outgoing.clear()
        if self._transport is not None and self._transport.is_closing():
            # A frozen engine never takes the last bytes.
            self._loop.call_later(CLOSE_S, self._transport.abort)
        elif self._transport is not None:
            self._transport.abort()  # the engine ended the call, or cannot be spoken with: there is nothing left to say
        self._advance()


def _format_window_update(stream_id: int, num_bytes: int) -> bytes:
    return WINDOW_UPDATE + stream_id.to_bytes(4, "big") + num_bytes.to_bytes(4, "big")
