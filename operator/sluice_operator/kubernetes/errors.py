"""Errors of requests to the API server, and which HTTP status is which."""

from __future__ import annotations

import re


class KubernetesError(Exception):
    """A request that failed.

    Below it:

    - ``NotFoundError`` (404)
    - ``ConflictError`` (409): somebody else wrote first, or the object was replaced
    - ``ForbiddenError`` (401, 403): RBAC, a quota, a namespace that ends
    - ``InvalidError`` (400, 422, and other 4xx): what was sent is wrong
    - ``BusyError`` (429, 5xx, no answer): try again later
    - ``LeaseLostError``: this replica no longer leads, nothing was sent
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotFoundError(KubernetesError):
    """There is no such object."""


class ConflictError(KubernetesError):
    """The object exists already, or its uid or resourceVersion is another one."""


class ForbiddenError(KubernetesError):
    """We may not do this."""


class InvalidError(KubernetesError):
    """The server refuses what was sent."""


class BusyError(KubernetesError):
    """The server did not answer, or asks to come back later."""


class LeaseLostError(KubernetesError):
    """This replica no longer holds the lease; nothing was sent."""


# From status to error; what is not here is invalid below 500 and busy from there on.
ERRORS: dict[int, type[KubernetesError]] = {
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    429: BusyError,
}
# Server-side apply answers unknown fields and values of a wrong type with status 500 and these words.
NOT_TYPED = "failed to create typed patch object"
# Kubernetes 1.30 says no more where an apply finds no object and the account may not create one.
UNEXPLAINED = re.compile(r'(?:^| )([a-z]+)[a-z0-9.-]* "[^"]*" is forbidden: $')


def make_error(status: int, message: str, retry_after_s: float | None = None) -> KubernetesError:
    """Makes the error of an HTTP status, or of the server's message where the status misleads."""
    if (unexplained := UNEXPLAINED.search(message)) is not None:
        message += f'cannot create resource "{unexplained[1]}"'
    default = InvalidError if status < 500 or NOT_TYPED in message else BusyError
    return ERRORS.get(status, default)(message, retry_after_s=retry_after_s)


def exceeds_quota(message: str) -> bool:
    """Whether Kubernetes refused something for a ResourceQuota; there is no status of its own for that."""
    return "exceeded quota" in message
