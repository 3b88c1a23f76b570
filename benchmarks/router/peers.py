"""Installs the peers: vllm-router into an environment of its own, nginx as the distribution's package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import c_programs

VLLM_ROUTER_VERSION = "0.1.17"
ENVIRONMENT = c_programs.BUILD / "peers"
INSTALL_TIMEOUT_S = 600
NGINX_PLACES = ("/usr/sbin/nginx", "/usr/local/sbin/nginx")


class PeerMissingError(RuntimeError):
    """A peer is not installed and cannot be."""


def install_vllm_router() -> Path:
    """Installs vllm-router, unless the right version is installed.

    Returns:
        The program.

    Raises:
        PeerMissingError: The installation failed; the message has the end of its output.
    """
    program, stamp = ENVIRONMENT / "bin" / "vllm-router", ENVIRONMENT / "vllm-router.version"
    if program.is_file() and stamp.is_file() and stamp.read_text() == VLLM_ROUTER_VERSION:
        return program
    print(f"installing vllm-router {VLLM_ROUTER_VERSION} into {ENVIRONMENT}", flush=True)
    _install([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)])
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _install([*pip, f"vllm-router=={VLLM_ROUTER_VERSION}"])
    stamp.write_text(VLLM_ROUTER_VERSION)
    return program


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
