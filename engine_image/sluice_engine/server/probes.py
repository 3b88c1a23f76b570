"""Probes and metrics over HTTP, in threads of their own: a probe answers while the event loop is busy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from sluice_engine.server.prometheus_metrics import EngineCollector

if TYPE_CHECKING:
    from sluice_engine.server.engine_server import EngineServer

# Paths that answer with a state.
LIVE_PATH, READY_PATH = "/livez", "/readyz"

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class QuietHandler(WSGIRequestHandler):
    """Logs no line per probe."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name
        """Drops the line."""


def make_app(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> Callable[..., Iterable[bytes]]:
    """Makes the WSGI application.

    Args:
        registry: What /metrics shows.
        is_ready: Whether /readyz answers 200.
    """
    metrics = make_wsgi_app(registry)

    def app(environment: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "")
        if path == "/metrics":
            answer: Iterable[bytes] = metrics(environment, start_response)
            return answer
        status, text = {
            LIVE_PATH: ("200 OK", b"ok\n"),
            READY_PATH: ("200 OK", b"ready\n") if is_ready() else ("503 Service Unavailable", b"not ready\n"),
        }.get(path, ("404 Not Found", b"/metrics, /livez and /readyz are here\n"))
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))])
        return [text]

    return app


def start_http(host: str, port: int, server: EngineServer, is_ready: Callable[[], bool]) -> ThreadingWSGIServer:
    """Serves metrics and probes from a daemon thread.

    Args:
        host: Address to listen on.
        port: Its port.
        server: What is measured.
        is_ready: Whether /readyz answers 200.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(server))
    http = make_server(host, port, make_app(registry, is_ready), ThreadingWSGIServer, handler_class=QuietHandler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, name="metrics", daemon=True).start()
    return http
