"""The gRPC server of an engine: engine stream, health, reflection. With certificates it serves routers only."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sluice.certificate_rotation import CertificateFolder
from sluice.certificates import CertificateError
from sluice.grpc_credentials import PeerCheck, make_server_credentials
from sluice.v1 import engine_pb2, engine_pb2_grpc
from sluice_engine.errors import StartError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sluice.v1 import engine_pb2 as wire
    from sluice_engine.server.attach_stream import AttachStream
    from sluice_engine.server.engine_server import EngineServer
    from sluice_engine.server.router_session import RouterSession
    from sluice_engine.settings import EngineSettings

logger = logging.getLogger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
# A prompt of a million tokens takes 4 MB.
MAX_MESSAGE_BYTES = 64 << 20
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Notices a router that vanished without closing, so that its requests' lease begins; routers may ping too.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # A second engine on the same port must fail, not share it.
    ("grpc.so_reuseport", 0),
)


def read_certificates(settings: EngineSettings) -> CertificateFolder | None:
    """The certificates that routers are served with; None: without TLS.

    Raises:
        StartError: They cannot be used.
    """
    if settings.peer_tls is None:
        return None
    try:
        return CertificateFolder(Path(settings.peer_tls), is_mutual=True)
    except CertificateError as error:
        raise StartError(f"--peer-tls: {error}") from error


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
            # The outermost frame of the reader's task: what one router sends costs its stream, not the engine.
            logger.exception("router %s: its stream is cut", session.router_id)
        finally:
            stream.close()


async def start_grpc(
    settings: EngineSettings, server: EngineServer, certificates: CertificateFolder | None = None
) -> tuple[grpc.aio.Server, Any]:
    """Starts the gRPC server with the engine stream, health and reflection; with certificates, for routers only."""
    checks = [PeerCheck([settings.router_name])] if settings.router_name else []
    listener = grpc.aio.server(options=GRPC_OPTIONS, interceptors=checks)
    engine_pb2_grpc.add_EngineServicer_to_server(EngineService(server), listener)
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, listener)
    for name in ("", SERVICE):
        await state.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), listener)
    address = f"{settings.host}:{settings.port}"
    if certificates is None:
        listener.add_insecure_port(address)
    else:
        listener.add_secure_port(address, make_server_credentials(certificates))
    await listener.start()
    return listener, state
