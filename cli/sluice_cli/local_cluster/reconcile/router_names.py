"""Names of the routers of a local cluster: ``router-0`` and ``router-0-1`` are workers of one replica, on one port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api.names import ROUTER
from sluice_operator.api.router_workers import name_worker

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.router_spec import RouterSpec


def list_router_names(spec: RouterSpec) -> tuple[str, ...]:
    """Lists the routers that a manifest asks for."""
    return tuple(
        name_worker(f"{ROUTER}-{replica}", worker) for replica in range(spec.replicas) for worker in range(spec.workers)
    )


def replica_of(name: str) -> str:
    """Returns the name of a router's replica, which is that of its first worker."""
    return "-".join(name.split("-")[:2])


def is_first_replica(name: str) -> bool:
    """Whether a router is at the cluster's address."""
    return replica_of(name) == f"{ROUTER}-0"
