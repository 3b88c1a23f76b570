"""What tests of HTTP requests share."""

from __future__ import annotations

MESSAGES = [{"role": "user", "content": "hi"}]


def make_completion(**fields):
    return {"model": "tiny", "prompt": "hi", **fields}


def make_chat(**fields):
    return {"model": "tiny", "messages": MESSAGES, **fields}
