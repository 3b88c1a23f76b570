"""Installs the peers: vllm-router and SGLang's into environments of their own, nginx as the distribution's package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import c_programs

# Both are programs in Rust that PyPI distributes; SGLang's, the model gateway, is the older.
VERSIONS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2"}
INSTALL_TIMEOUT_S = 600
NGINX_PLACES = ("/usr/sbin/nginx", "/usr/local/sbin/nginx")


class PeerMissingError(RuntimeError):
    """A peer is not installed and cannot be."""


def install(name: str, program: str) -> Path:
    """Installs a peer from PyPI, unless the right version is installed.

    Args:
        name: Its distribution.
        program: Its program.

    Returns:
        The program's path.

    Raises:
        PeerMissingError: The installation failed; the message has the end of its output.
    """
    environment = c_programs.BUILD / "peers" / name
    path, stamp = environment / "bin" / program, environment / "version"
    if path.is_file() and stamp.is_file() and stamp.read_text() == VERSIONS[name]:
        return path
    print(f"installing {name} {VERSIONS[name]} into {environment}", flush=True)
    _install([sys.executable, "-m", "venv", "--clear", str(environment)])
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _install([*pip, f"{name}=={VERSIONS[name]}"])
    stamp.write_text(VERSIONS[name])
    return path


def install_nginx() -> Path:
    """Finds nginx; installs Debian's package if possible.

    Returns:
        The program.

    Raises:
        PeerMissingError: nginx is missing, and the user is not root or the installation failed.
    """
    program = _find_nginx()
    if program is not None:
        return program
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PeerMissingError("nginx is not installed (apt-get install nginx-light)")
    print("installing nginx-light", flush=True)
    _install(["apt-get", "install", "--yes", "--no-install-recommends", "nginx-light"])
    program = _find_nginx()
    if program is None:
        raise PeerMissingError("nginx-light is installed but has no nginx")
    return program


def read_nginx_version(program: Path) -> str:
    """Reads nginx's version."""
    answer = subprocess.run([program, "-v"], check=True, capture_output=True, text=True, timeout=10)
    return answer.stderr.strip().rpartition("/")[2]


def _find_nginx() -> Path | None:
    found = shutil.which("nginx")
    places = (*([found] if found else []), *NGINX_PLACES)
    return next((Path(place) for place in places if Path(place).is_file()), None)


def _install(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, FileNotFoundError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise PeerMissingError(f"{' '.join(command[:6])} failed: {str(said)[-500:]}") from error
