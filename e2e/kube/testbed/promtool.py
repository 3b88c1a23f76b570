"""Prometheus' own checker of rules and queries: the one on PATH, or that of Debian's package ``prometheus``.

The package is fetched and unpacked, not installed: it would start a Prometheus. What is used of it is kept in
``~/.cache/sluice/promtool``. (Built from its Go module, promtool takes two cores minutes: it compiles the clients of three
clouds.)
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from testbed.errors import MissingError, TestbedError
from testbed.settings import find_cache

PACKAGE = "prometheus"


def find_promtool() -> Path:
    """The program, fetched if need be.

    Raises:
        MissingError: There is none, and no apt to fetch it with.
        TestbedError: It cannot be fetched.
    """
    found = shutil.which("promtool")
    if found:
        return Path(found)
    cached = find_cache("promtool") / "promtool"
    if not cached.is_file():
        if shutil.which("apt-get") is None:
            raise MissingError("there is no promtool and no apt-get; put promtool of Prometheus on PATH")
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            _unpack(Path(folder)).rename(cached)
    return cached


def run_promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs promtool; returns how it ended and what it said.

    Raises:
        MissingError: There is none, and no apt to fetch it with.
        TestbedError: It cannot be fetched.
    """
    return subprocess.run([find_promtool(), *arguments], capture_output=True, text=True, check=False)


def _unpack(folder: Path) -> Path:
    # apt's user for downloads may not write to a folder of ours.
    download = ("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", PACKAGE)
    try:
        _run(folder, *download)
    except TestbedError:
        # A machine that has just been made knows of no packages.
        _run(folder, "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "update")
        _run(folder, *download)
    (package,) = folder.glob(f"{PACKAGE}_*.deb")
    _run(folder, "dpkg-deb", "--extract", package.name, "tree")
    return folder / "tree" / "usr" / "bin" / "promtool"


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(command)} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
