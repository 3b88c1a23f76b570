"""The engines and routers that a launcher keeps running, and what it records of them for other commands."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.certificate_rotation import CertificateFolder, keep_fresh
from sluice.v1 import control_pb2
from sluice_cli.local_cluster.cluster_directory import ProcessRecord, read_start_time
from sluice_cli.local_cluster.cluster_status import pick_engine_status
from sluice_cli.local_cluster.endpoints import list_ports
from sluice_operator.routers.router_connection import ControlTls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sluice.v1 import plan_pb2
    from sluice_cli.processes.supervisor import SupervisedProcess
    from sluice_core.records import EngineId
    from sluice_operator.resources import command_lines
    from sluice_operator.routers.router_connection import RouterConnection

SERVING = (control_pb2.ENGINE_STATE_READY, control_pb2.ENGINE_STATE_DRAINING)


@dataclass(slots=True, kw_only=True)
class ManagedEngine:
    """An engine: its process may be replaced, its name and ports stay.

    Args:
        site: Its name and ports.
        process: Runs it, and starts it again when it ends.
        spec_hash: Identifies its command and environment.
        last_epoch: Newest epoch that a router has said, though it may say nothing of the engine by now.
        stale_epoch: Epoch of the process before the present one; a status that names it is old.
    """

    site: command_lines.EngineSite
    process: SupervisedProcess
    spec_hash: str
    last_epoch: int = 0
    stale_epoch: int = 0


@dataclass(slots=True, kw_only=True)
class ManagedRouter:
    """A router and the link to its control port.

    Args:
        site: Its ports.
        process: Runs it, and starts it again when it ends.
        spec_hash: Identifies its command.
        link: Our link to it.
        link_task: Runs the link.
        security: Where its keys and certificates are.
        drain_timeout_s: Longest time that its answers under way take to end once it stops, in seconds.
    """

    site: command_lines.RouterSite
    process: SupervisedProcess
    spec_hash: str
    link: RouterConnection
    link_task: asyncio.Task[None]
    security: command_lines.Security
    drain_timeout_s: float


def is_serving(engine: ManagedEngine, statuses: Sequence[control_pb2.GetStatusResponse]) -> bool:
    """Whether an engine's present process takes requests."""
    status = pick_engine_status(statuses, engine.site.engine_id)
    has_process = engine.process.pid is not None
    return has_process and status is not None and status.state in SERVING and status.epoch != engine.stale_epoch


def is_first_start(engine: ManagedEngine) -> bool:
    """Whether an engine starts for the first time, or its first process runs."""
    return engine.process.num_starts == 0 or (engine.process.num_starts == 1 and engine.process.pid is not None)


def has_connected(engine: ManagedEngine, statuses: Sequence[control_pb2.GetStatusResponse]) -> bool:
    """Whether an engine's present process has ever been connected to a router, which may have ended meanwhile."""
    status = pick_engine_status(statuses, engine.site.engine_id)
    epochs = {engine.last_epoch, 0 if status is None else status.epoch}
    return bool(epochs - {0, engine.stale_epoch})


def is_drained(
    engine_id: EngineId, plan: plan_pb2.Plan | None, statuses: Sequence[control_pb2.GetStatusResponse]
) -> bool:
    """Whether every router has taken the plan and has no request left at an engine.

    Args:
        engine_id: The engine, which drains by the plan.
        plan: The newest plan.
        statuses: Of the routers that answer; others cannot have requests there.
    """
    if plan is None:
        return True
    return all(
        status.generation >= plan.generation
        and not any(engine.engine_id == engine_id and engine.state in SERVING for engine in status.engines)
        for status in statuses
    )


def list_processes(
    routers: Mapping[str, ManagedRouter], engines: Mapping[EngineId, ManagedEngine]
) -> list[ProcessRecord]:
    """Records every process, for other commands."""
    records = [
        replace(
            _record(name, "router", router.process, list_ports(router.site)),
            front_tls=router.security.front_tls or "",
            needs_key=router.security.api_keys is not None,
            peer_tls=router.security.peer_tls or "",
            peer_name=router.security.router_name or "",
        )
        for name, router in routers.items()
    ]
    return records + [
        _record(name, "engine", engine.process, list_ports(engine.site)) for name, engine in engines.items()
    ]


def make_control_tls(security: command_lines.Security) -> ControlTls | None:
    """Makes the TLS settings of a router's control port; None: nothing is encrypted."""
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


def _record(name: str, kind: str, process: SupervisedProcess, ports: dict[str, int]) -> ProcessRecord:
    return ProcessRecord(
        name=name,
        kind=kind,
        pid=process.pid,
        started=read_start_time(process.pid),
        num_starts=process.num_starts,
        ports=ports,
        log=str(process.launch.log),
        refusal=process.refusal,
    )
