"""The KV transports in use, as UCX writes them to its log: NIXL has no call that names them.

At log level ``info`` UCX writes a line for each kind of connection that it makes::

    ... UCX  INFO    left intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)

KV goes by the lanes ``rma*``. Until an engine has met another, only its connection to itself is there; where that is
TCP, there is nothing better. NIXL's other backend, LIBFABRIC (for EFA), logs no such line: there the devices decide.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import time
from typing import TYPE_CHECKING

from sluice_engine.errors import RdmaError
from sluice_engine.kv_transfer.rdma_preflight import DEVICES, EFA_DRIVER, has_efa

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path

    from sluice_engine.settings import EngineSettings

logger = logging.getLogger(__name__)

CONNECTION = re.compile(r"UCX\s+INFO\s.*?(self|intra-node|inter-node) cfg#\d+ (.*)$")
LANES = re.compile(r"(\w+?)(?:#\d+)?\(([^)]*)\)")
PROBLEM = re.compile(r"UCX\s+(?:FATAL|ERROR|WARN)\s")
# They bring data to a device or nowhere, and not to another engine.
LOCAL = frozenset({"self", "cuda_copy", "gdr_copy", "rocm_copy", "ze_copy"})
TCP = "tcp"
FLUSH_S = 1.0


def keep_flushed() -> None:
    """Has this process's C library write out its buffers, now and every second: UCX writes by the kilobyte."""
    library = ctypes.CDLL(None)

    def keep() -> None:
        while True:
            time.sleep(FLUSH_S)
            library.fflush(None)

    library.fflush(None)
    threading.Thread(target=keep, name="ucx log", daemon=True).start()


class TransportLog:
    """UCX's log so far.

    Args:
        folder: Folder of the log files, one per process that loads UCX.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._to_itself: set[str] = set()
        self._to_peers: set[str] = set()

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Has UCX write its log here, unless the user has it elsewhere."""
        if not {"UCX_LOG_LEVEL", "UCX_LOG_FILE"} & environment.keys():
            environment["UCX_LOG_LEVEL"] = "info"
            environment["UCX_LOG_FILE"] = str(self._folder / "ucx-%p.log")

    def read(self) -> str:
        """Reads on; passes warnings on to this process's log.

        Returns:
            Transports to other engines, with commas; before there are any, what would be used; empty: not known.
        """
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._take(line)
        return ",".join(sorted(self._to_peers or self._to_itself))

    def _take(self, line: str) -> None:
        connection = CONNECTION.search(line)
        if connection:
            kind, lanes = connection.groups()
            (self._to_itself if kind == "self" else self._to_peers).update(find_data_transports(lanes))
        elif PROBLEM.search(line):
            logger.warning("%s", line)


def find_data_transports(lanes: str) -> set[str]:
    """Transports that carry KV, of UCX's list of lanes by purpose: ``rma(rc_mlx5/mlx5_0:1)  am(...)``."""
    by_purpose = {purpose: resources.split() for purpose, resources in LANES.findall(lanes)}
    data = [name for purpose, names in by_purpose.items() if purpose.startswith("rma") for name in names]
    return {name.partition("/")[0] for name in data or by_purpose.get("am", [])} - LOCAL


def find_transport(settings: EngineSettings, log: TransportLog, devices: Path = DEVICES) -> str:
    """KV transport in use.

    Args:
        settings: The engine's.
        log: UCX's.
        devices: Where Linux lists RDMA devices.

    Returns:
        UCX's names with commas (``rc_mlx5``, ``tcp``, ``cma,tcp``), ``efa``, or ``emulated``; empty while unknown.
    """
    if settings.emulation is not None:
        return "emulated"
    if settings.kv_backend == "LIBFABRIC":
        return EFA_DRIVER if has_efa(devices) else TCP
    return log.read()


def check_transport(settings: EngineSettings, transport: str) -> None:
    """Refuses an engine that must use RDMA and would not.

    Raises:
        RdmaError: Names the transports that UCX has chosen.
    """
    if settings.require_rdma and TCP in transport.split(","):
        variables = {name: value for name in ("UCX_TLS", "UCX_NET_DEVICES") if (value := os.environ.get(name))}
        raise RdmaError(
            f"RDMA is required, and KV would go over {transport}; check the device's state, its memory limit and "
            f"{variables or 'UCX_TLS'}"
        )
