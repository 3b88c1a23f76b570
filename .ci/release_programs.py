"""Go programs that lint workflows and publish releases, at pinned versions, built once for all checkouts.

    .venv/bin/python .ci/release_programs.py cosign     # prints where it is

`go install` checks each module, and all that it requires at the versions of its own go.mod, by Go's checksum database.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = {
    "actionlint": "github.com/rhysd/actionlint/cmd/actionlint@v1.7.12",  # lints workflows: syntax, contexts, types
    "buildx": "github.com/docker/buildx/cmd/buildx@v0.38.2",  # one name for two architectures
    "cosign": "github.com/sigstore/cosign/v3/cmd/cosign@v3.1.3",  # signs images, chart and files
    "crane": "github.com/google/go-containerregistry/cmd/crane@v0.22.1",  # the registry of a rehearsal
}
CACHE = Path.home() / ".cache" / "sluice" / "release"
# Where Go's own packages for Linux lie, beside PATH.
GO_FOLDERS = "/usr/local/go/bin:/usr/lib/go/bin"


class MissingGoError(Exception):
    """There is no Go to build a program with."""


def build_program(name: str) -> Path:
    """Builds a program unless it was built before.

    Args:
        name: One of ``PROGRAMS``.

    Returns:
        The program.

    Raises:
        MissingGoError: There is no ``go`` command.
        subprocess.CalledProcessError: The build failed.
    """
    package = PROGRAMS[name]
    program = CACHE / package.rpartition("@")[2] / name
    if program.exists():
        return program
    go = shutil.which("go") or shutil.which("go", path=GO_FOLDERS)
    if go is None:
        raise MissingGoError(f"{name} is built with Go; install Go 1.26 or newer, and put it on PATH")
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="building-") as folder:
        # Flags of the user's own would make another program; without C it runs on any Linux.
        environment = {**os.environ, "GOBIN": folder, "GOFLAGS": "", "GOWORK": "off", "CGO_ENABLED": "0"}
        print(f"building {name}: minutes once", file=sys.stderr, flush=True)
        subprocess.run(["nice", "-n", "10", go, "install", package], env=environment, cwd="/", check=True)
        (Path(folder) / name).replace(program)  # whole or not at all
    return program


if __name__ == "__main__":
    print(build_program(sys.argv[1]))
