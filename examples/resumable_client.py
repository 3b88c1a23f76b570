"""A streaming client that goes on when its connection, or the router behind it, is lost. Copy it: it needs httpx.

    async with httpx.AsyncClient() as client:
        async for chunk in stream(client, ["http://127.0.0.1:8000"], "/v1/chat/completions", {"model": "tiny", ...}):
            print(chunk["choices"][0]["delta"].get("content", "") if chunk["choices"] else "", end="")

Every chunk comes once and in order. ``docs/guides/resume.md`` says what happens on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

DONE = "[DONE]"
# The error of a router that is told to end, and of no other fault: another router goes on.
LEAVING = "draining"
RETRY_STATUSES = frozenset({502, 503, 504})
RETRY_S = 0.1
MAX_PAUSE_S = 2.0


class StreamError(Exception):
    """The answer cannot go on.

    Args:
        message: Why.
        code: The router's code of it; empty: the router said nothing.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Progress:
    """How far a stream is; pass one to ``stream`` to watch it.

    Args:
        request_id: The request's id, which the client chooses.
        capability: What lets the client go on; empty: no answer has begun.
        last_event_id: Id of the last event; empty: none has come.
        num_resumed: Times that the answer went on after a loss. Before its head the request is sent again.
    """

    request_id: str = field(default_factory=lambda: f"resumable-{uuid.uuid4().hex}")
    capability: str = ""
    last_event_id: str = ""
    num_resumed: int = 0

    def note_head(self, headers: Mapping[str, str]) -> None:
        """Notes that an answer has begun, or goes on."""
        self.num_resumed += bool(self.capability)
        self.capability = headers["x-sluice-resume"]


async def stream(
    client: httpx.AsyncClient,
    urls: Sequence[str],
    path: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    give_up_s: float = 30.0,
    progress: Progress | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """Streams an answer of one choice.

    Args:
        client: Sends the requests.
        urls: Root URLs of routers, tried one after the other; a Service needs one.
        path: ``/v1/completions`` or ``/v1/chat/completions``.
        body: The request.
        headers: More headers, such as ``Authorization``.
        give_up_s: Longest time without an event while the stream is lost; no longer than routers keep it.
        progress: Kept up to date.

    Yields:
        Chunks, as OpenAI's API has them.

    Raises:
        StreamError: The request was refused, or the answer is lost.
    """
    progress = progress or Progress()
    lost_since_s: float | None = None
    for url in itertools.cycle(urls):
        sent = {**(headers or {}), **_make_headers(progress)}
        request = client.build_request("POST", url + path, json={**body, "stream": True}, headers=sent)
        try:
            async with contextlib.aclosing(_read_answer(client, request, progress)) as chunks:
                async for chunk in chunks:
                    lost_since_s = None
                    yield chunk
        except httpx.TransportError:
            # The router or the way to it is gone: the next one goes on.
            pause_s = RETRY_S
        except _LostError as loss:
            pause_s = loss.pause_s
        else:
            return
        now = time.monotonic()
        lost_since_s = now if lost_since_s is None else lost_since_s
        if now - lost_since_s > give_up_s:
            raise StreamError(f"no router went on with the answer within {give_up_s:g} s")
        await asyncio.sleep(pause_s)


class _LostError(Exception):
    """The answer ended before its time, and can go on.

    Args:
        pause_s: Wait before the next try, in seconds.
    """

    def __init__(self, pause_s: float = RETRY_S) -> None:
        super().__init__(f"try again in {pause_s:g} s")
        self.pause_s = pause_s


async def _read_answer(
    client: httpx.AsyncClient, request: httpx.Request, progress: Progress
) -> AsyncGenerator[dict[str, Any]]:
    """Reads what one router has of the answer, to its end.

    Raises:
        StreamError: It cannot go on.
        _LostError: It can.
    """
    response = await client.send(request, stream=True)
    async with contextlib.aclosing(response):
        if response.status_code == 404 and progress.capability and not progress.last_event_id:
            # Nothing has come of the answer, and nobody has it: the request is sent again.
            progress.capability = ""
            raise _LostError
        if response.status_code != 200:
            raise _LostError(await _read_pause_s(response, is_resumed=bool(progress.capability)))
        progress.note_head(response.headers)
        async for event_id, data in _read_events(response):
            if data == DONE:
                return
            chunk = json.loads(data)
            if "error" in chunk:
                if chunk["error"]["code"] == LEAVING:
                    break
                raise StreamError(chunk["error"]["message"], chunk["error"]["code"] or "")
            progress.last_event_id = event_id or progress.last_event_id
            yield chunk
    raise _LostError


def _make_headers(progress: Progress) -> dict[str, str]:
    made = {"x-request-id": progress.request_id, "x-sluice-resumable": "true"}
    if progress.capability:
        made["x-sluice-resume"] = progress.capability
    if progress.last_event_id:
        made["Last-Event-ID"] = progress.last_event_id
    return made


async def _read_pause_s(response: httpx.Response, *, is_resumed: bool) -> float:
    """Returns how long to wait before the next try; raises where another one is of no use."""
    await response.aread()
    if response.status_code in RETRY_STATUSES or (is_resumed and response.status_code == 429):
        return min(float(response.headers.get("Retry-After", RETRY_S)), MAX_PAUSE_S)
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise StreamError(f"status {response.status_code}: {response.text[:200]}") from None
    raise StreamError(error["message"], error["code"] or "")


async def _read_events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Reads server-sent events: id and data of each; an event without its last line never came."""
    event_id, data = "", ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(":")
        if not line:
            if data:
                yield event_id, data
            event_id, data = "", ""
        elif name == "id":
            event_id = value.removeprefix(" ")
        elif name == "data":
            data += value.removeprefix(" ")
