"""Ports for local processes, claimed so that several clusters run on one machine."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sluice_cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterable

# The kernel takes ports of outgoing connections from 32768 on: one above could be taken between its choice and its use.
DEFAULT_RANGE = range(20000, 32768)


class PortError(CommandError):
    """A port cannot be used; the message says which, why, and what to do."""


class PortAllocator:
    """The ports that this launcher has claimed.

    Args:
        ports: Ports to choose from.
        host: Address they will be used on.
        directory: Where claims are kept; the same for all launchers of the user.
        rng: Chooses where the search starts.
    """

    def __init__(
        self,
        ports: range = DEFAULT_RANGE,
        *,
        host: str = "127.0.0.1",
        directory: Path | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._ports = ports
        self._host = host
        self._directory = directory or Path(tempfile.gettempdir()) / f"sluice-ports-{os.getuid()}"
        self._rng = rng or random.Random()  # noqa: S311 - spreads launchers over the range; no secret
        self._claims: dict[int, int] = {}

    def choose(self, preferred: Iterable[int] = ()) -> int:
        """Claims a free port.

        Args:
            preferred: Ports to try first.

        Raises:
            PortError: None is free.
        """
        start: int = self._rng.randrange(len(self._ports))
        candidates: list[int] = [*preferred, *self._ports[start:], *self._ports[:start]]
        for port in candidates:
            if self._claim(port):
                return port
        raise PortError(f"no port from {self._ports[0]} to {self._ports[-1]} is free on {self._host}")

    def take(self, port: int, purpose: str, remedy: str) -> int:
        """Claims this very port.

        Args:
            port: The port.
            purpose: Where it was asked for, for the message.
            remedy: What to do when it is taken, for the message.

        Raises:
            PortError: It is in use.
        """
        if not self._claim(port):
            raise PortError(f"port {port} ({purpose}) is in use on {self._host}{_name_owner(port)}; {remedy}")
        return port

    def release(self, port: int) -> None:
        """Gives a claimed port back."""
        descriptor = self._claims.pop(port, None)
        if descriptor is not None:
            os.close(descriptor)

    def _claim(self, port: int) -> bool:
        if port in self._claims:
            return False
        # A claim is a locked file, so that two launchers never choose the same port. The kernel drops the lock when the
        # launcher ends, however it ends.
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._directory / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        if not _is_free(self._host, port):
            os.close(descriptor)
            return False
        self._claims[port] = descriptor
        return True


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _name_owner(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid and port in connection.laddr:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return ""
    return ""
