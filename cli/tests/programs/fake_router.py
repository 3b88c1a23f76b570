"""Stands in for a router: serves Control, finds engines through the file, takes any plan but one of 13 % attainment.

Beside the file of the engines, ``requests.json`` holds the requests that it says to have served, and ``views.json``
what it says of an engine instead of the truth, by name (null: it says nothing of it), if they exist.
"""

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
        self.refreshing = asyncio.Lock()
        self.requests_file = engines.with_name("requests.json")
        self.requests: dict[str, int] = {}
        self.views_file = engines.with_name("views.json")

    async def ApplyPlan(self, request, context):  # noqa: N802 - gRPC's name
        if request.plan.attainment_percent == 13:
            error = "attainment_percent: 13 is unlucky"
            return control_pb2.ApplyPlanResponse(generation=self.plan.generation, error=error)
        self.plan = request.plan
        await self.refresh()
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
            num_failed=self.requests.get("num_failed", 0),
            is_ready=bool(self.views) and self.plan.generation > 0,
            samples=[
                control_pb2.RequestSample(gap_s=0.5, prompt_tokens=self.requests["prompt_tokens"], output_tokens=50)
                for _ in range(100 if self.requests else 0)
            ],
            classes=[
                control_pb2.ClassCounters(
                    num_finished=self.requests["num_finished"], num_met_both=self.requests["num_met"]
                )
            ]
            if self.requests
            else [],
        )

    async def refresh(self) -> None:
        """Asks which engines answer; wakes pollers when that or the plan has changed."""
        async with self.refreshing:
            await self.refresh_once()

    async def refresh_once(self) -> None:
        requests = json.loads(self.requests_file.read_text()) if self.requests_file.exists() else {}
        views = [view for view in [await self.view(address) for address in self.addresses()] if view]
        seen = views, self.plan.generation, requests
        if seen != (self.views, self.seen_generation, self.requests):
            self.requests = requests
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
        untrue = json.loads(self.views_file.read_text()) if self.views_file.exists() else {}
        if untrue.get(engine_id, {}) is None:
            return None
        return control_pb2.EngineStatus(
            engine_id=engine_id,
            address=address,
            **{"epoch": int(pid), "state": state, **untrue.get(engine_id, {})},
            role=part.role,
            chunk_size_tokens=part.chunk_size_tokens,
            acknowledged_generation=self.plan.generation,
            kv_blocks_total=64,
            block_size_tokens=16,
            max_num_seqs=256,
            num_fitted_iterations=1000,
            latency=control_pb2.LatencyCoefficients(base_s=0.02, per_token_s=9e-5),
        )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-port", type=int)
    parser.add_argument("--engines")
    options, _ = parser.parse_known_args()
    router = FakeRouter(Path(options.engines.removeprefix("file:")))
    # gRPC shares ports by default: another test could then get an answer of this router.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    control_pb2_grpc.add_ControlServicer_to_server(router, server)
    server.add_insecure_port(f"127.0.0.1:{options.control_port}")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        await router.refresh()
        await asyncio.sleep(0.05)
    await server.stop(0)


asyncio.run(main())
