"""The I/O of engine streams: one task per address, one writer per stream.

A link connects, says hello, waits for the engine's hello, and from then on hands each message to ``Router.on_step``
synchronously, yielding to the loop between two messages and never inside one. When the stream ends, whoever ended it, the
router is told once, and the link tries again with jitter for as long as the discovery knows the address. Two writes at
once kill a grpc.aio stream, so messages queue for the stream's one writer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

import grpc

from sluice.v1 import engine_pb2, engine_pb2_grpc

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from sluice_router.router import Router
    from sluice_router.state import Engine

logger = logging.getLogger(__name__)

# First and longest pause before the next attempt; an engine that starts again should be found at once.
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
CHANNEL_OPTIONS = (
    # A prompt of a million tokens, and an iteration with its logprobs, exceed gRPC's 4 MiB.
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.max_send_message_length", 256 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
    # Every attempt connects anew: the pause between them is ours.
    ("grpc.use_local_subchannel_pool", 1),
)

Call = grpc.aio.StreamStreamCall[engine_pb2.AttachRequest, engine_pb2.AttachResponse]


class Stream:
    """One stream's outgoing messages and their writer."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._waiting: deque[engine_pb2.AttachRequest] = deque()
        self._has_news = asyncio.Event()

    def send(self, message: engine_pb2.AttachRequest) -> None:
        """Queues a message for the writer."""
        self._waiting.append(message)
        self._has_news.set()

    async def write(self) -> None:
        """Writes what is queued, in order, until the stream ends."""
        while True:
            while self._waiting:
                await self.call.write(self._waiting.popleft())
            self._has_news.clear()
            await self._has_news.wait()


class EngineLinks:
    """All links; implements ``router.LinkWriter``.

    Args:
        router: Takes what comes.
        hello_timeout_s: Longest wait for an engine's first message.
        rng: Jitter.
    """

    def __init__(self, router: Router, *, hello_timeout_s: float, rng: random.Random) -> None:
        self._router = router
        self._hello_timeout_s = hello_timeout_s
        self._rng = rng
        self._streams: dict[Engine, Stream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wanted: frozenset[str] = frozenset()

    # --- LinkWriter ----------------------------------------------------------------------------------------------

    def send(self, engine: Engine, message: engine_pb2.AttachRequest) -> None:
        """See ``LinkWriter.send``."""
        stream = self._streams.get(engine)
        if stream is not None:
            stream.send(message)

    def close(self, engine: Engine, reason: str) -> None:
        """See ``LinkWriter.close``."""
        stream = self._streams.pop(engine, None)
        if stream is not None:
            logger.info("engine %s at %s: stream closed (%s)", engine.engine_id, engine.address, reason)
            stream.call.cancel()

    # --- addresses -----------------------------------------------------------------------------------------------

    def set_addresses(self, addresses: frozenset[str], start: Callable[[str], asyncio.Task[None]]) -> None:
        """Takes the addresses of the discovery; ``start`` runs ``keep`` in the caller's task group."""
        self._wanted = addresses
        self._router.set_addresses(addresses)
        for address in addresses:
            task = self._tasks.get(address)
            if task is None or task.done():
                self._tasks[address] = start(address)

    def stop(self) -> None:
        """Ends every link."""
        self._wanted = frozenset()
        for task in self._tasks.values():
            task.cancel()

    async def keep(self, address: str) -> None:
        """Keeps a stream to an address for as long as it is wanted."""
        backoff_s = MIN_BACKOFF_S
        while address in self._wanted:
            try:
                if await self._attach(address):
                    backoff_s = MIN_BACKOFF_S
            except Exception:  # outermost frame: one link's fault must not stop the router
                logger.exception("link to %s failed", address)
            # Half of the pause is jitter, so that routers do not come in step.
            await asyncio.sleep(backoff_s * (0.5 + self._rng.random() / 2))
            backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)
        self._router.forget(address)

    async def _attach(self, address: str) -> bool:
        """Runs one stream to its end; returns whether the engine said hello."""
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            call: Call = engine_pb2_grpc.EngineStub(channel).Attach()
            try:
                async with asyncio.timeout(self._hello_timeout_s):
                    first = await self._greet(call)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
                self._router.note_fault(address, _describe(error))
                return False
            if first is None:
                self._router.note_fault(address, "the engine did not say hello")
                return False
            await self._serve(address, call, first)
            return True

    async def _greet(self, call: Call) -> engine_pb2.AttachResponse | None:
        """Says hello; returns the engine's first message, or None when that is no hello."""
        hello = engine_pb2.RouterHello(router_id=self._router.state.router_id)
        await call.write(engine_pb2.AttachRequest(hello=hello))
        first = await call.read()
        return first if isinstance(first, engine_pb2.AttachResponse) and first.HasField("hello") else None

    async def _serve(self, address: str, call: Call, first: engine_pb2.AttachResponse) -> None:
        """Hands over what comes until the stream ends."""
        stream = Stream(call)
        engine = self._router.attach(address, first.hello, lambda engine: self._streams.setdefault(engine, stream))
        writer = asyncio.create_task(stream.write())
        fault = "the engine ended the stream"
        try:
            self._router.on_step(engine, first)
            # At the end of the stream read() answers with EOF, or raises the stream's status.
            while isinstance(message := await call.read(), engine_pb2.AttachResponse):
                self._router.on_step(engine, message)
        except grpc.aio.AioRpcError as error:
            fault = _describe(error)
        except asyncio.CancelledError:
            # Our own shutdown cancels this task; ``close`` cancels the call alone.
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # a coroutine runs in a task
                raise
            fault = engine.last_fault
        finally:
            self._streams.pop(engine, None)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            self._router.lose(engine, fault)


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
