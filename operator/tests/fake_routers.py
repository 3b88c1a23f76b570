"""Routers in memory: they take plans by the real rules (the highest generation wins) and report on the engine pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.v1 import control_pb2, plan_pb2
from sluice_operator.api.labels import COMPONENT_LABEL, MODEL_LABEL
from sluice_operator.api.names import ENGINE, ROUTER
from sluice_operator.kubernetes.kinds import PODS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fake_kubernetes import FakeKubernetes

    from sluice_operator.api.names import ClusterKey
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.routers.connection_table import RouterAddress


def cut_chunk(chunk_size_tokens: int, pod: Object) -> int:
    """Cuts a chunk size to the limit in an engine's command; where pods are kept without commands, nothing is cut."""
    if "spec" not in pod:
        return chunk_size_tokens
    command = pod["spec"]["containers"][0]["command"]
    return min(chunk_size_tokens, int(command[command.index("--max-batch-tokens") + 1]))


class FakeRouters:
    """See ``Routers``.

    Args:
        kubernetes: Where the engine pods are.
    """

    def __init__(self, kubernetes: FakeKubernetes) -> None:
        self.kubernetes = kubernetes
        self.addresses: dict[ClusterKey, dict[str, RouterAddress]] = {}
        # Plan in force of each router, by its pod's address: it outlives the operator's process.
        self.plans: dict[str, plan_pb2.Plan] = {}
        # Every plan that a router was offered, in order.
        self.offered: list[plan_pb2.Plan] = []
        # What each engine has in force: the plan's number and its part of the plan.
        self.acknowledged: dict[str, tuple[int, plan_pb2.EnginePlan]] = {}
        self.loads: dict[str, int] = {}
        self.counters: list[control_pb2.ClassCounters] = []
        # What the routers, all together, sampled and fitted.
        self.samples: list[control_pb2.RequestSample] = []
        self.latency: control_pb2.LatencyCoefficients | None = None
        self.num_fitted_iterations = 0
        # Requests that ended, met their objectives and failed: on each engine, and on all ("").
        self.outcomes: dict[str, tuple[int, int, int]] = {}
        # Requests that arrived so far, are inside and wait, on all routers together.
        self.num_arrived = self.num_inside = self.num_waiting = 0
        self.transport = "tcp"
        # Engines that never finish draining, engines that do not take up new plans, and routers that do not answer.
        self.stuck: set[str] = set()
        self.late: set[str] = set()
        self.is_silent = False

    def restart(self) -> FakeRouters:
        """The same routers, as a new process of the operator finds them."""
        fresh = type(self)(self.kubernetes)
        fresh.plans, fresh.loads, fresh.stuck, fresh.offered = self.plans, self.loads, self.stuck, self.offered
        fresh.counters, fresh.late, fresh.acknowledged = self.counters, self.late, self.acknowledged
        fresh.outcomes = self.outcomes
        fresh.samples, fresh.latency = self.samples, self.latency
        fresh.num_fitted_iterations = self.num_fitted_iterations
        fresh.num_arrived, fresh.num_inside = self.num_arrived, self.num_inside
        fresh.num_waiting = self.num_waiting
        return fresh

    def set_routers(self, key: ClusterKey, routers: Mapping[str, RouterAddress]) -> None:
        self.addresses[key] = dict(routers)

    def set_plan(self, key: ClusterKey, plan: plan_pb2.Plan) -> None:
        self.offered.append(plan)
        for address in self.addresses.get(key, {}).values():
            old = self.plans.get(address)
            if old is None or (old.cluster_uid == plan.cluster_uid and plan.generation >= old.generation):
                assert old is None or old.generation != plan.generation or old == plan, "two plans with one number"
                self.plans[address] = plan

    def statuses(self, key: ClusterKey) -> dict[str, control_pb2.GetStatusResponse]:
        if self.is_silent:
            return {}
        return {name: self._describe(key, name, address) for name, address in self.addresses.get(key, {}).items()}

    def refusals(self, key: ClusterKey) -> dict[str, str]:
        del key
        return {}

    def _find_model(self, key: ClusterKey, host: str) -> str:
        """Model of a router, by its pod's address: it uses the engines of that model."""
        pods = self.kubernetes.select(PODS, key.namespace, {COMPONENT_LABEL: ROUTER})
        return str(
            next(pod["metadata"]["labels"].get(MODEL_LABEL, "") for pod in pods if pod["status"].get("podIP") == host)
        )

    def _describe(self, key: ClusterKey, name: str, address: RouterAddress) -> control_pb2.GetStatusResponse:
        plan = self.plans.get(address, plan_pb2.Plan())
        parts = {part.engine_id: part for part in plan.engines}
        engines = []
        for pod in self.kubernetes.select(PODS, key.namespace, {COMPONENT_LABEL: ENGINE}):
            is_ready = any(item["status"] == "True" for item in pod["status"]["conditions"])
            if not is_ready or not plan.generation:
                continue
            if pod["metadata"]["labels"].get(MODEL_LABEL, "") != self._find_model(key, address.host):
                continue
            uid = pod["metadata"]["uid"]
            part = parts.get(uid, plan_pb2.EnginePlan(chunk_size_tokens=plan.unnamed_chunk_size_tokens))
            if uid not in self.late:
                self.acknowledged[uid] = plan.generation, part
            generation, part = self.acknowledged.get(uid, (0, part))
            state = control_pb2.ENGINE_STATE_READY
            if part.is_draining:
                is_stuck = uid in self.stuck
                state = control_pb2.ENGINE_STATE_DRAINING if is_stuck else control_pb2.ENGINE_STATE_DRAINED
            num_ended, num_met, num_failed = self.outcomes.get(uid, (0, 0, 0))
            engines.append(
                control_pb2.EngineStatus(
                    num_ended=num_ended,
                    num_met_both=num_met,
                    num_failed=num_failed,
                    engine_id=uid,
                    address=pod["status"]["podIP"],
                    state=state,
                    role=part.role,
                    chunk_size_tokens=cut_chunk(part.chunk_size_tokens, pod),
                    acknowledged_generation=generation,
                    running_decodes=self.loads.get(uid, 0),
                    transport=self.transport,
                    latency=self.latency,
                    num_fitted_iterations=self.num_fitted_iterations,
                    kv_blocks_total=1000,
                    block_size_tokens=16,
                    max_num_seqs=256,
                )
            )
        is_first = name == min(self.addresses[key])
        return control_pb2.GetStatusResponse(
            num_arrived=self.num_arrived if is_first else 0,
            num_requests=self.num_inside if is_first else 0,
            num_waiting=self.num_waiting if is_first else 0,
            # A router's own name for its process, which is not its pod's.
            router_id=f"process-of-{name}",
            cluster_uid=plan.cluster_uid,
            generation=plan.generation,
            acknowledged_generation=plan.generation,
            engines=engines,
            classes=self.counters if is_first else [],
            samples=self.samples if is_first else [],
            is_ready=bool(engines),
        )
