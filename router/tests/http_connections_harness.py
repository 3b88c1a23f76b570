"""Connections to a router over HTTP, for their tests."""

from __future__ import annotations

import contextlib

from edge_fakes import read_until

from sluice_router.api.http.http_api import HttpApi, HttpSettings

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 100, "stream": False}
STREAM = {**BODY, "stream": True}


async def read_response(reader):
    head = (await read_until(reader, b"\r\n\r\n")).decode()
    status = int(head.split(" ", 2)[1])
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])}
    body = await reader.readexactly(int(headers["content-length"])) if "content-length" in headers else b""
    return status, headers, body


@contextlib.asynccontextmanager
async def starting_apis(plane, text):
    """A function that starts HTTP APIs in front of a fake data plane, by their settings; all close at the end."""
    started = []

    async def start(**settings):
        api = HttpApi(plane, text, HttpSettings(**settings))
        started.append(api)
        return api, await api.start("127.0.0.1", 0)

    yield start
    for api in started:
        await api.close(0)
