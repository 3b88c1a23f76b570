"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``), and the names an engine is set up with.

The plugin changes two things, and nothing for an engine that does not use Sluice's scheduler: ``EngineCore`` gets the
utility that carries commands, and the V1 model runner keeps request states that can begin in the middle.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCore

from sluice_engine import core_messages
from sluice_engine.kv_transfer import nixl_progress, resume
from sluice_engine.kv_transfer.kv_connector import LEASE_S

# Class paths for vLLM's settings.
SCHEDULER = "sluice_engine.scheduling.scheduler.SluiceScheduler"
ASYNC_SCHEDULER = "sluice_engine.scheduling.scheduler.SluiceAsyncScheduler"
CONNECTOR = "SluiceConnector"
CONNECTOR_MODULE = "sluice_engine.kv_transfer.nixl_connector"
CPU_EXECUTOR = "sluice_engine.startup.in_process_executor.InProcessExecutor"


def register() -> None:
    """Installs the plugin; once or often is the same."""
    setattr(EngineCore, core_messages.UTILITY, _carry_out)
    resume.install_in_runner()


def make_transfer_config(
    engine_id: str, device: str, progress_delay_us: int, lease_s: int | None = None, backend: str = "UCX"
) -> dict[str, Any]:
    """The ``kv_transfer_config`` of an engine.

    Args:
        engine_id: NIXL's name of the engine; another one after every start.
        device: ``cpu`` or ``cuda``: where KV lies.
        progress_delay_us: Pause of NIXL's progress thread, in microseconds; 0 with RDMA.
        lease_s: Longest time that handed-off blocks wait for a reader, in seconds; ``LEASE_S`` when absent.
        backend: NIXL's.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_buffer_device": device,
        "engine_id": engine_id,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kv_lease_duration": lease_s or LEASE_S,
            "backends": [backend],
            nixl_progress.DELAY_KEY: progress_delay_us,
        },
    }


def _carry_out(engine_core: EngineCore, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``EngineCore.sluice``: see ``core_messages``."""
    answers: list[dict[str, Any]] = engine_core.scheduler.carry_out(commands)
    return answers
