"""The errors of requests; ``api.error_statuses`` says with which status a client sees each.

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
"""

from __future__ import annotations

MIN_RETRY_S = 1.0  # least Retry-After


class RouterError(Exception):
    """A request cannot be served.

    Args:
        message: Names the object, the value and the limit.
        param: Field of the request, if one is to blame.
        code: More precise than the class's.
        retry_after_s: Estimate of when to try again, in seconds; None when trying again is no use.

    Attributes:
        code: Also the metric label and the header ``x-sluice-reason``.
    """

    default_code: str

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s


class RequestError(RouterError):
    """The client's doing."""


class InvalidRequestError(RequestError):
    """A field is wrong, or the prompt is too long."""

    default_code = "invalid_value"


class UnauthenticatedError(RequestError):
    """No API key, or one that is nobody's; the message never quotes it."""

    default_code = "invalid_api_key"


class NotAllowedError(RequestError):
    """The owner of the API key may not ask for this."""

    default_code = "not_allowed"


class OwnerLimitError(RequestError):
    """A limit of the API key's owner is reached; the code names it. Says nothing of the cluster's load."""

    default_code = "owner_limit"


class ModelNotFoundError(RequestError):
    """No such model."""

    default_code = "model_not_found"


class UnsupportedEndpointError(RequestError):
    """A path that others serve and this router does not."""

    default_code = "unsupported_endpoint"


class BodyTooLargeError(RequestError):
    """The body exceeds the limit."""

    default_code = "body_too_large"


class UnknownStreamError(RequestError):
    """Nobody has the answer that the client wants to go on with, or not up to where the client is."""

    default_code = "unknown_stream"


class TakenOverError(RequestError):
    """The client goes on with the answer on another connection."""

    default_code = "taken_over"


class ClientGoneError(RequestError):
    """The client went away, or reads too slowly."""

    default_code = "client_gone"


class OverloadError(RouterError):
    """Try again later."""


class SloInfeasibleError(OverloadError):
    """No engine can meet the TTFT objective, and the plan says to refuse."""

    default_code = "slo_infeasible"


class QueueFullError(OverloadError):
    """Too many requests wait."""

    default_code = "rate_limited"


class NoEngineError(OverloadError):
    """No engine takes the request, and it waited for one as long as it may."""

    default_code = "no_engine"


class KeysUnavailableError(OverloadError):
    """API keys are asked for, and there are none to compare with."""

    default_code = "keys_unavailable"


class ShuttingDownError(OverloadError):
    """This router is about to leave."""

    default_code = "draining"


class DeadlineError(RouterError):
    """The caller's deadline passed."""

    default_code = "deadline_exceeded"


class EngineFaultError(RouterError):
    """Engines failed under the request, or one refused to run it."""

    default_code = "engine_fault"


class EngineProtocolError(Exception):
    """An engine broke the protocol (a gap, an unknown slot, ...): its stream is given up."""


class PlanRefusedError(ValueError):
    """A plan is not applied; the message names the field, the value and the limit."""
