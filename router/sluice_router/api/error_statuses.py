"""HTTP status, OpenAI type and gRPC status of every error that a client can see: one table.

When to try again is said where an error is raised.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from sluice_router.errors import (
    BodyTooLargeError,
    ClientGoneError,
    DeadlineError,
    EngineFaultError,
    InvalidRequestError,
    KeysUnavailableError,
    ModelNotFoundError,
    NoEngineError,
    NotAllowedError,
    OwnerLimitError,
    QueueFullError,
    RouterError,
    ShuttingDownError,
    SloInfeasibleError,
    TakenOverError,
    UnauthenticatedError,
    UnknownStreamError,
    UnsupportedEndpointError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatus:
    """What a client sees of an error.

    Args:
        http_status: Status of the HTTP answer.
        type: OpenAI's error type.
        grpc_status: Status of the gRPC call.
    """

    http_status: int
    type: str
    grpc_status: grpc.StatusCode


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

ERROR_STATUSES: dict[type[RouterError], ErrorStatus] = {
    InvalidRequestError: ErrorStatus(http_status=400, type="invalid_request_error", grpc_status=_INVALID),
    UnauthenticatedError: ErrorStatus(
        http_status=401,
        type="invalid_request_error",
        grpc_status=grpc.StatusCode.UNAUTHENTICATED,
    ),
    NotAllowedError: ErrorStatus(
        http_status=403,
        type="permission_error",
        grpc_status=grpc.StatusCode.PERMISSION_DENIED,
    ),
    OwnerLimitError: ErrorStatus(http_status=429, type="rate_limit_error", grpc_status=_EXHAUSTED),
    ModelNotFoundError: ErrorStatus(
        http_status=404,
        type="invalid_request_error",
        grpc_status=grpc.StatusCode.NOT_FOUND,
    ),
    UnsupportedEndpointError: ErrorStatus(
        http_status=404,
        type="invalid_request_error",
        grpc_status=grpc.StatusCode.UNIMPLEMENTED,
    ),
    BodyTooLargeError: ErrorStatus(http_status=413, type="invalid_request_error", grpc_status=_EXHAUSTED),
    UnknownStreamError: ErrorStatus(
        http_status=404, type="invalid_request_error", grpc_status=grpc.StatusCode.NOT_FOUND
    ),
    TakenOverError: ErrorStatus(http_status=409, type="invalid_request_error", grpc_status=grpc.StatusCode.ABORTED),
    ClientGoneError: ErrorStatus(http_status=499, type="client_error", grpc_status=grpc.StatusCode.CANCELLED),
    SloInfeasibleError: ErrorStatus(http_status=429, type="rate_limit_error", grpc_status=_EXHAUSTED),
    QueueFullError: ErrorStatus(http_status=429, type="rate_limit_error", grpc_status=_EXHAUSTED),
    NoEngineError: ErrorStatus(http_status=503, type="server_error", grpc_status=_UNAVAILABLE),
    KeysUnavailableError: ErrorStatus(http_status=503, type="server_error", grpc_status=_UNAVAILABLE),
    ShuttingDownError: ErrorStatus(http_status=503, type="server_error", grpc_status=_UNAVAILABLE),
    DeadlineError: ErrorStatus(
        http_status=504,
        type="server_error",
        grpc_status=grpc.StatusCode.DEADLINE_EXCEEDED,
    ),
    EngineFaultError: ErrorStatus(http_status=500, type="server_error", grpc_status=grpc.StatusCode.INTERNAL),
}


def error_status_of(error: RouterError) -> ErrorStatus:
    """Looks up what a client sees of ``error``."""
    return ERROR_STATUSES[type(error)]
