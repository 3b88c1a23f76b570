"""BuildKit, which is what ``docker build`` runs, for the length of a block.

Its daemon and client are built once for all checkouts, from the Go module that ``builder/`` pins. BuildKit runs build
steps with runc, as root, on this machine's network. All its files lie in one folder. All its processes end with the
block.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_cli.processes import die_with_parent
from testbed.errors import NotReachedError, TestbedError
from testbed.kubernetes_build import build_once, compile_program
from testbed.settings import find_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODULE = Path(__file__).parents[1] / "builder"
PROGRAMS = ("buildkitd", "buildctl")
CONFIGURATION = """\
root = "{folder}/state"
[grpc]
  address = ["unix://{socket}"]
[worker.oci]
  snapshotter = "overlayfs"
  networkMode = "host"
  gc = false
[worker.containerd]
  enabled = false
"""
# What Docker only warns of is an error here.
STRICT = "BUILDKIT_DOCKERFILE_CHECK=error=true"
START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What to build.

    Args:
        dockerfile: The file.
        context: Folder that it copies from.
        target: Stage; empty means the last one.
        arguments: Build arguments.
        bases: OCI layouts that replace base images, by the images' names in the file.
    """

    dockerfile: Path
    context: Path
    target: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, Path] = field(default_factory=dict)


class Builder:
    """A running BuildKit.

    Args:
        path: Folder of the programs.
        socket: Where the daemon listens.
    """

    def __init__(self, path: Path, socket: Path) -> None:
        self._client = [str(path / "buildctl"), "--addr", f"unix://{socket}"]

    def build(self, build: Build, *, layout: Path | None = None, archive: Path | None = None, name: str = "") -> str:
        """Builds an image.

        Args:
            build: What to build.
            layout: Folder for an OCI layout.
            archive: File for an OCI archive, which ``ctr images import`` and ``docker load`` read.
            name: Name of the image in the archive.

        Returns:
            BuildKit's output.

        Raises:
            TestbedError: The build failed.
        """
        options = [f"--opt=build-arg:{key}={value}" for key, value in build.arguments.items()]
        options += [f"--opt=target={build.target}"] if build.target else []
        for number, (base, folder) in enumerate(build.bases.items()):
            options.append(f"--oci-layout=base{number}={folder}")
            options.append(f"--opt=context:{base}=oci-layout://base{number}@{read_digest(folder)}")
        if layout is not None:
            options.append(f"--output=type=oci,tar=false,compression=uncompressed,dest={layout}")
        if archive is not None:
            # Some gigabytes: this compression is quick, and leaves a third of the size.
            quick = "compression=zstd,compression-level=1,force-compression=true"
            options.append(f"--output=type=oci,{quick},name={name},dest={archive}")
        return self.run(
            *("build", "--progress=plain", "--frontend=dockerfile.v0", f"--opt=build-arg:{STRICT}"),
            *(f"--local=context={build.context}", f"--local=dockerfile={build.dockerfile.parent}"),
            f"--opt=filename={build.dockerfile.name}",
            *options,
        )

    def run(self, *arguments: str) -> str:
        """Runs the client; returns what it printed."""
        done = subprocess.run(
            [*self._client, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode != 0:
            raise TestbedError(f"buildctl {arguments[0]} failed:\n{done.stdout[-6000:]}")
        return done.stdout


def read_digest(layout: Path) -> str:
    """Reads the digest of the one image of an OCI layout."""
    (manifest,) = json.loads((layout / "index.json").read_text())["manifests"]
    return str(manifest["digest"])


@contextlib.contextmanager
def run_builder(folder: Path) -> Iterator[Builder]:
    """Runs BuildKit.

    Args:
        folder: Folder for its state, its log and its socket.

    Raises:
        MissingError: There is no Go, or it is too old.
        TestbedError: BuildKit cannot be built, or does not start.
    """
    sources = [MODULE / "go.mod", MODULE / "go.sum", Path(__file__)]
    path = build_once("BuildKit", find_cache("builder"), sources, _build_into)
    folder.mkdir(parents=True, exist_ok=True)
    # The path of a socket may have 107 characters; the path of a checkout may be longer.
    socket = Path(f"/run/sluice-builder-{os.getpid()}.sock")
    (folder / "buildkitd.toml").write_text(CONFIGURATION.format(folder=folder, socket=socket))
    with (folder / "buildkitd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                sys.executable,
                die_with_parent.__file__,
                str(os.getpid()),
                path / "buildkitd",
                f"--config={folder}/buildkitd.toml",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the tests only, which then stop the daemon
        )
    try:
        builder = Builder(path, socket)
        _wait(builder, daemon, folder / "buildkitd.log")
        yield builder
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        socket.unlink(missing_ok=True)


def _wait(builder: Builder, daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            builder.run("debug", "workers")
        except TestbedError as error:
            if daemon.poll() is not None or time.monotonic() >= deadline:
                raise NotReachedError(f"buildkitd does not run:\n{log.read_text()[-2000:]}") from error
            time.sleep(0.2)
        else:
            return


def _build_into(folder: Path, go: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as temporary:
        target = Path(temporary) / "bin"
        target.mkdir()
        for name in PROGRAMS:
            compile_program(go, MODULE, f"github.com/moby/buildkit/cmd/{name}", target / name, {})
        target.rename(folder)  # atomic: a build is complete or absent
