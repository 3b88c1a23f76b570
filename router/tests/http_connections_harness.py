"""Connections to a router over HTTP, for their tests."""

from __future__ import annotations

from edge_fakes import read_until

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 100, "stream": False}
STREAM = {**BODY, "stream": True}


async def read_response(reader):
    head = (await read_until(reader, b"\r\n\r\n")).decode()
    status = int(head.split(" ", 2)[1])
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])}
    body = await reader.readexactly(int(headers["content-length"])) if "content-length" in headers else b""
    return status, headers, body
