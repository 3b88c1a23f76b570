"""A Hugging Face Hub with one model, as far as `hf download` asks: pods fetch from it as from a mirror."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stand_in_server import QuietHandler, serve

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

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
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
            self.answer(body, **{"X-Repo-Commit": COMMIT}, **headers)

    with serve(address, Handler) as port:
        yield f"http://{address}:{port}"
