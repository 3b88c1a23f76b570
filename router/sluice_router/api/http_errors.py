"""Answers that refuse a request over HTTP: status, ``Retry-After``, reason. ``error_statuses`` has the statuses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aiohttp import web

from sluice_router.api.openai_responses import format_error
from sluice_router.error_statuses import error_status_of
from sluice_router.errors import UnauthenticatedError

if TYPE_CHECKING:
    from sluice_router.errors import RouterError

REASON_HEADER = "x-sluice-reason"


def refuse(error: RouterError, *, status: int | None = None, headers: dict[str, str] | None = None) -> web.Response:
    """Answers with an error.

    Args:
        error: What went wrong.
        status: Overrides the table's status, for what is special to HTTP.
        headers: More headers.
    """
    headers = {**(headers or {}), REASON_HEADER: error.code}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(format_error(error), status=status or error_status_of(error).http_status, headers=headers)
