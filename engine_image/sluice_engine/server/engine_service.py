"""The gRPC side of the engine stream: reads a router's messages, and writes what the server has for it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import engine_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sluice_engine.server.engine_server import EngineServer
    from sluice_engine.server.router_session import AttachStream, RouterSession

logger = logging.getLogger(__name__)


class EngineService(engine_pb2_grpc.EngineServicer):
    """Serves ``sluice.v1.Engine``.

    Args:
        server: The engine.
    """

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    async def Attach(  # type: ignore[override]  # noqa: N802 - the generated stub knows generators only; the name is the wire's
        self,
        request_iterator: AsyncIterator[wire.AttachRequest],
        context: grpc.aio.ServicerContext[wire.AttachRequest, wire.AttachResponse],
    ) -> None:
        """Serves one router until either side ends the stream."""
        messages = aiter(request_iterator)
        first = await anext(messages, None)
        if first is None or not first.hello.router_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must carry hello.router_id")
            return
        session, stream = self._server.attach(first.hello.router_id)
        reader = asyncio.create_task(self._read(session, stream, messages))
        try:
            await stream.write(context)
        finally:
            reader.cancel()
            self._server.detach(session, stream)

    async def _read(
        self, session: RouterSession, stream: AttachStream, messages: AsyncIterator[wire.AttachRequest]
    ) -> None:
        """Passes messages on until the router ends the stream or another one has taken its place."""
        try:
            async for message in messages:
                if session.stream is not stream:
                    return
                await self._server.take(session, message)
        except Exception:
            logger.exception("router %s: its stream is cut", session.router_id)
        finally:
            stream.close()
