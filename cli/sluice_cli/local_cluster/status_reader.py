"""Reads the state of a cluster from its files and its routers, without its launcher."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.certificate_rotation import CertificateFolder
from sluice.certificates import CertificateError
from sluice_cli.local_cluster.cluster_status import AutotuneSummary, ClusterStatus, make_cluster_status
from sluice_operator.routers.router_connection import ControlTls, fetch_status

if TYPE_CHECKING:
    from sluice.v1 import control_pb2
    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory, ProcessRecord


async def read_cluster_status(directory: ClusterDirectory) -> ClusterStatus:
    """Asks every router of a cluster, and puts the answers together."""
    launcher = directory.read_launcher()
    facts = launcher[1] if launcher else {}
    is_running = directory.is_running()
    processes = directory.read_processes() if is_running else []
    routers = [process for process in processes if process.kind == "router"]
    answers = await asyncio.gather(*map(_ask, routers))
    tuning = directory.read_autotune() if is_running else None
    return make_cluster_status(
        name=directory.name,
        phase=facts.get("phase", "unknown") if is_running else "stopped",
        manifest=facts.get("manifest", ""),
        model=facts.get("model", ""),
        processes=processes,
        statuses={router.name: answer for router, answer in zip(routers, answers, strict=True)},
        autotune=AutotuneSummary(**tuning) if tuning else None,
        rollout=facts.get("rollout", "") if is_running else "",
    )


async def _ask(router: ProcessRecord) -> control_pb2.GetStatusResponse | None:
    tls = None
    if router.peer_tls:
        try:
            certificates = CertificateFolder(Path(router.peer_tls), is_mutual=True)
        except CertificateError:
            # The launcher says so in its log; what its processes are can be shown all the same.
            return None
        tls = ControlTls(certificates=certificates, server_name=router.peer_name)
    return await fetch_status(f"127.0.0.1:{router.ports['control']}", tls=tls)
