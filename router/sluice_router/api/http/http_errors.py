"""Errors over HTTP, in OpenAI's form: whole answers with status, ``Retry-After`` and reason, and ends of streams.

``error_statuses`` has the statuses.
"""

from __future__ import annotations

import json
import math
from typing import Any

from aiohttp import web

from sluice_router.api.error_statuses import error_status_of
from sluice_router.api.openai_responses import DONE
from sluice_router.errors import RouterError, UnauthenticatedError

REASON_HEADER = "x-sluice-reason"
REQUEST_ID_HEADER = "x-request-id"


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


def format_error(error: RouterError) -> dict[str, Any]:
    """Formats an error in OpenAI's form."""
    return {
        "error": {
            "message": error.message,
            "type": error_status_of(error).type,
            "param": error.param,
            "code": error.code,
        }
    }


def format_error_event(error: RouterError) -> bytes:
    """Formats the end of a stream that fails after its first byte."""
    text = json.dumps(format_error(error), ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode() + DONE
