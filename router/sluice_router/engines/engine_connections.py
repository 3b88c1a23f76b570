"""One task per engine address: connect, exchange hellos, hand messages over, connect again at the end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from sluice.v1 import engine_pb2
from sluice_core.records import EngineId
from sluice_router.engines.engine_stream import EngineStream, PeerTls, StreamEndedError
from sluice_router.event_loop_bursts import BurstQueue
from sluice_router.limit_type import Limit
from sluice_router.observability.metrics import EngineTraffic

logger = logging.getLogger(__name__)

# First and longest pause before the next attempt; an engine that starts again should be found at once.
MIN_BACKOFF_S = 0.1
# Pause after a stream that served: its requests wait for the answer whether the engine still has them.
RESUME_PAUSE_S = 0.02
MAX_BACKOFF_S = 2.0
HELLO_TIMEOUT_S = Limit("hello_timeout_s", 10.0, "longest wait for an engine's first message", above=0)


class EngineIdentity(Protocol):
    """What connections read of the handler's record of an engine."""

    @property
    def engine_id(self) -> EngineId:
        """Pod uid, or the launcher's name."""
        ...

    @property
    def address(self) -> str:
        """Address of the stream, as host:port."""
        ...

    @property
    def last_fault(self) -> str:
        """What went wrong last; empty: nothing."""
        ...


EngineT = TypeVar("EngineT", bound=EngineIdentity)


class EngineEventHandler(Protocol[EngineT]):
    """What connections call; ``scheduling.router.Router`` in production. No method blocks."""

    @property
    def router_id(self) -> str:
        """Unique per router process."""
        ...

    def set_addresses(self, addresses: frozenset[str]) -> None:
        """The discovery knows these addresses now."""
        ...

    def traffic_of(self, address: str) -> EngineTraffic:
        """Where the bytes of an address's streams are counted."""
        ...

    def attach(self, address: str, hello: engine_pb2.EngineHello, register: Callable[[EngineT], object]) -> EngineT:
        """A stream began; ``register`` is called before anything is sent on it."""
        ...

    def handle_message(self, engine: EngineT, message: engine_pb2.AttachResponse) -> None:
        """A message came."""
        ...

    def lose(self, engine: EngineT, fault: str) -> None:
        """A stream ended; called once per stream, whoever ended it."""
        ...

    def note_fault(self, address: str, fault: str) -> None:
        """An address has no stream, for this reason."""
        ...

    def forget(self, address: str) -> None:
        """The discovery does not know an address any more, and its stream has ended."""
        ...


class EngineConnections(Generic[EngineT]):
    """The streams to all engines.

    Args:
        handler: Takes what comes.
        hello_timeout_s: Longest wait for an engine's first message.
        rng: Jitter.
        tls: How new streams are encrypted; None: they are not.
    """

    def __init__(
        self,
        handler: EngineEventHandler[EngineT],
        *,
        hello_timeout_s: float,
        rng: random.Random,
        tls: Callable[[], PeerTls] | None = None,
    ) -> None:
        self._handler = handler
        self._tls = tls
        self._hello_timeout_s = hello_timeout_s
        self._rng = rng
        self._burst_queue = BurstQueue()
        self._streams: dict[EngineT, EngineStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._addresses: frozenset[str] = frozenset()

    def send(self, engine: EngineT, message: engine_pb2.AttachRequest) -> None:
        """Queues a message on the engine's stream; one whose stream is gone is dropped."""
        stream = self._streams.get(engine)
        if stream is not None:
            stream.send(message)

    def close(self, engine: EngineT, reason: str) -> None:
        """Ends the engine's stream."""
        stream = self._streams.pop(engine, None)
        if stream is not None:
            logger.info("engine %s at %s: stream closed (%s)", engine.engine_id, engine.address, reason)
            stream.cancel(engine.last_fault or reason)

    def set_addresses(self, addresses: frozenset[str], start: Callable[[str], asyncio.Task[None]]) -> None:
        """Takes the addresses of the discovery; ``start`` runs ``keep`` in the caller's task group."""
        self._addresses = addresses
        self._handler.set_addresses(addresses)
        for address in addresses:
            task = self._tasks.get(address)
            if task is None or task.done():
                self._tasks[address] = start(address)

    def stop(self) -> None:
        """Ends every connection."""
        self._addresses = frozenset()
        for task in self._tasks.values():
            task.cancel()

    async def keep(self, address: str) -> None:
        """Keeps a stream to an address for as long as the discovery knows it."""
        loop, backoff_s = asyncio.get_running_loop(), MIN_BACKOFF_S
        while address in self._addresses:
            started_s = loop.time()
            try:
                if await self._run_stream(address):
                    has_served = loop.time() - started_s > MAX_BACKOFF_S
                    backoff_s = RESUME_PAUSE_S if has_served else MIN_BACKOFF_S
            except Exception:  # the task's outermost frame: one engine's fault must not stop the router
                logger.exception("engine at %s: its stream failed", address)
            # Half of the pause is jitter, so that routers do not come in step.
            await asyncio.sleep(backoff_s * (0.5 + self._rng.random() / 2))
            backoff_s = min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, backoff_s * 2))
        self._handler.forget(address)

    async def _run_stream(self, address: str) -> bool:
        """Runs one stream to its end; returns whether the engine said hello."""
        stream: EngineStream | None = None
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                tls = self._tls() if self._tls else None
                stream = await connect(address, self._handler.traffic_of(address), self._burst_queue, tls)
                stream.send(engine_pb2.AttachRequest(hello=engine_pb2.RouterHello(router_id=self._handler.router_id)))
                first = await stream.read_first()
            if not first.HasField("hello"):
                self._handler.note_fault(address, "the engine did not say hello")
                return False
            await self._serve(address, stream, first)
        except StreamEndedError as error:
            self._handler.note_fault(address, str(error))
            return False
        except TimeoutError:
            self._handler.note_fault(address, f"the engine did not say hello within {self._hello_timeout_s:g} s")
            return False
        else:
            return True
        finally:
            if stream is not None:
                stream.cancel()
                # While the address is known a new stream follows, and does not wait for the old one's connection.
                if address not in self._addresses:
                    await stream.wait_disconnected()

    async def _serve(self, address: str, stream: EngineStream, first: engine_pb2.AttachResponse) -> None:
        """Hands over what comes until the stream ends."""
        engine = self._handler.attach(address, first.hello, lambda engine: self._streams.setdefault(engine, stream))
        # The fault if this task is cancelled.
        fault = "this router is about to leave"
        try:
            self._handler.handle_message(engine, first)
            fault = await stream.serve(lambda message: self._handler.handle_message(engine, message))
        finally:
            self._streams.pop(engine, None)
            self._handler.lose(engine, fault)


async def connect(
    address: str, traffic: EngineTraffic, burst_queue: BurstQueue, tls: PeerTls | None = None
) -> EngineStream:
    """Connects to an engine and begins the call.

    Args:
        address: host:port; an IPv6 host stands in brackets.
        traffic: Where its bytes are counted.
        burst_queue: The loop's, for messages of all streams.
        tls: How the stream is encrypted; None: it is not.

    Raises:
        StreamEndedError: Nobody listens there, or somebody who is no engine of ours.
    """
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")

    def make_protocol() -> asyncio.BaseProtocol:
        # It has all methods of ``asyncio.Protocol``, which a compiled class cannot extend.
        return cast(
            "asyncio.BaseProtocol", EngineStream(address, traffic, burst_queue, loop, is_encrypted=tls is not None)
        )

    try:
        _, stream = await loop.create_connection(
            make_protocol,
            host.removeprefix("[").removesuffix("]"),
            int(port),
            ssl=tls.context if tls else None,
            server_hostname=tls.engine_name if tls else None,
        )
    except OSError as error:
        raise StreamEndedError(f"unavailable: {error}") from error
    return cast("EngineStream", stream)
