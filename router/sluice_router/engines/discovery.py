"""Where the engines are: a file that the launcher writes, or the headless Service's DNS name.

No Kubernetes API: who an engine is, it says itself in the first message of its stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

# Checking a file costs one stat, a name one query.
FILE_INTERVAL_S = 0.2
DNS_INTERVAL_S = 1.0
MIN_PORT, MAX_PORT = 1, 65535


class Discovery(Protocol):
    """Knows addresses of engines."""

    @property
    def interval_s(self) -> float:
        """Pause between two calls of ``find``."""
        ...

    async def find(self) -> frozenset[str] | None:
        """Finds the addresses now.

        Returns:
            Addresses as host:port; None when they cannot be known now, so that the last ones submission.
        """
        ...


class FileDiscovery:
    """A JSON list of "host:port", read again when it changes.

    Args:
        path: The file; it need not exist yet.
    """

    interval_s = FILE_INTERVAL_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._addresses: frozenset[str] | None = None

    async def find(self) -> frozenset[str] | None:
        """See ``Discovery.find``."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                self._addresses = parse_addresses(self._path.read_text(encoding="utf-8"))
                self._stamp = stamp
        except (OSError, ValueError) as error:
            # A writer may be half-way; what was known stays.
            logger.debug("%s: %s", self._path, error)
        return self._addresses


class DnsDiscovery:
    """The addresses behind a name, all with one port.

    Args:
        name: For example that of a headless Service.
        port: Port of every engine.
    """

    interval_s = DNS_INTERVAL_S

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port

    async def find(self) -> frozenset[str] | None:
        """See ``Discovery.find``."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}:
                # A headless Service without ready pods has no addresses.
                return frozenset()
            logger.warning("%s: %s", self._name, error)
            return None
        hosts = {item[4][0] for item in found}
        return frozenset(f"[{host}]:{self._port}" if ":" in str(host) else f"{host}:{self._port}" for host in hosts)


def parse_discovery(text: str) -> Discovery:
    """Reads the setting ``engines``.

    Args:
        text: ``file:PATH`` or ``dns:NAME:PORT``.

    Raises:
        ValueError: Neither.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileDiscovery(Path(rest))
    if kind == "dns":
        name, _, port = rest.rpartition(":")
        if name and port.isdecimal() and MIN_PORT <= int(port) <= MAX_PORT:
            return DnsDiscovery(name, int(port))
    raise ValueError(f"engines is {text!r}, allowed are file:PATH and dns:NAME:PORT")


def parse_addresses(text: str) -> frozenset[str]:
    """Reads a JSON list of "host:port".

    Raises:
        ValueError: Something else.
    """
    addresses = json.loads(text)
    if not isinstance(addresses, list) or not all(isinstance(item, str) and ":" in item for item in addresses):
        raise ValueError(f'engines are {text[:80]!r}, a JSON list of "host:port" is needed')
    return frozenset(addresses)


async def watch(discovery: Discovery, set_addresses: Callable[[frozenset[str]], None]) -> None:
    """Calls ``set_addresses`` with the first addresses and after every change, for ever."""
    known: frozenset[str] | None = None
    while True:
        found = await discovery.find()
        if found is not None and found != known:
            known = found
            set_addresses(found)
        await asyncio.sleep(discovery.interval_s)
