"""The lives of engine streams: one task per address.

A link connects, says hello, waits for the engine's hello, and from then on each message goes to ``Router.handle_message``
synchronously (``engine_stream``). When the stream ends, whoever ended it, the router is told once, and the link tries
again with jitter for as long as the discovery knows the address.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from sluice.v1 import engine_pb2
from sluice_router.engines.engine_stream import EngineStream, StreamEndedError, connect
from sluice_router.fair_loop import FairQueue

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from sluice_router.engines.engine_stream import PeerTls
    from sluice_router.scheduling.router import Router
    from sluice_router.scheduling.state import ConnectedEngine

logger = logging.getLogger(__name__)

# First and longest pause before the next attempt; an engine that starts again should be found at once.
MIN_BACKOFF_S = 0.1
# Pause after a stream that served: its requests wait for the answer whether the engine still has them.
RESUME_PAUSE_S = 0.02
MAX_BACKOFF_S = 2.0


class EngineConnections:
    """All links; implements ``router.LinkWriter``.

    Args:
        router: Takes what comes.
        hello_timeout_s: Longest wait for an engine's first message.
        rng: Jitter.
        tls: How new streams are encrypted; None: they are not.
    """

    def __init__(
        self,
        router: Router,
        *,
        hello_timeout_s: float,
        rng: random.Random,
        tls: Callable[[], PeerTls] | None = None,
    ) -> None:
        self._router = router
        self._tls = tls
        self._hello_timeout_s = hello_timeout_s
        self._rng = rng
        self._fair_queue = FairQueue()
        self._streams: dict[ConnectedEngine, EngineStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wanted: frozenset[str] = frozenset()

    # --- LinkWriter ----------------------------------------------------------------------------------------------

    def send(self, engine: ConnectedEngine, message: engine_pb2.AttachRequest) -> None:
        """See ``LinkWriter.send``."""
        stream = self._streams.get(engine)
        if stream is not None:
            stream.send(message)

    def close(self, engine: ConnectedEngine, reason: str) -> None:
        """See ``LinkWriter.close``."""
        stream = self._streams.pop(engine, None)
        if stream is not None:
            logger.info("engine %s at %s: stream closed (%s)", engine.engine_id, engine.address, reason)
            stream.cancel(engine.last_fault or reason)

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
        loop, backoff_s = asyncio.get_running_loop(), MIN_BACKOFF_S
        while address in self._wanted:
            started_s = loop.time()
            try:
                if await self._attach(address):
                    has_served = loop.time() - started_s > MAX_BACKOFF_S
                    backoff_s = RESUME_PAUSE_S if has_served else MIN_BACKOFF_S
            except Exception:  # outermost frame: one link's fault must not stop the router
                logger.exception("link to %s failed", address)
            # Half of the pause is jitter, so that routers do not come in step.
            await asyncio.sleep(backoff_s * (0.5 + self._rng.random() / 2))
            backoff_s = min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, backoff_s * 2))
        self._router.forget(address)

    async def _attach(self, address: str) -> bool:
        """Runs one stream to its end; returns whether the engine said hello."""
        stream: EngineStream | None = None
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                tls = self._tls() if self._tls else None
                stream = await connect(address, self._router.traffic_of(address), self._fair_queue, tls)
                stream.send(engine_pb2.AttachRequest(hello=self._make_hello()))
                first = await stream.read_first()
            if not first.HasField("hello"):
                self._router.note_fault(address, "the engine did not say hello")
                return False
            await self._serve(address, stream, first)
        except StreamEndedError as error:
            self._router.note_fault(address, str(error))
            return False
        except TimeoutError:
            self._router.note_fault(address, f"the engine did not say hello within {self._hello_timeout_s:g} s")
            return False
        else:
            return True
        finally:
            if stream is not None:
                stream.cancel()
                if address not in self._wanted:  # else a new stream does not wait for the old one
                    await stream.wait_disconnected()

    def _make_hello(self) -> engine_pb2.RouterHello:
        return engine_pb2.RouterHello(router_id=self._router.state.router_id)

    async def _serve(self, address: str, stream: EngineStream, first: engine_pb2.AttachResponse) -> None:
        """Hands over what comes until the stream ends."""
        engine = self._router.attach(address, first.hello, lambda engine: self._streams.setdefault(engine, stream))
        fault = "this router is about to leave"
        try:
            self._router.handle_message(engine, first)
            fault = await stream.serve(lambda message: self._router.handle_message(engine, message))
        finally:
            self._streams.pop(engine, None)
            self._router.lose(engine, fault)
