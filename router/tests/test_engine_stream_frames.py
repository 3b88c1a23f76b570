"""Our HTTP/2 call, frame by frame, against h2 as the server: no network, and an event loop in hand."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamReset,
    WindowUpdated,
)
from h2.settings import SettingCodes

from sluice.v1 import engine_pb2
from sluice_router.engines import engine_stream
from sluice_router.engines.engine_stream import RECEIVE_WINDOW_BYTES, EngineStream, StreamEndedError
from sluice_router.observability.metrics import EngineTraffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from h2.events import Event

# HTTP/2's first window, and its largest frame unless a peer allows more (RFC 9113, section 6.5.2).
WINDOW, FRAME = 65_535, 16_384


class HandBurstQueue:
    """Work waits until the test runs it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def run(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def turn(self) -> None:
        self.waiting.pop(0)()


class HandLoop:
    """Knows futures, and keeps what is due later."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.later: list[tuple[float, Callable[[], None]]] = []

    def create_future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.later.append((seconds, call))


class HandTransport:
    """Keeps what is written."""

    def __init__(self, alpn: str | None = None) -> None:
        self.written = bytearray()
        self.writes: list[int] = []
        self.ends: list[str] = []
        self._alpn = alpn

    def get_extra_info(self, name: str) -> Any:
        assert name == "ssl_object"
        return self

    def selected_alpn_protocol(self) -> str | None:
        return self._alpn

    def write(self, data: bytes) -> None:
        assert data
        assert not self.ends
        self.written += data
        self.writes.append(len(data))

    def is_closing(self) -> bool:
        return bool(self.ends)

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.ends.append("aborted")


class Pair:
    """A stream and h2 as the engine's side of it.

    Args:
        settings: The server's, by HTTP/2's codes.
    """

    def __init__(self, settings: dict[SettingCodes, int] | None = None, *, encrypted: str | None = None) -> None:
        self.traffic, self.queue, self.transport = EngineTraffic(), HandBurstQueue(), HandTransport(encrypted)
        self.loop = HandLoop(asyncio.get_running_loop())
        self.stream = EngineStream(
            "engine-3:8001", self.traffic, self.queue, self.loop, is_encrypted=encrypted is not None
        )
        self.server = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.server.initiate_connection()
        if settings:
            self.server.update_settings(settings)
        self.events: list[Event] = []
        self.stream.connection_made(self.transport)
        self.read()

    def read(self) -> None:
        """The engine reads what was written, and does not answer."""
        assert self.traffic.num_bytes_down == sum(self.transport.writes)
        data = bytes(self.transport.written)
        self.transport.written.clear()
        self.events += self.server.receive_data(data)

    def answer(self, *, in_pieces_of: int = 0) -> None:
        """What the engine has to say arrives."""
        data = self.server.data_to_send()
        before = self.traffic.num_bytes_up
        for start in range(0, len(data), in_pieces_of or len(data) or 1):
            self.stream.data_received(data[start : start + (in_pieces_of or len(data))])
        assert self.traffic.num_bytes_up == before + len(data)

    def begin(self) -> None:
        """The engine accepts the call."""
        self.server.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
        self.answer()
        self.read()

    def say(self, *messages: engine_pb2.AttachResponse, **fields: int) -> None:
        for message in messages:
            body = message.SerializeToString()
            self.server.send_data(1, b"\0" + len(body).to_bytes(4, "big") + body, **fields)

    def take_data(self) -> bytes:
        """What the engine has got of messages so far."""
        return b"".join(event.data for event in self.events if isinstance(event, DataReceived))

    def find(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


async def settle() -> None:
    """Lets the loop run what is ready, and what that makes ready."""
    for _ in range(5):
        await asyncio.sleep(0)


def make_message(number: int, num_tokens: int = 1) -> engine_pb2.AttachResponse:
    return engine_pb2.AttachResponse(slots=[number], token_ids=[7] * num_tokens)


def make_request(num_tokens: int) -> tuple[engine_pb2.AttachRequest, bytes]:
    """Makes a request, and its bytes as gRPC frames them: a flag, 4 bytes of length, the message."""
    request = engine_pb2.AttachRequest()
    request.submits.add(slot=num_tokens % 97).prompt_token_ids.extend([300] * num_tokens)
    body = request.SerializeToString()
    return request, b"\0" + len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(("alpn", "scheme"), [(None, "http"), ("h2", "https")])
async def test_call_begins_with_grpcs_headers_and_our_settings(alpn, scheme):
    pair = Pair(encrypted=alpn)
    (request,) = pair.find(RequestReceived)
    assert [(str(name), str(value)) for name, value in request.headers] == [
        (":method", "POST"),
        (":scheme", scheme),
        (":path", "/sluice.v1.Engine/Attach"),
        (":authority", "engine-3:8001"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "sluice-router"),
    ]
    assert request.stream_id == 1
    assert request.stream_ended is None
    (settings,) = pair.find(RemoteSettingsChanged)
    changed = {code: change.new_value for code, change in settings.changed_settings.items()}
    assert changed[SettingCodes.INITIAL_WINDOW_SIZE] == 16 * 1024 * 1024
    assert pair.server.remote_settings.enable_push == 0
    # The connection's window is as large, beside the one that HTTP/2 begins with.
    assert [(update.stream_id, update.delta) for update in pair.find(WindowUpdated)] == [(0, 16 * 1024 * 1024)]


async def test_encrypted_port_that_speaks_no_http2_is_no_engine():
    transport, loop, queue = HandTransport(""), HandLoop(asyncio.get_running_loop()), HandBurstQueue()
    stream = EngineStream("engine-3:8001", EngineTraffic(), queue, loop, is_encrypted=True)
    stream.connection_made(transport)
    assert (transport.written, transport.ends) == (b"", ["aborted"])
    with pytest.raises(StreamEndedError, match=r"^unavailable: the engine's port does not speak HTTP/2$"):
        await stream.read_first()


@pytest.mark.parametrize("piece", [0, 1, 2, 8, 9, 10, 13, 14, 15])
@pytest.mark.parametrize("padding", [{}, {"pad_length": 40}], ids=["plain", "padded"])
async def test_messages_arrive_whole_and_in_order_however_they_are_cut(piece, padding):
    pair = Pair()
    pair.begin()
    sent = [make_message(0, 300), engine_pb2.AttachResponse(), make_message(2), make_message(3, 40)]
    pair.say(*sent, **padding)
    pair.answer(in_pieces_of=piece)
    got = [await pair.stream.read_first()]
    serving = asyncio.ensure_future(pair.stream.serve(got.append))
    await settle()
    while pair.queue.waiting:
        # One message a turn, and one turn asked for at a time.
        assert len(pair.queue.waiting) == 1
        num_got = len(got)
        pair.queue.turn()
        assert len(got) == num_got + 1
    assert got == sent
    pair.say(make_message(5), make_message(6))
    pair.answer()
    assert len(pair.queue.waiting) == 1
    pair.queue.turn()
    pair.queue.turn()
    assert got[4:] == [make_message(5), make_message(6)]
    assert not pair.queue.waiting
    assert not serving.done()
    # Trailers end the stream; nothing is in the queue but the end.
    pair.server.send_headers(1, [("grpc-status", "0")], end_stream=True)
    pair.answer()
    pair.queue.turn()
    await settle()
    assert serving.result() == "the engine ended the stream"
    assert pair.transport.ends == ["aborted"]
    assert pair.loop.later == []


async def test_two_messages_in_one_frame_and_one_message_in_three_frames():
    pair = Pair()
    pair.begin()
    bodies = [make_message(number, 50).SerializeToString() for number in range(3)]
    data = b"".join(b"\0" + len(body).to_bytes(4, "big") + body for body in bodies)
    third = len(data) // 3
    for part in (data, data[:third], data[third : 2 * third], data[2 * third :]):
        pair.server.send_data(1, part)
    pair.answer()
    assert [message.slots[0] for message in pair.stream._messages] == [0, 1, 2, 0, 1, 2]


async def test_windows_open_again_once_a_quarter_was_read():
    """By exactly what was read, of the connection and of the stream, and not with every frame."""
    pair = Pair()
    pair.begin()
    pair.events.clear()
    pair.server.max_outbound_frame_size = 1 << 20
    sent = 0
    body = b"\1" * (1 << 16)
    while not pair.find(WindowUpdated):
        assert sent <= RECEIVE_WINDOW_BYTES // 4
        prefix = b"\0" + (len(body)).to_bytes(4, "big")
        # A message of unknown fields only: field 1000 of 65,532 bytes, twice.
        pair.server.send_data(1, (prefix + body)[: 1 << 14], pad_length=None)
        pair.stream._received.clear()
        sent += 1 << 14
        pair.answer()
        pair.read()
    assert sent == RECEIVE_WINDOW_BYTES // 4 + (1 << 14)
    updates = [(update.stream_id, update.delta) for update in pair.find(WindowUpdated)]
    assert updates == [(0, sent), (1, sent)]
    # What follows is counted anew.
    pair.server.send_data(1, b"\0\0\0\0\0")
    pair.events.clear()
    pair.answer()
    pair.read()
    assert pair.find(WindowUpdated) == []


async def test_frames_for_h2_open_the_windows_too():
    """More comes in padded frames than the windows hold: h2 says when it may go on."""
    pair = Pair()
    pair.begin()
    message = make_message(1, 15_000)
    for _ in range(RECEIVE_WINDOW_BYTES // 14_000):
        pair.say(message, pad_length=255)
        pair.answer()
        pair.read()
        pair.stream._messages.clear()
    updated = {update.stream_id for update in pair.find(WindowUpdated)}
    assert updated == {0, 1}


@pytest.mark.parametrize("increment", [0, 2**31 - WINDOW], ids=["nothing", "too much"])
async def test_wrong_window_of_the_connection_ends_the_stream(increment):
    pair = Pair()
    pair.begin()
    pair.stream.data_received(b"\0\0\4\x08\0" + (0).to_bytes(4, "big") + increment.to_bytes(4, "big"))
    with pytest.raises(StreamEndedError, match=r"^internal: "):
        await pair.stream.read_first()
    assert pair.transport.ends == ["aborted"]


async def test_largest_windows_are_taken():
    pair = Pair()
    pair.begin()
    for stream_id in (0, 1):
        pair.stream.data_received(
            b"\0\0\4\x08\0" + stream_id.to_bytes(4, "big") + (2**31 - 1 - WINDOW).to_bytes(4, "big")
        )
    request, wire = make_request(200_000)
    pair.stream.send(request)
    assert pair.transport.ends == []
    assert sum(pair.transport.writes[-1:]) > len(wire) > 2 * WINDOW


async def test_requests_wait_for_the_engines_window_and_go_on_with_it():
    pair = Pair()
    pair.begin()
    (first, first_bytes), (second, second_bytes) = make_request(50_000), make_request(3)
    pair.stream.send(first)
    pair.stream.send(second)
    pair.read()
    wire = first_bytes + second_bytes
    assert pair.take_data() == wire[:WINDOW]
    sizes = [len(event.data) for event in pair.find(DataReceived)]
    assert sizes == [FRAME] * 3 + [WINDOW - 3 * FRAME]
    # Room in the stream's window alone is not enough, nor in the connection's.
    pair.server.increment_flow_control_window(1000, stream_id=1)
    pair.answer()
    pair.read()
    assert len(pair.take_data()) == WINDOW
    pair.server.increment_flow_control_window(600)
    pair.answer()
    pair.read()
    assert pair.take_data() == wire[: WINDOW + 600]
    pair.server.increment_flow_control_window(1 << 20)
    pair.answer()
    pair.read()
    assert pair.take_data() == wire[: WINDOW + 1000]
    pair.server.increment_flow_control_window(1 << 20, stream_id=1)
    pair.answer()
    pair.read()
    assert pair.take_data() == wire
    assert not pair.stream._outgoing
    # A third one goes at once, in one write.
    third, third_bytes = make_request(7)
    num_writes = len(pair.transport.writes)
    pair.stream.send(third)
    assert len(pair.transport.writes) == num_writes + 1
    pair.read()
    assert pair.take_data() == wire + third_bytes


async def test_larger_frames_are_used_once_the_engine_allows_them():
    pair = Pair({SettingCodes.MAX_FRAME_SIZE: 30_000, SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
    pair.begin()
    request, data = make_request(20_000)
    pair.server.increment_flow_control_window(1 << 20)
    pair.answer()
    pair.stream.send(request)
    pair.read()
    assert pair.take_data() == data
    assert [len(event.data) for event in pair.find(DataReceived)] == [30_000, len(data) - 30_000]


async def test_pings_and_settings_are_answered_at_once():
    pair = Pair()
    pair.begin()
    pair.server.ping(b"12345678")
    num_writes = len(pair.transport.writes)
    pair.answer()
    assert len(pair.transport.writes) == num_writes + 1
    pair.read()
    assert [event.ping_data for event in pair.events if type(event).__name__ == "PingAckReceived"] == [b"12345678"]


HEADERS = [(":status", "200"), ("content-type", "application/grpc")]


def end_with(pair: Pair, headers: list[tuple[str, str]]) -> None:
    pair.server.send_headers(1, headers, end_stream=True)


ENDS: dict[str, tuple[Callable[[Pair], None], str]] = {
    "status 0": (lambda p: end_with(p, [("grpc-status", "0")]), "the engine ended the stream"),
    "status with text": (
        lambda p: end_with(p, [("grpc-status", "9"), ("grpc-message", "no%20r%C3%B6om")]),
        "failed_precondition: no röom",
    ),
    "status without text": (lambda p: end_with(p, [("grpc-status", "14")]), "unavailable: "),
    "unknown status": (lambda p: end_with(p, [("grpc-status", "77")]), "status 77: "),
    "no status": (lambda p: p.server.end_stream(1), "the engine ended the stream"),
    "reset": (
        lambda p: p.server.reset_stream(1, ErrorCodes.REFUSED_STREAM),
        "cancelled: the engine reset the stream (HTTP/2 error 7)",
    ),
    "goodbye": (
        lambda p: p.server.close_connection(ErrorCodes.NO_ERROR, b"max_age\xff"),
        "unavailable: the engine closed the connection (max_age\N{REPLACEMENT CHARACTER})",
    ),
    "goodbye without a word": (
        lambda p: p.server.close_connection(ErrorCodes.ENHANCE_YOUR_CALM),
        "unavailable: the engine closed the connection (11)",
    ),
    "compressed": (
        lambda p: p.server.send_data(1, b"\1\0\0\0\2ab"),
        "internal: a message of 2 bytes, compression 1: neither is agreed on",
    ),
    "too large": (
        lambda p: p.server.send_data(1, b"\0" + (256 * 1024 * 1024 + 1).to_bytes(4, "big")),
        "internal: a message of 268435457 bytes, compression 0: neither is agreed on",
    ),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("has_first", [False, True])
async def test_end_is_told_after_the_last_message(name, has_first):
    act, fault = ENDS[name]
    pair = Pair()
    pair.begin()
    if has_first:
        pair.say(make_message(1), make_message(2))
    act(pair)
    pair.answer()
    assert pair.transport.ends == ["aborted"]
    if not has_first:
        with pytest.raises(StreamEndedError) as caught:
            await pair.stream.read_first()
        assert str(caught.value) == fault
    else:
        assert (await pair.stream.read_first()).slots == [1]
        got: list[engine_pb2.AttachResponse] = []
        serving = asyncio.ensure_future(pair.stream.serve(got.append))
        await settle()
        pair.queue.turn()
        await settle()
        assert [list(message.slots) for message in got] == [[2]]
        assert serving.result() == fault
    # What the engine still says is counted, and nothing more.
    pair.stream.data_received(b"\0" * 30)
    assert not pair.stream._messages
    # Nothing is sent any more.
    num_writes = len(pair.transport.writes)
    pair.stream.send(make_request(3)[0])
    assert not pair.stream._outgoing
    assert len(pair.transport.writes) == num_writes


async def test_message_of_the_largest_size_is_waited_for():
    pair = Pair()
    pair.begin()
    pair.server.send_data(1, b"\0" + (256 * 1024 * 1024).to_bytes(4, "big") + b"abc")
    pair.answer()
    assert not pair.transport.ends


async def test_bytes_that_are_no_message_end_the_stream():
    pair = Pair()
    pair.begin()
    pair.server.send_data(1, b"\0\0\0\0\1\xff")
    pair.answer()
    with pytest.raises(StreamEndedError, match=r"^internal: "):
        await pair.stream.read_first()


async def test_frame_that_breaks_http2_ends_the_stream():
    pair = Pair()
    pair.begin()
    # DATA on a stream that does not exist.
    pair.stream.data_received(b"\0\0\1\0\0\0\0\0\5x")
    with pytest.raises(StreamEndedError, match=r"^internal: "):
        await pair.stream.read_first()


@pytest.mark.parametrize("status", ["404", "200"])
async def test_http_status_of_something_else_is_named(status):
    pair = Pair()
    pair.server.send_headers(1, [(":status", status)])
    pair.answer()
    if status == "200":
        assert not pair.transport.ends
        return
    with pytest.raises(StreamEndedError) as caught:
        await pair.stream.read_first()
    assert str(caught.value) == "unavailable: the engine's port answers with HTTP status 404"


LOSSES = {
    "closed": (None, None, "unavailable: the connection was closed"),
    "reset": (None, ConnectionResetError("reset by peer"), "unavailable: reset by peer"),
    "encrypted": (
        "h2",
        None,
        "unavailable: the connection was closed; the engine may have refused this router's certificate",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
async def test_lost_connection_is_the_end(name):
    alpn, error, fault = LOSSES[name]
    pair = Pair(encrypted=alpn)
    waiting = asyncio.ensure_future(pair.stream.wait_disconnected())
    await settle()
    assert not waiting.done()
    pair.stream.connection_lost(error)
    await settle()
    assert waiting.done()
    with pytest.raises(StreamEndedError) as caught:
        await pair.stream.read_first()
    assert str(caught.value) == fault


async def test_lost_connection_after_the_first_message_is_no_matter_of_certificates():
    pair = Pair(encrypted="h2")
    pair.begin()
    pair.say(make_message(1))
    pair.answer()
    await pair.stream.read_first()
    pair.stream.connection_lost(None)
    serving = asyncio.ensure_future(pair.stream.serve(lambda _message: None))
    await settle()
    pair.queue.turn()
    await settle()
    assert serving.result() == "unavailable: the connection was closed"


async def test_cancel_resets_the_stream_and_gives_the_last_bytes_a_second():
    pair = Pair()
    pair.begin()
    pair.say(make_message(1), make_message(2))
    pair.answer()
    await pair.stream.read_first()
    got: list[engine_pb2.AttachResponse] = []
    serving = asyncio.ensure_future(pair.stream.serve(got.append))
    await settle()
    pair.stream.cancel("enough")
    pair.read()
    (reset,) = pair.find(StreamReset)
    assert (reset.stream_id, reset.error_code) == (1, ErrorCodes.CANCEL)
    assert pair.transport.ends == ["closed"]
    ((seconds, call),) = pair.loop.later
    assert seconds == engine_stream.CLOSE_S == 1.0
    call()
    assert pair.transport.ends == ["closed", "aborted"]
    pair.queue.turn()
    await settle()
    assert got == []
    assert serving.result() == "enough"
    # A second reason does not count, and says nothing more.
    num_writes = len(pair.transport.writes)
    pair.stream.cancel("too much")
    assert len(pair.transport.writes) == num_writes
    assert pair.stream._fault == "enough"
    assert not pair.queue.waiting


async def test_cancel_before_the_connection_is_made_needs_no_connection():
    stream = EngineStream("engine-3:8001", EngineTraffic(), HandBurstQueue(), HandLoop(asyncio.get_running_loop()))
    stream.cancel()
    with pytest.raises(StreamEndedError, match=r"^cancelled$"):
        await stream.read_first()


async def test_faulty_handler_costs_the_stream():
    pair = Pair()
    pair.begin()
    pair.say(make_message(1), make_message(2))
    pair.answer()
    await pair.stream.read_first()

    def fail(_message: engine_pb2.AttachResponse) -> None:
        raise ZeroDivisionError

    serving = asyncio.ensure_future(pair.stream.serve(fail))
    await settle()
    pair.queue.turn()
    while pair.queue.waiting:
        pair.queue.turn()
    await settle()
    assert serving.result() == "a message could not be handled"
    pair.read()
    assert len(pair.find(StreamReset)) == 1
