"""Fetches a model from S3 or Google Cloud Storage, in init containers of engines and routers.

    python -m sluice_operator.resources.pods.object_storage_fetch resolve s3://bucket/model /dev/termination-log
    python -m sluice_operator.resources.pods.object_storage_fetch fetch s3://bucket/model REVISION /model [PATTERN...]

vLLM's streamer moves the files, with the credentials that it finds: those of the environment, or of the pod's service
account. Object storage has no commits, so the revision is a digest of what it lists: names, sizes and versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

REVISION_VARIABLE = "SLUICE_MODEL_REVISION"
# As long as a commit of the Hub's.
REVISION_CHARACTERS = 40
# This file says which patterns were fetched, or all: a pod that shares the volume fetches nothing.
FETCHED = ".sluice-fetched"


class FetchError(Exception):
    """The model cannot be fetched."""


def list_objects(uri: str) -> list[tuple[str, int, str]]:
    """Lists the objects of a model.

    Returns:
        Name, size in bytes and version of each, in order.

    Raises:
        FetchError: There are none.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, folder = rest.partition("/")
    prefix = f"{folder.rstrip('/')}/" if folder.strip("/") else ""
    found = sorted(_list_s3(bucket, prefix) if scheme == "s3" else _list_gcs(bucket, prefix))
    if not found:
        raise FetchError(f"there are no files at {uri}")
    return found


def _list_s3(bucket: str, prefix: str) -> Iterator[tuple[str, int, str]]:
    pages = import_module("boto3").client("s3").get_paginator("list_objects_v2")
    for page in pages.paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            yield item["Key"], item["Size"], item["ETag"]


def _list_gcs(bucket: str, prefix: str) -> Iterator[tuple[str, int, str]]:
    credentials = import_module("runai_model_streamer_gcs.credentials.credentials").get_credentials()
    client = import_module("google.cloud.storage").Client(credentials=credentials.gcp_credentials())
    for blob in client.list_blobs(bucket, prefix=prefix):
        yield blob.name, blob.size, str(blob.generation)


def find_revision(uri: str) -> str:
    """Finds the revision of a model: it differs where a file was added, removed or written anew."""
    return hashlib.sha256(json.dumps(list_objects(uri)).encode()).hexdigest()[:REVISION_CHARACTERS]


def fetch(uri: str, revision: str, model: Path, patterns: list[str]) -> None:
    """Fetches a model, unless the folder has it.

    Args:
        uri: Where its files are.
        revision: The revision that is wanted.
        model: Folder for the files.
        patterns: Patterns of the files; all when empty.

    Raises:
        FetchError: The files are of another revision, or changed meanwhile.
    """
    marker = model / FETCHED
    if marker.exists() and json.loads(marker.read_text()) in ([], patterns):
        return
    _check_revision(uri, revision)
    # A pod that shares the volume may read files of the same names: they are replaced whole.
    partial = model / f".fetching-{socket.gethostname()}"
    shutil.rmtree(partial, ignore_errors=True)
    _find_streamer(uri).pull_files(uri, str(partial), patterns or None)
    _check_revision(uri, revision)
    for file in sorted(path for path in partial.rglob("*") if path.is_file()):
        target = model / file.relative_to(partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
    shutil.rmtree(partial, ignore_errors=True)
    marker.write_text(json.dumps(patterns))


def _find_streamer(uri: str) -> Any:
    """The part of vLLM's streamer for a kind of storage. Its front imports torch, which routers have not."""
    return import_module(f"runai_model_streamer_{'s3' if uri.startswith('s3:') else 'gcs'}.files.files")


def _check_revision(uri: str, revision: str) -> None:
    found = find_revision(uri)
    if found != revision:
        raise FetchError(
            f"the files at {uri} are of revision {found}, and {revision} is wanted: they changed since;"
            " put them back, or name another model.revision or address"
        )


def main() -> None:
    """Runs the command line."""
    command, uri, *rest = sys.argv[1:]
    try:
        if command == "resolve":
            (answer,) = rest
            # What is stored already is said again: a pod that starts later asks nobody.
            Path(answer).write_text(os.environ.get(REVISION_VARIABLE) or find_revision(uri))
        else:
            revision, model, *patterns = rest
            fetch(uri, revision, Path(model), patterns)
    except FetchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
