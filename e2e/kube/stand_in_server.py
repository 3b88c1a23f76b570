"""An HTTP server in a thread of its own, for programs that stand in for others on the network."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator


class QuietHandler(BaseHTTPRequestHandler):
    """Answers over connections that stay open, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def answer(self, body: bytes, **headers: str) -> None:
        """Answers with 200; a HEAD without the body."""
        self.send_response(200)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def serve(address: str, handler: type[QuietHandler], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serves for the length of the block, with TLS if there is a context; yields the port."""
    server = ThreadingHTTPServer((address, 0), handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
