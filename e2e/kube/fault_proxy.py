"""A proxy in front of the API server that injects faults: error statuses, lost or slow answers, broken watches.

It speaks plain HTTP to the operator and TLS to the API server, and passes every header on, so that the user stays the
same. A random share of all requests but watches fails. Watches fail when a test calls for it.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import yaml
from aiohttp import web
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.settings import Settings

# Headers of one connection (RFC 9110, section 7.6.1), and headers that aiohttp writes itself.
HOP_HEADERS = frozenset({"connection", "host", "transfer-encoding", "content-length", "content-encoding"})
# Headers that aiohttp's client adds by default.
AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
SLOW_S = 2.5
CLOSING_S = 0.25
RETRY_AFTER = {"Retry-After": "1"}


@dataclass(frozen=True, eq=False, slots=True)
class Watch:
    """A watch under way: the request, the response to it, and the API server's response that feeds it."""

    request: web.BaseRequest
    response: web.StreamResponse
    source: aiohttp.ClientResponse

    @property
    def has_gone(self) -> bool:
        """Whether the client has closed the connection."""
        return self.request.transport is None or self.request.transport.is_closing()

    async def end(self, last_words: bytes) -> None:
        """Ends the watch on both sides."""
        with suppress(ConnectionError):
            if last_words:
                await self.response.write(last_words)
            await self.response.write_eof()
        self.source.close()


class FaultProxy:
    """The proxy; its attributes may be set at any time, from any thread.

    Args:
        settings: The cluster.
        seed: Seed of the random faults.

    Attributes:
        url: URL of the proxy.
        fail_share: Share of the requests that fail.
        is_dead: Whether every request is cut off.
        faults: Number of faults by kind.
        requests: Method and path of every request that reached the API server.
        withheld: Number of events that muted watches did not pass on, by path.
    """

    def __init__(self, settings: Settings, seed: int = 1) -> None:
        self.url = ""
        self.fail_share = 0.0
        self.is_dead = False
        self.faults: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []
        self.withheld: Counter[str] = Counter()
        self._target = settings.api_url
        self._tls = ssl.create_default_context(cafile=str(settings.pki / "ca.crt"))
        self._rng = random.Random(seed)
        self._watches: set[Watch] = set()
        self._muted: set[Watch] = set()
        self._loop: asyncio.AbstractEventLoop
        self._session: aiohttp.ClientSession
        self._stop: asyncio.Event
        self._started = threading.Event()

    def write_kubeconfig(self, source: Path, target: Path) -> Path:
        """Writes a client's kubeconfig that goes through this proxy."""
        content = yaml.safe_load(source.read_text())
        for cluster in content["clusters"]:
            cluster["cluster"] = {"server": self.url}
        target.write_text(yaml.safe_dump(content))
        return target

    def end_watches(self) -> int:
        """Ends all watches as a server that restarts does; returns their number."""
        return self._on_loop(self._end_watches(b""))

    def expire_watches(self) -> int:
        """Ends all watches with status 410, as a server does that no longer has their resource version."""
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
        return self._on_loop(self._end_watches(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"))

    def mute_watches(self) -> int:
        """Silences the present watches as a vanished peer does: they stay open without data. New watches work."""
        return self._on_loop(self._mute_watches())

    @contextmanager
    def run(self) -> Iterator[FaultProxy]:
        """Runs the proxy for the length of the block."""
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        thread.start()
        self._started.wait()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        runner = web.ServerRunner(web.Server(self._answer), handle_signals=False, shutdown_timeout=0.1)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._started.set()
            await self._stop.wait()
            await self._end_watches(b"")
            await runner.cleanup()
        # TLS connections end a moment after they are closed, and need the event loop for it.
        await asyncio.sleep(CLOSING_S)

    def _on_loop(self, coroutine: object) -> int:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.is_dead:
            self.faults["dead"] += 1
            return _cut(request)
        if "watch" in request.query:
            return await self._watch(request)
        fault = self._choose()
        if fault:
            self.faults[fault] += 1
        if fault in ("429", "500", "503"):
            message = {"kind": "Status", "apiVersion": "v1", "message": f"a fault: {fault}", "code": int(fault)}
            headers = RETRY_AFTER if fault == "429" else {}
            return web.json_response(message, status=int(fault), headers=headers)
        if fault == "refused":
            return _cut(request)
        answer = await self._pass_on(request)
        if fault == "lost":
            # The server has carried out the request, but the client does not learn of it.
            return _cut(request)
        if fault == "slow":
            await asyncio.sleep(SLOW_S)
        return answer

    def _locate(self, request: web.BaseRequest) -> URL:
        # The path as it was sent: commas in selectors stay quoted.
        return URL(self._target + request.raw_path, encoded=True)

    def _choose(self) -> str:
        if self._rng.random() >= self.fail_share:
            return ""
        return self._rng.choice(("429", "500", "503", "refused", "lost", "slow"))

    async def _pass_on(self, request: web.BaseRequest) -> web.Response:
        self.requests.append((request.method, request.path))
        body = await request.read()
        async with self._session.request(
            request.method,
            self._locate(request),
            # An empty body is sent without a media type: the API server refuses types that it does not know.
            data=body or None,
            headers=_strip(request.headers),
            skip_auto_headers=AUTO_HEADERS,
        ) as answer:
            return web.Response(status=answer.status, headers=_strip(answer.headers, answer), body=await answer.read())

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(self._locate(request), headers=_strip(request.headers), timeout=timeout) as answer:
            response = web.StreamResponse(status=answer.status, headers=_strip(answer.headers, answer))
            await response.prepare(request)
            watch = Watch(request, response, answer)
            self._watches.add(watch)
            try:
                async for line in answer.content:
                    if watch not in self._watches or watch.has_gone:
                        break
                    if watch not in self._muted:
                        await response.write(line)
                    elif b'"BOOKMARK"' not in line:
                        self.withheld[request.path] += 1
            except (ConnectionError, aiohttp.ClientError):
                pass  # the client or the server has closed the connection
            finally:
                self._watches.discard(watch)
                self._muted.discard(watch)
            return response

    async def _mute_watches(self) -> int:
        self._muted |= self._watches
        return len(self._muted)

    async def _end_watches(self, last_words: bytes) -> int:
        watches = list(self._watches)
        self._watches.clear()
        for watch in watches:
            await watch.end(last_words)
        return len(watches)


def _strip(headers: object, answer: aiohttp.ClientResponse | None = None) -> dict[str, str]:
    kept = {name: value for name, value in headers.items() if name.lower() not in HOP_HEADERS}  # type: ignore[attr-defined]
    if answer is not None and "Content-Encoding" in answer.headers:
        kept["Content-Encoding"] = answer.headers["Content-Encoding"]
    return kept


def _cut(request: web.BaseRequest) -> web.Response:
    """Ends the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
