"""TLS credentials of our gRPC servers and channels, and the check of a client's name.

A peer is trusted when an authority of ``ca.crt`` has signed its certificate and the certificate is for an expected
name. The authority alone is not enough, because it may sign for others too. Names are those of Services: no certificate
knows the addresses of pods beforehand.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from sluice.certificate_rotation import CertificateFolder
    from sluice.certificates import Certificates

logger = logging.getLogger(__name__)

# gRPC's name of the DNS names in a peer's certificate.
PEER_NAMES = "peer_dns"
VERIFY_FAILED = "CERTIFICATE_VERIFY_FAILED"
# A channel's option: pods speak with pods of the cluster directly, also where http_proxy is set for other traffic.
WITHOUT_PROXY = ("grpc.enable_http_proxy", 0)
HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def make_server_credentials(folder: CertificateFolder) -> grpc.ServerCredentials:
    """Makes credentials that follow a folder: each new connection gets the newest certificate.

    Args:
        folder: The caller refreshes it. With authorities in it, clients must show a certificate.
    """
    used = folder.current

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        # gRPC calls this on a thread of its own at each new connection, so that it only reads. None: no change.
        nonlocal used
        newest = folder.current
        if newest is used:
            return None
        used = newest
        return _configure(newest)

    return grpc.dynamic_ssl_server_credentials(
        _configure(used),
        fetch,  # type: ignore[arg-type] # gRPC takes None too
        require_client_authentication=bool(used.authorities),
    )


def _configure(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pairs = [(certificates.key, certificates.chain)]
    return grpc.ssl_server_certificate_configuration(pairs, certificates.authorities or None)


def make_channel(
    address: str, certificates: Certificates, server_name: str, options: Collection[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """Makes a channel with a client certificate. A new certificate needs a new channel.

    Args:
        address: host:port.
        certificates: With authorities.
        server_name: Name that the server's certificate must be for, whatever the address.
        options: Further gRPC options.
    """
    credentials = grpc.ssl_channel_credentials(certificates.authorities, certificates.key, certificates.chain)
    named = [("grpc.ssl_target_name_override", server_name), WITHOUT_PROXY, *options]
    return grpc.aio.secure_channel(address, credentials, options=named)


def describe_distrust(error: grpc.aio.AioRpcError, server_name: str) -> str:
    """Says which side did not trust the other; empty when the server is merely away.

    Args:
        error: Of a call over a channel of ``make_channel``.
        server_name: Name that the channel expects.
    """
    details = error.details() or ""
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return details
    if VERIFY_FAILED in details:
        return f"the certificate shown there is not valid: {details.rpartition(VERIFY_FAILED)[2].strip(': ')}"
    if "Hostname Verification" in details:
        return f"the certificate shown there is not for {server_name}"
    if "Socket closed" in details:
        return "connections are closed at once; our certificate may not be trusted there"
    return ""


class PeerCheck(grpc.aio.ServerInterceptor):
    """Refuses clients whose certificate is for none of the allowed names.

    Args:
        names: Allowed DNS names.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        make = HANDLERS[handler.request_streaming, handler.response_streaming]
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        return make(self._guard(behavior), handler.request_deserializer, handler.response_serializer)

    def _guard(self, behavior: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Puts the check before a call."""
        if not inspect.isasyncgenfunction(behavior):

            async def call(request: Any, context: Any) -> Any:
                await self._check(context)
                return await behavior(request, context)

            return call

        async def generate(request: Any, context: Any) -> Any:
            await self._check(context)
            async for answer in behavior(request, context):
                yield answer

        return generate

    async def _check(self, context: Any) -> None:
        shown = [name.decode(errors="replace") for name in context.auth_context().get(PEER_NAMES, ())]
        if self._names.isdisjoint(shown):
            served = " or ".join(sorted(self._names))
            message = f"the certificate is for {', '.join(shown) or 'no name'}; this port serves {served} only"
            logger.warning("%s is refused: %s", context.peer(), message)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)
