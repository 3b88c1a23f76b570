"""A steady load on a cluster in pods, through its Service."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pod_cluster import MODELS
from steady_load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pod_cluster import PodCluster
    from steady_load import Shape

# The kernel draws a worker of a router for each: with 16, one of two has none once in 32,768 runs.
NUM_CONNECTIONS = 16


@contextlib.asynccontextmanager
async def keep_asking(cluster: PodCluster, shape: Shape) -> AsyncIterator[Load]:
    """Keeps streams running; every answer must be whole and exact. kube-proxy spreads the connections over routers."""
    async with contextlib.AsyncExitStack() as connections:
        clients = [await connections.enter_async_context(cluster.connect()) for _ in range(NUM_CONNECTIONS)]
        load = Load(clients, shape, MODELS / "tiny")
        async with load.run():
            yield load
    print(f"streams: {dict(load.fared)}")
    assert load.fared["exact"] > 0
