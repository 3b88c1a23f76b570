"""Serves the routers of any number of clusters for pods that exist in name only, on kwok's nodes. Needs root.

    python benchmarks/operator/routers.py          # prints "up", serves until its standard input is closed

The addresses of such pods are assigned to this machine, so that the operator's connections to them end here. The first
plan on a connection shows which cluster it belongs to. Every engine of a plan counts as one that acknowledged it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field

import grpc

from sluice.v1 import control_pb2, control_pb2_grpc, plan_pb2
from sluice_operator.api.ports import CONTROL_PORT

POD_ADDRESSES = "10.201.0.0/16"
LONGEST_POLL_S = 30.0


@dataclass(slots=True)
class PlayedCluster:
    """The plan in force in the routers of one cluster. Mutable, changed by ``apply`` only."""

    plan: plan_pb2.Plan = field(default_factory=plan_pb2.Plan)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def apply(self, plan: plan_pb2.Plan) -> None:
        """Takes a plan if it is newer."""
        if plan.generation > self.plan.generation:
            self.plan = plan
            self.changed.set()
            self.changed = asyncio.Event()

    def describe(self, router_id: str) -> control_pb2.GetStatusResponse:
        """Makes the status of one of its routers."""
        plan = self.plan
        engines = [
            control_pb2.EngineStatus(
                engine_id=part.engine_id,
                state=control_pb2.ENGINE_STATE_DRAINED if part.is_draining else control_pb2.ENGINE_STATE_READY,
                role=part.role,
                chunk_size_tokens=part.chunk_size_tokens,
                acknowledged_generation=plan.generation,
                transport="tcp",
            )
            for part in plan.engines
        ]
        return control_pb2.GetStatusResponse(
            version=plan.generation + 1,
            router_id=router_id,
            cluster_uid=plan.cluster_uid,
            generation=plan.generation,
            acknowledged_generation=plan.generation,
            engines=engines,
            is_ready=bool(engines),
        )


class PlayedRouters(control_pb2_grpc.ControlServicer):
    """The routers of all clusters."""

    def __init__(self) -> None:
        self._clusters: dict[str, PlayedCluster] = {}
        self._peers: dict[str, PlayedCluster] = {}

    Move = control_pb2_grpc.ControlServicer.Move  # answers UNIMPLEMENTED: nobody asks

    async def ApplyPlan(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        """Takes a plan, which shows the cluster of this connection."""
        cluster = self._clusters.setdefault(request.plan.cluster_uid, PlayedCluster())
        stranger = self._peers.get(context.peer())
        self._peers[context.peer()] = cluster
        cluster.apply(request.plan)
        if stranger is not None and stranger is not cluster:
            stranger.changed.set()
        return control_pb2.ApplyPlanResponse(generation=cluster.plan.generation, is_applied=True)

    async def GetStatus(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N802
        """Long-polls."""
        peer = context.peer()
        cluster = self._peers.setdefault(peer, PlayedCluster())
        if cluster.plan.generation + 1 == request.after_version:
            try:
                async with asyncio.timeout(min(request.timeout_s, LONGEST_POLL_S)):
                    await cluster.changed.wait()
            except TimeoutError:
                pass
        return self._peers[peer].describe(peer)


async def serve() -> None:
    """Serves until standard input is closed."""
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(PlayedRouters(), server)
    server.add_insecure_port(f"0.0.0.0:{CONTROL_PORT}")
    await server.start()
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


def main() -> None:
    """Assigns the pods' addresses to this machine while it serves."""
    route = ["local", POD_ADDRESSES, "dev", "lo"]
    subprocess.run(["ip", "route", "replace", *route], check=True)
    try:
        asyncio.run(serve())
    finally:
        subprocess.run(["ip", "route", "del", *route], check=True)


if __name__ == "__main__":
    main()
