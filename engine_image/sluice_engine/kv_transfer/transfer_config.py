"""vLLM's ``kv_transfer_config`` of an engine: which connector, and its options."""

from __future__ import annotations

from typing import Any

from sluice_engine.kv_transfer import nixl_progress
from sluice_engine.kv_transfer.kv_transfer_timeouts import KV_LEASE_S

CONNECTOR = "SluiceConnector"
CONNECTOR_MODULE = "sluice_engine.kv_transfer.nixl_connector"


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
