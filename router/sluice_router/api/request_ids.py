"""Ids that callers give their requests (``x-request-id``), and the id that an answer or an error carries."""

from __future__ import annotations

from sluice_core.records import RequestId
from sluice_router.api.openai_requests import FieldError, quote

MAX_REQUEST_ID_CHARACTERS = 128


def choose_shown_id(given: str, request_id: RequestId) -> str:
    """Chooses the id that an answer or an error carries: the caller's, or the router's where that is missing or wrong.

    Args:
        given: The caller's id, unchecked; empty: none.
        request_id: The router's.
    """
    try:
        return check_request_id("", given) or request_id
    except FieldError:
        return request_id


def check_request_id(name: str, value: str) -> str:
    """Checks a caller's id.

    Args:
        name: Where it stands.
        value: The id.

    Raises:
        FieldError: Too long, or not printable ASCII.
    """
    if len(value) > MAX_REQUEST_ID_CHARACTERS:
        raise FieldError(name, f"{name}: at most {MAX_REQUEST_ID_CHARACTERS} characters, not {len(value)}")
    if not (value.isascii() and value.isprintable()):
        raise FieldError(name, f"{name}: only printable ASCII, not {quote(value)}")
    return value
