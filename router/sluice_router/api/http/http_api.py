"""The OpenAI-compatible HTTP API.

A handler reads, checks and prepares a request. Once it is admitted, tokens reach the transport without the handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from sluice.certificates import load_chain, make_server_context
from sluice_core.records import RequestId
from sluice_router.api.choices import PreparedRequest
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.http.held_comments import COMMENT_INTERVAL_S
from sluice_router.api.http.http_body import BODY_TIMEOUT_S, MAX_BODY_BYTES, read_body
from sluice_router.api.http.http_connection import (
    HEADER_TIMEOUT_S,
    IDLE_TIMEOUT_S,
    MAX_HEADER_BYTES,
    WRITE_BUFFER_BYTES,
    ConnectionSettings,
    EdgeServer,
    EdgeSite,
    check_header_size,
    connection_of,
)
from sluice_router.api.http.http_errors import REASON_HEADER, REQUEST_ID_HEADER, refuse
from sluice_router.api.http.http_generation import HttpGeneration
from sluice_router.api.http.http_resumption import ResumableAnswers, asks_for_resumable
from sluice_router.api.http.http_stream import SERVER
from sluice_router.api.http.info_endpoints import METRICS_PATH, InfoEndpoints
from sluice_router.api.http.response_streams import STREAM_INTERVAL_TOKENS
from sluice_router.api.length_limits import DEFAULT_COMPLETION_TOKENS
from sluice_router.api.objectives import CAPABILITY_HEADER, read_objectives
from sluice_router.api.openai_requests import ChatBody, CompletionBody, FieldError, parse_chat, parse_completion
from sluice_router.api.request_building import Caller
from sluice_router.api.request_ids import check_request_id, choose_shown_id
from sluice_router.api.request_preparation import RequestPreparer, to_router_error
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.errors import InvalidRequestError, RouterError, UnsupportedEndpointError
from sluice_router.observability.request_traces import read_trace_headers
from sluice_router.scheduling.requests import DataPlane
from sluice_router.security.access_control import OPEN_ACCESS, PROBE_PATHS, ClientAccess
from sluice_router.security.cors import CorsPolicy
from sluice_router.text.tokenizer import ModelText

Handler = Callable[[web.BaseRequest, float], Awaitable[web.StreamResponse]]

MAX_IGNORED_CHARACTERS = 1024  # of the header that names ignored fields
# Where a request keeps whose key it came with.
OWNER = web.RequestKey("owner", str)
# Where a request keeps the router's id of it, once it has one.
REQUEST_ID = web.RequestKey("request_id", str)
SWEEP_INTERVAL_S = 0.5
ACCEPT_BACKLOG = 4096
# uvloop accepts one connection per listener and loop iteration, which takes milliseconds under load: with one listener
# a thousand new clients would wait for seconds.
NUM_ACCEPTORS = 16
# How long handlers have to notice that they are cut.
CUT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Limits of the API. Their numbers stand in the modules with the rules; tests set others."""

    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S
    max_header_bytes: int = MAX_HEADER_BYTES
    header_timeout_s: float = HEADER_TIMEOUT_S
    idle_timeout_s: float = IDLE_TIMEOUT_S
    stream_interval_tokens: int = STREAM_INTERVAL_TOKENS
    comment_interval_s: float = COMMENT_INTERVAL_S
    write_buffer_bytes: int = WRITE_BUFFER_BYTES
    slow_readers: SlowReaderLimits = field(default_factory=SlowReaderLimits)


class HttpApi:
    """The HTTP server.

    Args:
        plane: The data plane.
        text: The model's text side.
        settings: Limits.
        access: What guards it.
    """

    def __init__(
        self,
        plane: DataPlane,
        text: ModelText,
        settings: HttpSettings | None = None,
        *,
        access: ClientAccess = OPEN_ACCESS,
    ) -> None:
        self._plane = plane
        self._text = text
        self._settings = settings or HttpSettings()
        self._access = access
        self._cors = CorsPolicy(access.origins)
        self._tls: ssl.SSLContext | None = None
        self._server: EdgeServer | None = None
        self._runner: web.ServerRunner | None = None
        self._sites: list[EdgeSite] = []
        self._shares_port = False
        self._num_active = 0
        self._is_idle = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None
        self.slow_readers = SlowReaders(self._settings.slow_readers)
        self.metrics = EdgeMetrics(self.slow_readers)
        plane.registry.register(self.metrics)
        self._preparer = RequestPreparer(plane, text, self.metrics)
        self._answers = HttpGeneration(
            plane, text, self.slow_readers, self._settings.stream_interval_tokens, self._settings.comment_interval_s
        )
        self._resumable = ResumableAnswers(
            plane, text, self._answers, self.slow_readers, self._settings.stream_interval_tokens
        )
        # With keys, what is counted of one owner is not another's to read: a scraper has a port of its own.
        self._info_endpoints = InfoEndpoints(
            plane, text, hidden=frozenset({METRICS_PATH}) if access.keys is not None else frozenset()
        )
        self._handlers: dict[str, Handler] = {
            "/v1/completions": self._complete,
            "/v1/chat/completions": self._chat,
        }

    async def start(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Listens.

        Args:
            host: Address to listen on.
            port: Port; 0 for any.
            shares_port: Whether other processes listen on it too; the kernel gives each connection to one of them.

        Returns:
            The port.
        """
        self._shares_port = shares_port
        loop = asyncio.get_running_loop()
        settings = self._settings
        connection = ConnectionSettings(
            header_timeout_s=settings.header_timeout_s,
            write_buffer_bytes=settings.write_buffer_bytes,
            max_paused_s=settings.slow_readers.max_paused_s,
            clock=self._plane.now,
            mark=self._mark,
        )
        server = EdgeServer(
            self._handle,
            connection,
            loop,
            keepalive_timeout=settings.idle_timeout_s,
            access_log=None,
            lingering_time=2.0,
        )
        self._server = server
        self._runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=CUT_S)
        await self._runner.setup()
        if self._access.certificates is not None:
            self._tls = make_server_context(self._access.certificates.current)
            self._tls.set_alpn_protocols(["http/1.1"])
        with _listen(host, port, shares_port=shares_port) as listener:
            self._sites = [
                EdgeSite(
                    self._runner,
                    listener.dup(),
                    backlog=ACCEPT_BACKLOG,
                    ssl_context=self._tls,
                    handshake_timeout_s=settings.header_timeout_s,
                )
                for _ in range(NUM_ACCEPTORS)
            ]
        for site in self._sites:
            await site.start()
        self._sweeper = loop.create_task(self._sweep(), name="sweep slow readers")
        return int(self._runner.addresses[0][1])

    def renew_certificate(self) -> None:
        """Shows the newest certificate to new connections; those that exist go on with theirs."""
        if self._tls is not None and self._access.certificates is not None:
            load_chain(self._tls, self._access.certificates.current)

    async def announce_close(self) -> None:
        """Says in every answer that the connection closes behind it, so that clients go elsewhere; still serves.

        New connections get a refusal, too; where other processes listen on the port, those get the connections instead.
        """
        self._answers.is_closing = self._info_endpoints.is_closing = True
        if self._shares_port:
            await self._stop_listening()

    async def close(self, grace_s: float) -> None:
        """Accepts no more, closes idle connections, lets answers under way end, then cuts the rest.

        Args:
            grace_s: How long answers under way may go on.
        """
        await self.announce_close()
        server, runner = self._server, self._runner
        self._server = self._runner = None
        if server is None or runner is None:
            return
        await self._stop_listening()
        server.close_idle()
        if self._num_active:
            self._is_idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._is_idle.wait()
        await runner.cleanup()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _stop_listening(self) -> None:
        sites, self._sites = self._sites, []
        for site in sites:
            await site.stop()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = self._plane.now()
            self.slow_readers.sweep(now)
            if self._server is not None:
                self._server.sweep(now)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = connection_of(request)
        arrival_s = connection.begin_request()
        self._num_active += 1
        try:
            response = await self._answer_or_refuse(request, arrival_s)
            self.metrics.count_answer("http", str(response.status), response.headers.get(REASON_HEADER, ""))
        except (asyncio.CancelledError, ConnectionError):
            self.metrics.count_answer("http", "499", "client_gone")
            raise
        else:
            return response
        finally:
            connection.end_request()
            self._num_active -= 1
            if not self._num_active:
                self._is_idle.set()

    async def _answer_or_refuse(self, request: web.BaseRequest, arrival_s: float) -> web.StreamResponse:
        try:
            response = await self._route(request, arrival_s)
        except RouterError as error:
            response = refuse(error)
        except FieldError as error:
            response = refuse(to_router_error(error))
        return self._finish_headers(request, response)

    async def _route(self, request: web.BaseRequest, arrival_s: float) -> web.StreamResponse:
        self._check_headers(request)
        preflight = self._cors.answer_preflight(request.method, request.headers)
        if preflight is not None:
            return preflight
        if self._access.keys is not None and request.path not in PROBE_PATHS:
            request[OWNER] = self._access.keys.find_owner(request.headers.get("Authorization"))
        handler = self._handlers.get(request.path)
        info = None if handler is not None else self._info_endpoints.find(request.path)
        if handler is None and info is None:
            raise UnsupportedEndpointError(f"{request.method} {request.path[:200]} is not served by this router")
        allowed = ("GET", "HEAD") if handler is None else ("POST",)
        if request.method not in allowed:
            return _refuse_method(request.method, ", ".join(allowed))
        if handler is not None:
            return await handler(request, arrival_s)
        assert info is not None, "one of the two was found"
        return info()

    def _check_headers(self, request: web.BaseRequest) -> None:
        check_header_size(request, self._settings.max_header_bytes)
        check_request_id(REQUEST_ID_HEADER, request.headers.get(REQUEST_ID_HEADER, ""))

    def _finish_headers(self, request: web.BaseRequest, response: web.StreamResponse) -> web.StreamResponse:
        if not response.prepared:
            response.headers["Server"] = SERVER
            response.headers.update(self._cors.find_headers(request.headers.get("Origin")))
            if self._answers.is_closing or not request.content.is_eof():
                response.force_close()
            if REQUEST_ID_HEADER in request.headers or REQUEST_ID in request or response.status >= 400:
                response.headers[REQUEST_ID_HEADER] = self._shown_id_of(request)
        return response

    def _request_id_of(self, request: web.BaseRequest) -> RequestId:
        """Returns the router's id of a request; most that ask no engine need none."""
        if REQUEST_ID not in request:
            request[REQUEST_ID] = self._plane.make_request_id()
        return RequestId(request[REQUEST_ID])

    def _shown_id_of(self, request: web.BaseRequest) -> str:
        return choose_shown_id(request.headers.get(REQUEST_ID_HEADER, ""), self._request_id_of(request))

    # Inference

    async def _complete(self, request: web.BaseRequest, arrival_s: float) -> web.StreamResponse:
        if CAPABILITY_HEADER in request.headers:
            return await self._resume(request, is_chat=False)
        body, ignored = parse_completion(await self._read_body(request), self._preparer.check_size)
        prepared = await self._preparer.prepare_completion(body, self._describe_caller(request, body, arrival_s))
        return await self._answer(request, body, prepared, ignored)

    async def _chat(self, request: web.BaseRequest, arrival_s: float) -> web.StreamResponse:
        if CAPABILITY_HEADER in request.headers:
            return await self._resume(request, is_chat=True)
        body, ignored = parse_chat(await self._read_body(request), self._preparer.check_size)
        prepared = await self._preparer.prepare_chat(body, self._describe_caller(request, body, arrival_s))
        return await self._answer(request, body, prepared, ignored)

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        return await read_body(request, limit=self._settings.max_body_bytes, timeout_s=self._settings.body_timeout_s)

    async def _answer(
        self,
        request: web.BaseRequest,
        body: CompletionBody | ChatBody,
        prepared: list[PreparedRequest],
        ignored: list[str],
    ) -> web.StreamResponse:
        headers = {**format_ignored(ignored), **self._mark(request)}
        if asks_for_resumable(request.headers):
            return await self._resumable.begin(request, body, prepared, headers, self._shown_id_of(request))
        return await self._answers.answer(request, body, prepared, headers)

    async def _resume(self, request: web.BaseRequest, *, is_chat: bool) -> web.StreamResponse:
        """Goes on with a stream; the body, if there is one, is the first request's once more."""
        await self._read_body(request)
        return await self._resumable.resume(
            request,
            is_chat=is_chat,
            owner=request.get(OWNER, ""),
            headers=self._mark(request),
            shown_id=self._shown_id_of(request),
        )

    def _mark(self, request: web.BaseRequest) -> dict[str, str]:
        cors = self._cors.find_headers(request.headers.get("Origin"))
        return {**cors, REQUEST_ID_HEADER: self._shown_id_of(request)}

    def _describe_caller(self, request: web.BaseRequest, body: CompletionBody | ChatBody, arrival_s: float) -> Caller:
        return Caller(
            arrival_s=arrival_s,
            objectives=read_objectives(request.headers, body.sluice),
            request_id=self._request_id_of(request),
            client_request_id=request.headers.get(REQUEST_ID_HEADER, ""),
            default_output_tokens=None if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS,
            owner=request.get(OWNER, ""),
            trace_headers=read_trace_headers(request.headers),
        )


def _listen(host: str, port: int, *, shares_port: bool) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address[:2], family=family, backlog=ACCEPT_BACKLOG, reuse_port=shares_port)
    # Several handles see one new client, and all but one of them find nothing to accept.
    listener.settimeout(0)
    return listener


def _refuse_method(method: str, allowed: str) -> web.Response:
    error = InvalidRequestError(f"{method} is not allowed here; allowed is {allowed}", code="method_not_allowed")
    return refuse(error, status=405, headers={"Allow": allowed})


def format_ignored(names: list[str]) -> dict[str, str]:
    """Formats the header that names ignored fields; what does not belong into a header is shown as ``?``."""
    if not names:
        return {}
    shown = ("".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in name) for name in names)
    return {"x-sluice-ignored": ", ".join(shown)[:MAX_IGNORED_CHARACTERS]}
