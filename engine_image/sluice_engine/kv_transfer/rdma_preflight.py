"""``python -m sluice_engine.kv_transfer.rdma_preflight``: checks before the engine loads whether KV can go over RDMA.

The result goes to the pod's termination message, and from there into the condition NetworkReady. With ``--require`` a
problem ends the pod's start; otherwise it is a warning. ``check_devices`` is what the engine itself checks.
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_engine.errors import RdmaError
from sluice_engine.termination_log import TERMINATION_LOG, write_termination_log

if TYPE_CHECKING:
    from sluice_engine.settings import EngineSettings

# Where Linux lists RDMA devices, EFA's too.
DEVICES = Path("/sys/class/infiniband")
# Where it has their files for programs.
VERBS_DEVICES = Path("/dev/infiniband")
EFA_DRIVER = "efa"
LIBFABRIC = "libfabric.so.1"
# UCX registers tens of megabytes before it moves anything; containerd's default is 8 MiB.
LEAST_MEMLOCK_BYTES = 1 << 30


def find_problems(devices: Path, memlock_bytes: int, library: str = "") -> list[str]:
    """Finds what keeps RDMA from working.

    Args:
        devices: Folder of the verbs devices.
        memlock_bytes: Limit of locked memory, in bytes; -1: none.
        library: Library without which NIXL's backend cannot be loaded; empty: none.

    Returns:
        A line for each problem, with what to do.
    """
    problems = []
    if not any(devices.glob("uverbs*")):
        problems.append(
            f"no RDMA device in {devices}; check spec.network.rdma.resourceName or resourceClaimTemplateName, and the "
            "node's device plugin"
        )
    if memlock_bytes != resource.RLIM_INFINITY and memlock_bytes < LEAST_MEMLOCK_BYTES:
        problems.append(
            f"at most {memlock_bytes} bytes can be locked in memory; set LimitMEMLOCK=infinity for the node's "
            "container runtime (the capability IPC_LOCK does nothing for a container that is not root)"
        )
    if library and not is_loadable(library):
        problems.append(f"{library} cannot be loaded, which NIXL needs for EFA; build it into the engine's image")
    return problems


def is_loadable(library: str) -> bool:
    """Whether the dynamic linker finds a library and all that it needs."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def check_devices(settings: EngineSettings, devices: Path = DEVICES) -> None:
    """Refuses an engine that must use RDMA and has nothing to use, before vLLM loads for minutes.

    Raises:
        RdmaError: Says what is missing.
    """
    if not settings.require_rdma:
        return
    if settings.kv_backend == "LIBFABRIC":
        found, what = has_efa(devices), "EFA device"
    else:
        found, what = any(devices.glob("*")), "RDMA device"
    if not found:
        raise RdmaError(f"RDMA is required, and there is no {what} in {devices}; see the pod's resources")


def has_efa(devices: Path) -> bool:
    """Whether a device is one of EFA's."""
    return any((device / "device" / "driver").resolve().name == EFA_DRIVER for device in devices.glob("*"))


def main(arguments: list[str] | None = None, *, devices: Path = VERBS_DEVICES, log: Path = TERMINATION_LOG) -> int:
    """Runs the check; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sluice_engine.kv_transfer.rdma_preflight", description="Checks RDMA."
    )
    parser.add_argument("--fabric", required=True, choices=["InfiniBand", "RoCE", "EFA"], help="kind of fabric")
    parser.add_argument("--require", action="store_true", help="fail when RDMA cannot work")
    options = parser.parse_args(arguments)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    problems = find_problems(devices, soft, LIBFABRIC if options.fabric == "EFA" else "")
    if not problems:
        print(f"RDMA over {options.fabric} can work")
        return 0
    message = f"RDMA over {options.fabric} cannot work: {'; '.join(problems)}"
    print(message, file=sys.stderr)
    write_termination_log(message, log)
    return 1 if options.require else 0


if __name__ == "__main__":
    sys.exit(main())
