"""What tests of HTTP requests share."""

from __future__ import annotations

import contextlib

import httpx

from sluice_router.api.http.http_api import HttpApi, HttpSettings
from sluice_router.security.access_control import OPEN_ACCESS

MESSAGES = [{"role": "user", "content": "hi"}]


def make_completion(**fields):
    return {"model": "tiny", "prompt": "hi", **fields}


def make_chat(**fields):
    return {"model": "tiny", "messages": MESSAGES, **fields}


@contextlib.asynccontextmanager
async def serving_client(plane, text, access=OPEN_ACCESS):
    """A client of a router's HTTP API in front of a fake data plane."""
    api = HttpApi(plane, text, HttpSettings(max_body_bytes=20_000), access=access)
    port = await api.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        yield client
    await api.close(0.1)
