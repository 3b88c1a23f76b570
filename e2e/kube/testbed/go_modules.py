"""Fetches Go modules whose checksums are pinned."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from testbed.errors import TestbedError


def fetch_module(go: str, module: str, checksum: str, **variables: str) -> Path:
    """Fetches a Go module, unless Go's module cache has it.

    Args:
        go: The ``go`` command.
        module: The module, with its version.
        checksum: Checksum of the module, in the form of go.sum.
        variables: Variables for ``go``.

    Returns:
        Its folder in the module cache.

    Raises:
        TestbedError: It cannot be fetched, or its checksum is another one.
    """
    command = [go, "mod", "download", "-json", module]
    environment = {**os.environ, "GOWORK": "off", "GOFLAGS": "", **variables}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(f"{module} cannot be fetched: {done.stdout}{done.stderr}")
    found = json.loads(done.stdout)
    if found["Sum"] != checksum:
        raise TestbedError(f"{module} has the checksum {found['Sum']}, pinned is {checksum}")
    return Path(found["Dir"])
