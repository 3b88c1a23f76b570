"""A Hugging Face Hub with one model, as far as `hf download` asks: pods fetch from it as from a mirror."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "5" * 40


@contextmanager
def run_stand_in_hub(address: str, name: str, folder: Path) -> Iterator[str]:
    """Serves a model for the length of the block.

    Args:
        address: Of this machine, as pods reach it.
        name: The model's.
        folder: Its files.

    Yields:
        The Hub's address.
    """
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    information = json.dumps({"id": name, "sha": COMMIT}).encode()
    tree = json.dumps([{"type": "file", "path": file, "size": len(files[file]), "oid": "0"} for file in files]).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, file = self.path.partition("?")[0].partition(f"/resolve/{COMMIT}/")
            if path == f"/{name}" and file in files:
                self._answer(files[file], ETag=f'"{hashlib.sha256(files[file]).hexdigest()}"')
            elif path.startswith(f"/api/models/{name}/tree/"):
                self._answer(tree)
            elif path.startswith(f"/api/models/{name}"):
                self._answer(information)
            else:
                self.send_error(404)

        do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

        def _answer(self, body: bytes, **headers: str) -> None:
            self.send_response(200)
            for key, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer((address, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{address}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
