"""A cluster that is scaled: requests arrive at a rate, and what engines serve is as a test says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cluster_harness import KEY, World
from tuner_harness import make_samples

from sluice.v1 import control_pb2
from sluice_operator.autoscaling.capacity_messages import CapacityPoint, CapacityRequest, CapacityResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.api.sliders import Sliders
    from sluice_operator.kubernetes.objects import Object

COEFFICIENTS = control_pb2.LatencyCoefficients(
    base_s=0.02,
    per_token_s=9e-5,
    per_attention_pair_s=5e-9,
    per_chunk_s=4e-4,
    per_decode_s=1e-5,
    per_context_token_s=1e-7,
)
# Of an engine, with whatever sliders.
GOODPUT_RPS = 2.0
STEP_S = 5.0


class Scaled:
    """A settled world whose requests arrive, and whose engines serve ``GOODPUT_RPS`` each."""

    def __init__(self, mode: str = "Apply", *, spec: Object | None = None, **autoscaling: Any) -> None:
        fields = {"mode": mode, "minReplicas": 1, "maxReplicas": 8, **autoscaling}
        self.world = World(**{"prefillHeavy": "50%", "replicas": 2, "autoscaling": fields, **(spec or {})})
        self.world.run_capacity_search = self.search
        self.world.routers.samples = make_samples(2000)
        self.world.routers.latency = COEFFICIENTS
        self.world.routers.num_fitted_iterations = 300
        self.requests: list[CapacityRequest] = []
        self.failure: Exception | None = None
        self.find_sliders: Callable[[int], Sliders] | None = None  # what a search finds for so many engines
        self._arrived = 0.0

    async def search(self, request: CapacityRequest) -> CapacityResult:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        return CapacityResult(
            points=tuple(
                CapacityPoint(
                    replicas=item.constraints.replicas,
                    goodput_rps=GOODPUT_RPS * item.constraints.replicas,
                    sliders=self.find_sliders(item.constraints.replicas) if self.find_sliders else item.in_force,
                )
                for item in request.requests
            )
        )

    async def run(self, duration_s: float, rate_rps: float = 0.0, step_s: float = STEP_S) -> list[int]:
        """Lets requests arrive; returns the engines asked for after each step."""
        sizes = []
        for _ in range(round(duration_s / step_s)):
            self._arrived += rate_rps * step_s
            self.world.routers.num_arrived = int(self._arrived)
            self.world.routers.num_inside = max(int(rate_rps), self.world.routers.num_waiting)
            for status in self.world.routers.statuses(KEY).values():
                self.world.reconciler.record_status(KEY, status)
            await asyncio.sleep(0)
            self.world.run_controllers()
            await self.world.reconcile()
            self.world.now += step_s
            sizes.append(self.wanted)
        return sizes

    @property
    def wanted(self) -> int:
        """Engines of the Deployment."""
        return int(self.world.deployment()["spec"]["replicas"])

    @property
    def condition(self) -> tuple[str, str]:
        return self.world.conditions["Autoscaled"]

    @property
    def scale(self) -> Object:
        status: Object = self.world.status["autoscaling"]
        return status
