"""Stands in for a router: serves Control, finds engines through the file, takes any plan but one of 13 % attainment."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path

import grpc

from sluice.v1 import control_pb2, control_pb2_grpc, plan_pb2


class FakeRouter(control_pb2_grpc.ControlServicer):
    """Knows the engines that answer on their port; they drain in no time."""

    def __init__(self, engines: Path) -> None:
        self.engines = engines
        self.plan = plan_pb2.Plan()
        self.version = 1
        self.views: list[control_pb2.EngineStatus] = []
        self.changed = asyncio.Event()
        self.looking = asyncio.Lock()

    async def ApplyPlan(self, request, context):  # noqa: N802 - gRPC's name
        if request.plan.attainment_percent == 13:
            error = "attainment_percent: 13 is unlucky"
            return control_pb2.ApplyPlanResponse(generation=self.plan.generation, error=error)
        self.plan = request.plan
        await self.look()
        return control_pb2.ApplyPlanResponse(generation=self.plan.generation, is_applied=True)

    async def GetStatus(self, request, context):  # noqa: N802 - gRPC's name
        if request.after_version == self.version:
            try:
                async with asyncio.timeout(request.timeout_s):
                    await self.changed.wait()
            except TimeoutError:
                pass
        return self.status()

    def status(self) -> control_pb2.GetStatusResponse:
        return control_pb2.GetStatusResponse(
            version=self.version,
            router_id=str(os.getpid()),
            cluster_uid=self.plan.cluster_uid,
            generation=self.plan.generation,
            acknowledged_generation=self.plan.generation,
            engines=self.views,
            is_ready=bool(self.views) and self.plan.generation > 0,
        )

    async def look(self) -> None:
        """Looks who answers; wakes pollers when that or the plan has changed."""
        async with self.looking:
            await self.look_once()

    async def look_once(self) -> None:
        views = [view for view in [await self.view(address) for address in self.addresses()] if view]
        if views != self.views or self.plan.generation != self.seen_generation:
            self.views, self.seen_generation = views, self.plan.generation
            self.version += 1
            self.changed.set()
            self.changed = asyncio.Event()

    seen_generation = 0

    def addresses(self) -> list[str]:
        return json.loads(self.engines.read_text())

    async def view(self, address: str) -> control_pb2.EngineStatus | None:
        try:
            reader, writer = await asyncio.open_connection(*address.split(":"))
            engine_id, pid = (await reader.read()).decode().split()
            writer.close()
        except (OSError, ValueError):
            return None
        part = next((part for part in self.plan.engines if part.engine_id == engine_id), plan_pb2.EnginePlan())
        state = control_pb2.ENGINE_STATE_DRAINED if part.is_draining else control_pb2.ENGINE_STATE_READY
        return control_pb2.EngineStatus(
            engine_id=engine_id,
            epoch=int(pid),
            address=address,
            state=state,
            role=part.role,
            chunk_size_tokens=part.chunk_size_tokens,
            acknowledged_generation=self.plan.generation,
            kv_blocks_total=64,
        )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-port", type=int)
    parser.add_argument("--engines")
    options, _ = parser.parse_known_args()
    router = FakeRouter(Path(options.engines.removeprefix("file:")))
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(router, server)
    server.add_insecure_port(f"127.0.0.1:{options.control_port}")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        await router.look()
        await asyncio.sleep(0.05)
    await server.stop(0)


asyncio.run(main())
