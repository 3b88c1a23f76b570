"""Reads the body of an HTTP request: its size, its encoding, its time, and clients that ask before they send it."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http import HttpVersion11

from sluice_router.api.http.http_connection import CONTINUE
from sluice_router.api.openai_requests import FieldError, quote
from sluice_router.errors import BodyTooLargeError, DeadlineError, InvalidRequestError

MAX_BODY_BYTES = 8 * 1024 * 1024  # unpacked
BODY_TIMEOUT_S = 60.0  # from the end of the headers to the end of the body
# What bodies may be packed with; nothing is the usual case.
ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})


async def read_body(
    request: web.BaseRequest, *, limit: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """Reads a request's body, unpacked.

    Args:
        request: Its headers have come.
        limit: Largest body, in bytes.
        timeout_s: Longest time until it has come.

    Raises:
        FieldError: It is packed in an unknown way.
        RouterError: It is too large, comes too slowly, or cannot be read.
    """
    if (request.content_length or 0) > limit:
        raise BodyTooLargeError(f"the body has {request.content_length} bytes; the limit is {limit}")
    check_encoding(request.headers.get("Content-Encoding", ""))
    answer_expectation(request)
    parts, size = [], 0
    try:
        if request.content.is_eof():
            # It came with the headers.
            whole = request.content.read_nowait()
            if len(whole) > limit:
                raise BodyTooLargeError(f"the body has more than {limit} bytes, which is the limit")
            return whole
        async with asyncio.timeout(timeout_s):
            async for part in request.content.iter_any():
                size += len(part)
                if size > limit:
                    raise BodyTooLargeError(f"the body has more than {limit} bytes, which is the limit")
                parts.append(part)
    except TimeoutError as error:
        raise DeadlineError(f"the body did not come within {timeout_s:g} s") from error
    except web.RequestPayloadError as error:
        raise InvalidRequestError(f"the body cannot be read: {error}", code="malformed_http") from error
    return b"".join(parts)


def check_encoding(encoding: str) -> None:
    """Refuses a body that is packed in a way that aiohttp does not unpack: it would be read as plain."""
    if encoding.strip().lower() not in ENCODINGS:
        known = ", ".join(sorted(ENCODINGS - {""}))
        message = f"Content-Encoding: known are {known}, not {quote(encoding)}"
        raise FieldError("Content-Encoding", message, "unsupported_encoding")


def answer_expectation(request: web.BaseRequest) -> None:
    """Tells a client that waits for it to send its body (``Expect: 100-continue``)."""
    expectation = request.headers.get("Expect")
    if expectation is None or request.version < HttpVersion11:
        return
    if expectation.lower() != "100-continue":
        raise InvalidRequestError(
            f"Expect: only 100-continue is known, not {expectation[:80]!r}", code="expectation_failed"
        )
    if request.transport is not None and not request.transport.is_closing():
        request.transport.write(CONTINUE)
