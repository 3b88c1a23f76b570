"""Our HTTP/2 call against gRPC's own server: sizes, ends, and what a server must not send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from data_plane_harness import until
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived

from sluice.v1 import engine_pb2, engine_pb2_grpc
from sluice_router.engines import engine_stream
from sluice_router.engines.engine_connections import connect
from sluice_router.engines.engine_stream import EngineStream, StreamEndedError
from sluice_router.event_loop_bursts import BurstQueue
from sluice_router.observability.metrics import EngineTraffic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Serve = Callable[..., AsyncIterator[engine_pb2.AttachResponse]]

# More than HTTP/2's frames (16 KiB) and gRPC's first window (64 KiB) take at once.
NUM_PROMPT_TOKENS = 1_000_000


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """Runs gRPC's own server with one method, ``Attach``."""

    class Servicer(engine_pb2_grpc.EngineServicer):
        async def Attach(self, request_iterator, context):  # noqa: N802 - gRPC's name
            async for message in serve(request_iterator, context):
                yield message

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
    engine_pb2_grpc.add_EngineServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def calling(
    address: str, traffic: EngineTraffic | None = None, burst_queue: BurstQueue | None = None
) -> AsyncIterator[EngineStream]:
    stream = await connect(address, traffic or EngineTraffic(), burst_queue or BurstQueue())
    try:
        yield stream
    finally:
        stream.cancel()


async def gather(stream: EngineStream) -> tuple[list[engine_pb2.AttachResponse], str]:
    """Reads a stream to its end."""
    messages: list[engine_pb2.AttachResponse] = []
    async with asyncio.timeout(20):
        fault = await stream.serve(messages.append)
    return messages, fault


def make_message(number: int, num_tokens: int = 1) -> engine_pb2.AttachResponse:
    return engine_pb2.AttachResponse(slots=[number], token_ids=[7] * num_tokens)


async def test_large_messages_pass_both_windows_whole_and_in_order():
    async def echo(requests, _context):
        async for request in requests:
            for submit in request.submits:
                yield engine_pb2.AttachResponse(slots=[submit.slot], token_ids=submit.prompt_token_ids)

    async with serving(echo) as address, calling(address) as stream:
        for slot in range(4):
            request = engine_pb2.AttachRequest()
            request.submits.add(slot=slot).prompt_token_ids.extend([slot] * NUM_PROMPT_TOKENS)
            stream.send(request)
        messages: list[engine_pb2.AttachResponse] = []

        def take(message: engine_pb2.AttachResponse) -> None:
            messages.append(message)
            if len(messages) == 4:
                stream.cancel()

        async with asyncio.timeout(60):
            await stream.serve(take)
        assert [list(message.slots) for message in messages] == [[0], [1], [2], [3]]
        for slot, message in enumerate(messages):
            assert list(message.token_ids) == [slot] * NUM_PROMPT_TOKENS


async def test_more_than_the_receive_window_arrives():
    """The window is opened again while messages come."""
    tokens_each, number = 500_000, 2 * engine_stream.RECEIVE_WINDOW_BYTES // 500_000

    async def flood(_requests, _context):
        for index in range(number):
            yield make_message(index, tokens_each)

    async with serving(flood) as address, calling(address) as stream:
        messages, fault = await gather(stream)
        assert [message.slots[0] for message in messages] == list(range(number))
        assert fault == "the engine ended the stream"


async def test_burst_is_handled_one_message_per_loop_iteration():
    async def burst(_requests, _context):
        for index in range(50):
            yield make_message(index)

    async with serving(burst) as address, calling(address) as stream:
        await stream.read_first()
        # The rest has arrived, and lies in the stream's queue.
        await until(lambda: len(stream._messages) == 49)
        turns = itertools.count()
        is_over = False

        def count_turn() -> None:
            next(turns)
            if not is_over:
                asyncio.get_running_loop().call_soon(count_turn)

        count_turn()
        seen: list[int] = []
        async with asyncio.timeout(20):
            await stream.serve(lambda _message: seen.append(next(turns)))
        is_over = True
        assert len(seen) == 49
        assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(seen))


async def test_engines_with_bursts_are_handled_round_robin():
    """One message of all engines per turn of the loop, and no engine waits for another's burst."""

    async def burst(_requests, _context):
        for index in range(10):
            yield make_message(index)

    burst_queue = BurstQueue()
    async with (
        serving(burst) as first,
        serving(burst) as second,
        calling(first, burst_queue=burst_queue) as one,
        calling(second, burst_queue=burst_queue) as other,
    ):
        await one.read_first()
        await other.read_first()
        # The rest has arrived, and lies in the streams' queues.
        await until(lambda: [len(stream._messages) for stream in (one, other)] == [9, 9])
        seen: list[str] = []
        async with asyncio.timeout(20):
            await asyncio.gather(
                one.serve(lambda _message: seen.append("one")), other.serve(lambda _message: seen.append("other"))
            )
        # The first one begins a message early, and so ends one early.
        assert seen[1:-1] == ["one", "other"] * 8


class PaddingEngine(asyncio.Protocol):
    """Sends messages in padded frames, which gRPC's own server never does."""

    def __init__(self, num_messages: int) -> None:
        self._num_messages = num_messages
        self._http = H2Connection(H2Configuration(client_side=False))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._http.initiate_connection()

    def data_received(self, data: bytes) -> None:
        for event in self._http.receive_data(data):
            if isinstance(event, RequestReceived):
                self._http.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
                for index in range(self._num_messages):
                    body = make_message(index).SerializeToString()
                    # Every other frame is one that needs no look from h2.
                    padding = 100 if index % 2 else None
                    self._http.send_data(1, b"\0" + len(body).to_bytes(4, "big") + body, pad_length=padding)
                self._http.send_headers(1, [("grpc-status", "0")], end_stream=True)
        self._transport.write(self._http.data_to_send())


async def test_padded_and_plain_frames_are_the_same_stream():
    server = await asyncio.get_running_loop().create_server(lambda: PaddingEngine(20), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, calling(f"127.0.0.1:{port}") as stream:
        messages, fault = await gather(stream)
        assert [message.slots[0] for message in messages] == list(range(20))
        assert fault == "the engine ended the stream"


@pytest.mark.parametrize("chunk_bytes", [1, 3, 7])
async def test_messages_cut_anywhere_are_put_together(chunk_bytes):
    """Whatever the pieces in which the network delivers, the messages are the same."""

    async def three(_requests, _context):
        for index in range(3):
            yield make_message(index, 5)

    async with serving(three) as address, calling(address) as stream:
        receive = stream.data_received

        class Cutter(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                for start in range(0, len(data), chunk_bytes):
                    receive(data[start : start + chunk_bytes])

            def connection_lost(self, exc: Exception | None) -> None:
                stream.connection_lost(exc)

        # The one way to cut what the kernel delivers whole.
        assert stream._transport is not None
        stream._transport.set_protocol(Cutter())
        messages, fault = await gather(stream)
        assert [message.slots[0] for message in messages] == [0, 1, 2]
        assert fault == "the engine ended the stream"


@pytest.mark.parametrize("has_first", [False, True], ids=["before the first message", "after it"])
async def test_grpc_status_of_the_end_is_returned(has_first):
    async def refuse(_requests, context):
        if has_first:
            yield make_message(0)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "kein Platz: größer als 3 %")

    async with serving(refuse) as address, calling(address) as stream:
        expected = "failed_precondition: kein Platz: größer als 3 %"
        if has_first:
            messages, fault = await gather(stream)
            assert (len(messages), fault) == (1, expected)
        else:
            with pytest.raises(StreamEndedError, match=expected):
                await stream.read_first()


async def test_server_without_the_service_is_named():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with calling(f"127.0.0.1:{port}") as stream:
            with pytest.raises(StreamEndedError, match="unimplemented"):
                await stream.read_first()
    finally:
        await server.stop(0)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["HTTP/1.1", "nothing"])
async def test_port_that_speaks_something_else_is_a_fault(answer):
    async def speak(reader, writer):
        await reader.read(16)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, calling(f"127.0.0.1:{port}") as stream:
        with pytest.raises(StreamEndedError, match="unavailable: the connection was closed"):
            await stream.read_first()


async def test_port_that_nobody_listens_on_is_a_fault():
    with pytest.raises(StreamEndedError, match="unavailable"):
        await connect("127.0.0.1:1", EngineTraffic(), BurstQueue())


async def test_compressed_message_ends_the_stream():
    async def compress(_requests, context):
        context.set_compression(grpc.Compression.Gzip)
        yield make_message(0, 1000)

    async with serving(compress) as address, calling(address) as stream:
        with pytest.raises(StreamEndedError, match="compression 1"):
            await stream.read_first()


async def test_fault_of_the_handler_costs_the_stream_and_says_so(caplog):
    async def send_two(_requests, _context):
        yield make_message(0)
        yield make_message(1)
        await asyncio.sleep(30)

    def fail(_message: engine_pb2.AttachResponse) -> None:
        raise ZeroDivisionError

    async with serving(send_two) as address, calling(address) as stream:
        async with asyncio.timeout(20):
            assert await stream.serve(fail) == "a message could not be handled"
        assert "ZeroDivisionError" in caplog.text


async def test_cancel_reaches_the_engine_and_drops_what_waits():
    cancelled = asyncio.Event()

    async def wait(_requests, context):
        # The call may end while the message is sent, where no line of this function notices.
        context.add_done_callback(lambda _: cancelled.set())
        yield make_message(0)
        await asyncio.sleep(30)

    async with serving(wait) as address, calling(address) as stream:
        await stream.read_first()
        stream.cancel("enough")
        stream.send(engine_pb2.AttachRequest())
        async with asyncio.timeout(20):
            assert await stream.serve(lambda _message: None) == "enough"
            await cancelled.wait()


async def test_bytes_are_counted_in_both_directions():
    """What goes over the wire: the messages, and what HTTP/2 adds to them."""

    async def answer(requests, _context):
        async for _ in requests:
            yield make_message(0, 50_000)

    request = engine_pb2.AttachRequest()
    request.submits.add().prompt_token_ids.extend([7] * 20_000)
    traffic = EngineTraffic()
    async with serving(answer) as address, calling(address, traffic) as stream:
        assert 0 < traffic.num_bytes_down < 1000
        stream.send(request)
        await stream.read_first()
        for counted, size in (
            (traffic.num_bytes_down, request.ByteSize()),
            (traffic.num_bytes_up, make_message(0, 50_000).ByteSize()),
        ):
            assert size < counted < size + 2000
