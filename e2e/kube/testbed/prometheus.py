"""Prometheus and its checker promtool: those on PATH, or those of Debian's package ``prometheus``.

The package is fetched and unpacked, not installed, because an installed one starts a Prometheus. The programs are kept
in ``~/.cache/sluice/prometheus``. Building them from their Go module would take minutes, since it includes the clients
of three clouds.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from testbed.errors import MissingError, TestbedError
from testbed.settings import find_cache

PACKAGE = "prometheus"


def find_program(name: str) -> Path:
    """Finds ``prometheus`` or ``promtool``, and fetches it if need be.

    Raises:
        MissingError: This machine has neither the program nor apt.
        TestbedError: The package cannot be fetched.
    """
    found = shutil.which(name)
    if found:
        return Path(found)
    cached = find_cache("prometheus") / name
    if not cached.is_file():
        if shutil.which("apt-get") is None:
            raise MissingError(f"neither {name} nor apt-get is on PATH; install Prometheus")
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            (_unpack(Path(folder)) / name).rename(cached)
    return cached


def run_promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs promtool; returns its exit status and its output.

    Raises:
        MissingError: This machine has neither promtool nor apt.
        TestbedError: The package cannot be fetched.
    """
    return subprocess.run([find_program("promtool"), *arguments], capture_output=True, text=True, check=False)


def read_version() -> str:
    """Reads Prometheus' version."""
    done = subprocess.run([find_program("prometheus"), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split()[2]


def _unpack(folder: Path) -> Path:
    # apt downloads as a user of its own, who may not write to this folder.
    download = ("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", PACKAGE)
    try:
        _run(folder, *download)
    except TestbedError:
        # A new machine has no package lists yet.
        _run(folder, "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "update")
        _run(folder, *download)
    (package,) = folder.glob(f"{PACKAGE}_*.deb")
    _run(folder, "dpkg-deb", "--extract", package.name, "tree")
    return folder / "tree" / "usr" / "bin"


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(command)} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
