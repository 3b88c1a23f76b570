"""promtool, Prometheus' checker of rules and queries: the one on PATH, or that of Debian's package ``prometheus``.

The package is fetched and unpacked, not installed, because an installed one starts a Prometheus. The program is kept in
``~/.cache/sluice/promtool``. Building it from its Go module would take minutes, since it includes the clients of three
clouds.
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
    """Finds the program, and fetches it if need be.

    Raises:
        MissingError: This machine has neither promtool nor apt.
        TestbedError: The package cannot be fetched.
    """
    found = shutil.which("promtool")
    if found:
        return Path(found)
    cached = find_cache("promtool") / "promtool"
    if not cached.is_file():
        if shutil.which("apt-get") is None:
            raise MissingError("neither promtool nor apt-get is on PATH; install Prometheus' promtool")
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            _unpack(Path(folder)).rename(cached)
    return cached


def run_promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs promtool; returns its exit status and its output.

    Raises:
        MissingError: This machine has neither promtool nor apt.
        TestbedError: The package cannot be fetched.
    """
    return subprocess.run([find_promtool(), *arguments], capture_output=True, text=True, check=False)


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
    return folder / "tree" / "usr" / "bin" / "promtool"


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(command)} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
