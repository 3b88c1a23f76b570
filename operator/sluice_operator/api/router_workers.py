"""Workers of a router pod: their names and ports.

A router uses one core at most. The workers of a pod share the clients' ports; each has its own for control and metrics.
"""

from __future__ import annotations

from sluice_operator.api.names import ROUTER
from sluice_operator.api.ports import CONTROL_PORT, MAX_WORKERS, METRICS_PORT


def name_worker(base: str, worker: int) -> str:
    """Name of a worker's container, port or connection; the first one has the plain name."""
    return f"{base}-{worker}" if worker else base


def control_port(worker: int) -> int:
    """Port for the control plane."""
    return CONTROL_PORT + worker


def metrics_port(worker: int) -> int:
    """Port for metrics and probes."""
    return METRICS_PORT + worker


ROUTER_CONTAINERS = frozenset(name_worker(ROUTER, worker) for worker in range(MAX_WORKERS))
