"""The fault proxy injects the faults that tests rely on; checked against a small server, without a cluster."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from aiohttp import web
from fault_proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


HEADERS = {"Authorization": "Bearer t", "Content-Type": "text/x"}


class Server:
    """A stand-in for the API server: it answers with the request that it got, and its watches send words on demand."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.url = ""
        self._context = context
        self._watches: list[asyncio.Queue[str]] = []
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._started.wait()

    def say(self, word: str) -> None:
        for words in self._watches:
            self._loop.call_soon_threadsafe(words.put_nowait, word)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runner = web.ServerRunner(web.Server(self._answer), handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._context).start()
        self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()
        await asyncio.sleep(0.1)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if "watch" not in request.query:
            said = {"who": request.headers.get("Authorization"), "body": await request.text(), "path": request.path_qs}
            said["type"] = request.headers.get("Content-Type")
            return web.json_response(said, status=201)
        words: asyncio.Queue[str] = asyncio.Queue()
        self._watches.append(words)
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(json.dumps({"word": await words.get()}).encode() + b"\n")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    made = Server(context)
    yield made
    made.stop()


@pytest.fixture
def proxy(server: Server, tmp_path: Path) -> Iterator[FaultProxy]:
    settings: Any = SimpleNamespace(api_url=server.url, pki=tmp_path)
    with FaultProxy(settings).run() as running:
        yield running


def ask(proxy: FaultProxy) -> tuple[int, Any]:
    request = urllib.request.Request(f"{proxy.url}/x?a=b%2Cc", b"hello", HEADERS, method="PATCH")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status, json.loads(answer.read())


def test_a_request_arrives_as_it_was_sent(proxy: FaultProxy) -> None:
    sent = {"who": "Bearer t", "body": "hello", "path": "/x?a=b%2Cc", "type": "text/x"}
    assert ask(proxy) == (201, sent)
    assert proxy.requests == [("PATCH", "/x")]
    assert not proxy.faults
    with urllib.request.urlopen(f"{proxy.url}/y", timeout=10) as answer:
        assert json.loads(answer.read()) == {"who": None, "body": "", "path": "/y", "type": None}


def test_faults_have_the_configured_share(proxy: FaultProxy) -> None:
    proxy.fail_share = 1.0
    seen = set()
    for _ in range(12):
        try:
            seen.add(str(ask(proxy)[0]))
        except urllib.error.HTTPError as error:
            seen.add(str(error.code))
            error.close()
        except OSError:
            seen.add("cut")
    assert sum(proxy.faults.values()) == 12
    assert seen == {"429", "500", "503", "cut", "201"}
    # The server carried out the lost and the slow requests, and no other failed one.
    assert len(proxy.requests) == proxy.faults["lost"] + proxy.faults["slow"]


def test_a_dead_server_answers_nobody(proxy: FaultProxy) -> None:
    proxy.is_dead = True
    with pytest.raises((ConnectionError, urllib.error.URLError)):
        ask(proxy)
    proxy.is_dead = False
    assert ask(proxy)[0] == 201


@pytest.mark.parametrize("strike", ["end_watches", "expire_watches"])
def test_watches_end(proxy: FaultProxy, server: Server, strike: str) -> None:
    with urllib.request.urlopen(f"{proxy.url}/x?watch=true", timeout=10) as answer:
        server.say("one")
        assert json.loads(answer.readline()) == {"word": "one"}
        assert getattr(proxy, strike)() == 1
        rest = answer.read()
    assert (b'"code": 410' in rest) == (strike == "expire_watches")
    assert getattr(proxy, strike)() == 0


def test_watches_go_silent_and_new_ones_do_not(proxy: FaultProxy, server: Server) -> None:
    with urllib.request.urlopen(f"{proxy.url}/x?watch=true", timeout=10) as old:
        server.say("one")
        assert json.loads(old.readline()) == {"word": "one"}
        assert proxy.mute_watches() == 1
        with urllib.request.urlopen(f"{proxy.url}/x?watch=true", timeout=10) as new:
            server.say("two")
            assert json.loads(new.readline()) == {"word": "two"}
            proxy.end_watches()
        assert old.read() == b""
