"""What lets a client go on with its answer: a random capability, and the key that engines know of it.

Engines get a hash of capability, owner and the request's id. So nobody resumes an answer by what an engine knows of it,
and another owner of an API key does not even find it.
"""

from __future__ import annotations

import hashlib
import re
import secrets

CAPABILITY_BYTES = 24
_FORM = re.compile(r"[A-Za-z0-9_-]{32}")


def make_capability() -> str:
    """Makes a capability: 192 random bits in 32 characters."""
    return secrets.token_urlsafe(CAPABILITY_BYTES)


def is_capability(text: str) -> bool:
    """Whether a text has the form of a capability."""
    return _FORM.fullmatch(text) is not None


def derive_resume_key(capability: str, owner: str, shown_id: str) -> bytes:
    """Derives what engines know of a capability.

    Args:
        capability: The client's.
        owner: Of the API key with which the request came; empty where none is asked for.
        shown_id: The request's id as its client knows it.
    """
    return hashlib.sha256(f"{capability}\0{owner}\0{shown_id}".encode()).digest()
