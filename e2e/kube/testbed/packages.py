"""Installs the packages of the operating system that the real node needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.errors import MissingError, TestbedError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Debian's package, and a program or file that shows that it is installed.
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "nftables": "nft",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "iproute2": "ip",
    "procps": "sysctl",
    "mount": "umount",
}


def install_packages(packages: Mapping[str, str] = PACKAGES) -> None:
    """Installs missing packages with apt.

    Args:
        packages: Debian's package, and a program or file that shows that it is installed.

    Raises:
        MissingError: The user is not root, or there is no apt.
        TestbedError: apt failed.
    """
    if os.geteuid() != 0:
        raise MissingError("this needs root: containers, network and mounts; run as root, or without a real node")
    missing = [name for name, proof in packages.items() if not _is_there(proof)]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise MissingError(f"there is no apt-get; install {', '.join(missing)} by other means")
    print(f"installing {', '.join(missing)}", flush=True)
    options = ("-q", "-y", "-o", "DPkg::Lock::Timeout=300")
    for command in (("update",), ("install", "--no-install-recommends", *missing)):
        done = subprocess.run(
            ["apt-get", *options, *command],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise TestbedError(f"apt-get {command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _is_there(proof: str) -> bool:
    return Path(proof).exists() if proof.startswith("/") else shutil.which(proof) is not None
