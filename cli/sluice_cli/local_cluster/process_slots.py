"""The places of a local cluster's programs: what runs in each, how it is spoken with, and what is recorded of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.certificates import CertificateFolder, keep_fresh
from sluice_cli.local_cluster.cluster_directory import ProcessRecord, start_time
from sluice_cli.local_cluster.endpoints import list_ports
from sluice_operator.routers.connection import ControlTls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_cli.processes.supervisor import Program
    from sluice_core.records import EngineId
    from sluice_operator.resources import commands
    from sluice_operator.routers.connection import RouterConnection


@dataclass(slots=True, kw_only=True)
class EngineSlot:
    """An engine's place: what runs there, and whether that serves.

    Args:
        site: Its name and ports.
        program: Runs it.
        identity: Identifies its command and environment.
        stale_epoch: Epoch of the process before the present one; a status that names it is old.
    """

    site: commands.EngineSite
    program: Program
    identity: str
    stale_epoch: int = 0


@dataclass(slots=True, kw_only=True)
class RouterSlot:
    """A router's place.

    Args:
        site: Its ports.
        program: Runs it.
        identity: Identifies its command.
        link: Our link to it.
        link_task: Runs the link.
        security: Where its keys and certificates are.
    """

    site: commands.RouterSite
    program: Program
    identity: str
    link: RouterConnection
    link_task: asyncio.Task[None]
    security: commands.Security


def list_processes(routers: Mapping[str, RouterSlot], engines: Mapping[EngineId, EngineSlot]) -> list[ProcessRecord]:
    """Records every program, for other commands."""
    records = [
        replace(
            _record(name, "router", slot.program, list_ports(slot.site)),
            front_tls=slot.security.front_tls or "",
            needs_key=slot.security.api_keys is not None,
            peer_tls=slot.security.peer_tls or "",
            peer_name=slot.security.router_name or "",
        )
        for name, slot in routers.items()
    ]
    return records + [_record(name, "engine", slot.program, list_ports(slot.site)) for name, slot in engines.items()]


def make_control_tls(security: commands.Security) -> ControlTls | None:
    """How a router's control port is spoken with; None: in the open."""
    if security.peer_tls is None or security.router_name is None:
        return None
    certificates = CertificateFolder(Path(security.peer_tls), is_mutual=True)
    return ControlTls(certificates=certificates, server_name=security.router_name)


async def keep_link(link: RouterConnection, tls: ControlTls | None) -> None:
    """Keeps a link, and its certificate up to date, until cancelled."""
    async with asyncio.TaskGroup() as group:
        group.create_task(link.run())
        if tls is not None:
            group.create_task(keep_fresh([tls.certificates.refresh]))


def _record(name: str, kind: str, program: Program, ports: dict[str, int]) -> ProcessRecord:
    return ProcessRecord(
        name=name,
        kind=kind,
        pid=program.pid,
        started=start_time(program.pid),
        num_starts=program.num_starts,
        ports=ports,
        log=str(program.launch.log),
    )
