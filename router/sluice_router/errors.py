"""One error tree, and one table from an error to what a client sees.

    RouterError
    ├── RequestError            the client's doing
    │   ├── InvalidRequestError       a field is wrong, or the prompt is too long
    │   ├── UnauthenticatedError      no API key, or nobody's
    │   ├── NotAllowedError           the owner of the API key may not ask for this
    │   ├── OwnerLimitError           a limit of the API key's owner is reached
    │   ├── ModelNotFoundError
    │   ├── UnsupportedEndpointError
    │   ├── BodyTooLargeError
    │   ├── UnknownStreamError        nobody has the answer that a client wants to go on with
    │   ├── TakenOverError            the client goes on with the answer elsewhere
    │   └── ClientGoneError
    ├── OverloadError           try again later
    │   ├── SloInfeasibleError
    │   ├── QueueFullError
    │   ├── NoEngineError
    │   ├── KeysUnavailableError
    │   └── ShuttingDownError
    ├── DeadlineError
    └── EngineFaultError        engines failed under the request
    PlanRefusedError (ValueError) and EngineProtocolError never reach a client

HTTP status, OpenAI ``type`` and ``code``, and gRPC status come from ``ERROR_STATUSES`` alone. The ``code`` is also the
metric label and the header ``x-sluice-reason``.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc


class RouterError(Exception):
    """A request cannot be served.

    Args:
        message: Names the object, the value and the limit.
        param: Field of the request, if one is to blame.
        code: Overrides the table's code with a more precise one.
        retry_after_s: Estimate of when to try again, in seconds; None when trying again is no use.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or ERROR_STATUSES[type(self)].code
        self.retry_after_s = retry_after_s


class RequestError(RouterError):
    """The client's doing."""


class InvalidRequestError(RequestError):
    """A field is wrong, or the prompt is too long."""


class UnauthenticatedError(RequestError):
    """No API key, or one that is nobody's; the message never quotes it."""


class NotAllowedError(RequestError):
    """The owner of the API key may not ask for this."""


class OwnerLimitError(RequestError):
    """A limit of the API key's owner is reached; the code names it. Says nothing of the cluster's load."""


class ModelNotFoundError(RequestError):
    """No such model."""


class UnsupportedEndpointError(RequestError):
    """A path that others serve and this router does not."""


class BodyTooLargeError(RequestError):
    """The body exceeds the limit."""


class UnknownStreamError(RequestError):
    """Nobody has the answer that the client wants to go on with, or not up to where the client is."""


class TakenOverError(RequestError):
    """The client goes on with the answer on another connection."""


class ClientGoneError(RequestError):
    """The client went away, or reads too slowly."""


class OverloadError(RouterError):
    """Try again later."""


class SloInfeasibleError(OverloadError):
    """No engine can meet the TTFT objective, and the plan says to refuse."""


class QueueFullError(OverloadError):
    """Too many requests wait."""


class NoEngineError(OverloadError):
    """No engine takes the request, and it waited for one as long as it may."""


class KeysUnavailableError(OverloadError):
    """API keys are asked for, and there are none to compare with."""


class ShuttingDownError(OverloadError):
    """This router is about to leave."""


class DeadlineError(RouterError):
    """The caller's deadline passed."""


class EngineFaultError(RouterError):
    """Engines failed under the request, or one refused to run it."""


class EngineProtocolError(Exception):
    """An engine broke the protocol (a gap, an unknown slot, ...): its stream is given up."""


class PlanRefusedError(ValueError):
    """A plan is not applied; the message names the field, the value and the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatus:
    """What a client sees of an error.

    Args:
        http_status: Status of the HTTP answer.
        type: OpenAI's error type.
        code: OpenAI's error code, unless the error says a more precise one.
        grpc_status: Status of the gRPC call.
    """

    http_status: int
    type: str
    code: str
    grpc_status: grpc.StatusCode


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

ERROR_STATUSES: dict[type[RouterError], ErrorStatus] = {
    InvalidRequestError: ErrorStatus(
        http_status=400, type="invalid_request_error", code="invalid_value", grpc_status=_INVALID
    ),
    UnauthenticatedError: ErrorStatus(
        http_status=401,
        type="invalid_request_error",
        code="invalid_api_key",
        grpc_status=grpc.StatusCode.UNAUTHENTICATED,
    ),
    NotAllowedError: ErrorStatus(
        http_status=403,
        type="permission_error",
        code="not_allowed",
        grpc_status=grpc.StatusCode.PERMISSION_DENIED,
    ),
    OwnerLimitError: ErrorStatus(http_status=429, type="rate_limit_error", code="owner_limit", grpc_status=_EXHAUSTED),
    ModelNotFoundError: ErrorStatus(
        http_status=404,
        type="invalid_request_error",
        code="model_not_found",
        grpc_status=grpc.StatusCode.NOT_FOUND,
    ),
    UnsupportedEndpointError: ErrorStatus(
        http_status=404,
        type="invalid_request_error",
        code="unsupported_endpoint",
        grpc_status=grpc.StatusCode.UNIMPLEMENTED,
    ),
    BodyTooLargeError: ErrorStatus(
        http_status=413, type="invalid_request_error", code="body_too_large", grpc_status=_EXHAUSTED
    ),
    UnknownStreamError: ErrorStatus(
        http_status=404, type="invalid_request_error", code="unknown_stream", grpc_status=grpc.StatusCode.NOT_FOUND
    ),
    TakenOverError: ErrorStatus(
        http_status=409, type="invalid_request_error", code="taken_over", grpc_status=grpc.StatusCode.ABORTED
    ),
    ClientGoneError: ErrorStatus(
        http_status=499, type="client_error", code="client_gone", grpc_status=grpc.StatusCode.CANCELLED
    ),
    SloInfeasibleError: ErrorStatus(
        http_status=429, type="rate_limit_error", code="slo_infeasible", grpc_status=_EXHAUSTED
    ),
    QueueFullError: ErrorStatus(http_status=429, type="rate_limit_error", code="rate_limited", grpc_status=_EXHAUSTED),
    NoEngineError: ErrorStatus(http_status=503, type="server_error", code="no_engine", grpc_status=_UNAVAILABLE),
    KeysUnavailableError: ErrorStatus(
        http_status=503, type="server_error", code="keys_unavailable", grpc_status=_UNAVAILABLE
    ),
    ShuttingDownError: ErrorStatus(http_status=503, type="server_error", code="draining", grpc_status=_UNAVAILABLE),
    DeadlineError: ErrorStatus(
        http_status=504,
        type="server_error",
        code="deadline_exceeded",
        grpc_status=grpc.StatusCode.DEADLINE_EXCEEDED,
    ),
    EngineFaultError: ErrorStatus(
        http_status=500, type="server_error", code="engine_fault", grpc_status=grpc.StatusCode.INTERNAL
    ),
}


def error_status_of(error: RouterError) -> ErrorStatus:
    """Looks up what a client sees of ``error``."""
    return ERROR_STATUSES[type(error)]
