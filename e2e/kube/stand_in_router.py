"""Serves the routers' control ports for pods that only exist in name, on kwok's nodes.

The addresses of such pods are assigned to this machine, so that the operator's connections to any of them end here. The
answers are those of a router: the plan in force, acknowledged by every engine that is Ready.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from concurrent import futures
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import harness_faults
from testbed.fake_nodes import says_ready

from sluice.v1 import control_pb2, control_pb2_grpc, plan_pb2
from sluice_operator.api.ports import CONTROL_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.client import Client

POD_ADDRESSES = "10.201.0.0/16"
POLL_S = 0.1


class StandInRouters(control_pb2_grpc.ControlServicer):
    """All routers of all clusters, in one server. A connection belongs to the cluster whose plan came over it.

    Args:
        client: Reads which engine pods are Ready.

    Attributes:
        plan: The plan that came last.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.plan = plan_pb2.Plan()
        self._plans: dict[str, plan_pb2.Plan] = {}
        self._clusters: dict[str, str] = {}
        self._ready: list[str] = []
        self.stuck: set[str] = set()
        # Requests that ended on each engine, and of these those that failed; the others met their objectives.
        self.num_ended: Counter[str] = Counter()
        self.num_failed: Counter[str] = Counter()

    @property
    def draining(self) -> set[str]:
        """The ids of the engines that the plan tells to drain."""
        return {part.engine_id for part in self.plan.engines if part.is_draining}

    def ApplyPlan(self, request: Any, context: Any) -> control_pb2.ApplyPlanResponse:  # noqa: N802
        plan = request.plan
        self._clusters[context.peer()] = plan.cluster_uid
        old = self._plans.get(plan.cluster_uid, plan_pb2.Plan())
        if plan.generation == old.generation and plan != old:
            harness_faults.record(f"two plans with number {plan.generation}")
        if plan.generation < old.generation:
            return control_pb2.ApplyPlanResponse(generation=old.generation, error="older")
        self._plans[plan.cluster_uid] = self.plan = plan
        return control_pb2.ApplyPlanResponse(generation=plan.generation, is_applied=True)

    def GetStatus(self, request: Any, context: Any) -> control_pb2.GetStatusResponse:  # noqa: N802
        deadline = time.monotonic() + min(request.timeout_s, 2.0)
        while True:
            status = self._describe(self._plans.get(self._clusters.get(context.peer(), ""), self.plan))
            if status.version != request.after_version or time.monotonic() >= deadline:
                return status
            time.sleep(POLL_S)

    def _describe(self, plan: plan_pb2.Plan) -> control_pb2.GetStatusResponse:
        parts = {part.engine_id: part for part in plan.engines}
        engines = []
        for uid in self._list_ready() if plan.generation else ():
            part = parts.get(uid, plan_pb2.EnginePlan(chunk_size_tokens=plan.unnamed_chunk_size_tokens))
            state = control_pb2.ENGINE_STATE_READY
            if part.is_draining:
                name = "DRAINING" if uid in self.stuck else "DRAINED"
                state = control_pb2.EngineState.Value(f"ENGINE_STATE_{name}")
            engines.append(
                control_pb2.EngineStatus(
                    engine_id=uid,
                    state=state,
                    role=part.role,
                    chunk_size_tokens=part.chunk_size_tokens,
                    acknowledged_generation=plan.generation,
                    transport="tcp",
                    num_ended=self.num_ended[uid],
                    num_met_both=self.num_ended[uid] - self.num_failed[uid],
                    num_failed=self.num_failed[uid],
                )
            )
        status = control_pb2.GetStatusResponse(
            router_id="stand-in",
            cluster_uid=plan.cluster_uid,
            generation=plan.generation,
            acknowledged_generation=plan.generation,
            engines=engines,
            is_ready=bool(engines),
        )
        status.version = hash(status.SerializeToString(deterministic=True)) & (2**63 - 1) or 1
        return status

    def _list_ready(self) -> list[str]:
        query = "labelSelector=app.kubernetes.io/component%3Dengine"
        # A request that fails says nothing of engines, and the API server may end before this server.
        with suppress(OSError, KeyError):
            pods = self._client.request("GET", f"/api/v1/pods?{query}").content["items"]
            self._ready = sorted(pod["metadata"]["uid"] for pod in pods if says_ready(pod))
        return self._ready


@contextmanager
def run_stand_in_routers(client: Client) -> Iterator[StandInRouters]:
    """Serves for the length of the block. Needs root, for the addresses."""
    routers = StandInRouters(client)
    server = grpc.server(futures.ThreadPoolExecutor(32))
    control_pb2_grpc.add_ControlServicer_to_server(routers, server)
    server.add_insecure_port(f"0.0.0.0:{CONTROL_PORT}")
    route = ["local", POD_ADDRESSES, "dev", "lo"]
    subprocess.run(["ip", "route", "replace", *route], check=True)
    server.start()
    try:
        yield routers
    finally:
        server.stop(0).wait()
        subprocess.run(["ip", "route", "del", *route], check=True)
