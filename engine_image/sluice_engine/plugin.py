"""The entry point that vLLM calls in each of its processes (``vllm.general_plugins``).

It adds the utility that carries commands to ``EngineCore``, and lets the V1 model runner resume requests. Engines that
do not use Sluice's scheduler are not affected.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.core import EngineCore, EngineCoreProc

from sluice_engine import core_messages
from sluice_engine.kv_transfer import nixl_progress, output_replay
from sluice_engine.kv_transfer.kv_lease import KV_LEASE_S
from sluice_engine.scheduling import late_scheduling

# Class paths for vLLM's settings.
SCHEDULER = "sluice_engine.scheduling.scheduler.SluiceScheduler"
ASYNC_SCHEDULER = "sluice_engine.scheduling.scheduler.SluiceAsyncScheduler"
CONNECTOR = "SluiceConnector"
CONNECTOR_MODULE = "sluice_engine.kv_transfer.nixl_connector"
CPU_EXECUTOR = "sluice_engine.startup.in_process_executor.InProcessExecutor"


def register() -> None:
    """Installs the plugin; calling it again changes nothing."""
    setattr(EngineCore, core_messages.UTILITY, _carry_out)
    EngineCoreProc._process_input_queue = _process_input_queue  # noqa: SLF001
    output_replay.install_in_runner()


def make_transfer_config(
    engine_id: str, device: str, progress_delay_us: int, kv_lease_s: int | None = None, backend: str = "UCX"
) -> dict[str, Any]:
    """The ``kv_transfer_config`` of an engine.

    Args:
        engine_id: NIXL's name of the engine; another one after every start.
        device: ``cpu`` or ``cuda``: where KV lies.
        progress_delay_us: Pause of NIXL's progress thread, in microseconds; 0 with RDMA.
        kv_lease_s: Longest time that handed-off blocks wait for a reader, in seconds; ``KV_LEASE_S`` when absent.
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
            "kv_lease_duration": kv_lease_s or KV_LEASE_S,
            "backends": [backend],
            nixl_progress.DELAY_KEY: progress_delay_us,
        },
    }


_stock_process_input_queue = EngineCoreProc._process_input_queue  # noqa: SLF001


@functools.wraps(_stock_process_input_queue)
def _process_input_queue(engine_core: EngineCoreProc) -> None:
    """``EngineCoreProc._process_input_queue``, which waits a little for requests that are about to arrive."""
    _stock_process_input_queue(engine_core)
    late_scheduling.hold(engine_core)


def _carry_out(engine_core: EngineCore, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``EngineCore.sluice``: see ``core_messages``."""
    answers: list[dict[str, Any]] = engine_core.scheduler.carry_out(commands)
    return answers
