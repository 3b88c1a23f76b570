"""Event loops of the router's tests."""

from __future__ import annotations

import asyncio

import uvloop

# The router runs on uvloop; connections behave differently enough on asyncio's own loop to be tested on both.
BOTH_LOOPS = "test_http_connections"


def pytest_asyncio_loop_factories(config, item):
    """Chooses the event loops of a test."""
    if item.module.__name__ == BOTH_LOOPS:
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}
