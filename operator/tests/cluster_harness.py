"""A whole world for the reconciler: fake API server, fake routers, a clock, and a loop that runs until all is quiet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fake_kubernetes import FakeKubernetes, make_cluster
from fake_routers import FakeRouters

from sluice_operator.api.labels import COMPONENT_LABEL, ROLE_LABEL
from sluice_operator.api.names import ENGINE, ClusterKey
from sluice_operator.controller.reconciler import Reconciler
from sluice_operator.kubernetes.errors import KubernetesError
from sluice_operator.kubernetes.kinds import CLUSTERS, CONFIG_MAPS, DEPLOYMENTS, PODS
from sluice_operator.planning.node_notices import NodeNotices
from sluice_operator.planning.plan_store import read_plan
from sluice_operator.settings import OperatorSettings

if TYPE_CHECKING:
    from sluice_operator.autoscaling.capacity_messages import CapacityRequest, CapacityResult
    from sluice_operator.autoscaling.capacity_process import RunCapacitySearch
    from sluice_operator.autotune.search_messages import SearchRequest, SearchResult
    from sluice_operator.autotune.search_process import RunSearch
    from sluice_operator.kubernetes.objects import Object

KEY = ClusterKey("default", "tiny")
MAX_STEPS = 60
STEP_S = 1.0


class World:
    """See the module."""

    def __init__(self, **spec: Any) -> None:
        self.kubernetes = FakeKubernetes()
        self.routers = FakeRouters(self.kubernetes)
        self.settings = OperatorSettings(identity="a", namespace="sluice-system")
        self.now = 1000.0
        self.notices = NodeNotices()
        # Clusters that were enqueued, and what runs searches for sliders.
        self.enqueued: list[ClusterKey] = []
        self.run_search: RunSearch | None = None
        self.run_capacity_search: RunCapacitySearch | None = None
        # At which the last reconcile ended.
        self.last_error: KubernetesError | None = None
        self.reconciler = self.start_operator()
        self.kubernetes.put(make_cluster(**spec))

    def start_operator(self) -> Reconciler:
        """A new process of the operator, with nothing in its memory."""
        self.routers = self.routers.restart()
        self.reconciler = Reconciler(
            self.kubernetes,
            self.routers,
            self.settings,
            now=lambda: self.now,
            now_text=lambda: f"t{self.now:.0f}",
            wall_s=lambda: self.now,
            enqueue=self.enqueued.append,
            notices=self.notices,
            run_search=self._run_search,
            run_capacity_search=self._run_capacity_search,
        )
        return self.reconciler

    async def _run_capacity_search(self, request: CapacityRequest) -> CapacityResult:
        assert self.run_capacity_search is not None, "nobody expects a search for capacity"
        return await self.run_capacity_search(request)

    async def _run_search(self, request: SearchRequest) -> SearchResult:
        assert self.run_search is not None, "nobody expects a search"
        return await self.run_search(request)

    async def settle(self) -> None:
        """Reconciles and lets the controllers run, second by second, until nothing changes any more."""
        for _ in range(MAX_STEPS):
            before = self.snapshot()
            self.run_controllers()
            await self.reconcile()
            self.now += STEP_S
            if self.last_error is None and self.snapshot() == before:
                return
        raise AssertionError(f"not settled after {MAX_STEPS} steps: {self.conditions}") from self.last_error

    def run_controllers(self) -> None:
        """One step of Kubernetes' controllers."""
        self.kubernetes.now_s = self.now
        self.kubernetes.run_controllers()

    async def reconcile(self) -> float | None:
        """One reconcile; after an error the next one tries again."""
        self.last_error = None
        try:
            return await self.reconciler.reconcile(KEY)
        except KubernetesError as error:
            self.last_error = error
            return 0.5

    def snapshot(self) -> Any:
        """Everything that the API server stores, by version."""
        return {address: item["metadata"]["resourceVersion"] for address, item in self.kubernetes.objects.items()}

    def edit(self, **spec: Any) -> None:
        """Edits the spec as `kubectl patch` does."""
        self.kubernetes.edit(CLUSTERS, "tiny", {"spec": spec})

    @property
    def status(self) -> Object:
        status: Object = self.kubernetes.find(CLUSTERS, "tiny").get("status", {})
        return status

    @property
    def conditions(self) -> dict[str, tuple[str, str]]:
        return {item["type"]: (item["status"], item["reason"]) for item in self.status.get("conditions", [])}

    def message(self, subject: str) -> str:
        return next(item["message"] for item in self.status["conditions"] if item["type"] == subject)

    @property
    def engines(self) -> list[Object]:
        return self.kubernetes.select(PODS, labels={COMPONENT_LABEL: ENGINE})

    @property
    def engine_uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.engines}

    @property
    def roles(self) -> dict[str, str]:
        """Role label of each engine pod."""
        return {pod["metadata"]["uid"]: pod["metadata"]["labels"].get(ROLE_LABEL, "") for pod in self.engines}

    @property
    def plan(self) -> Any:
        uid = self.kubernetes.find(CLUSTERS, "tiny")["metadata"]["uid"]
        return read_plan(self.kubernetes.find(CONFIG_MAPS, "tiny-plan"), uid).plan

    def deployment(self, component: str = ENGINE) -> Object:
        return self.kubernetes.find(DEPLOYMENTS, f"tiny-{component}")

    def summary(self) -> Any:
        """The state without what depends on the way to it: versions, names of pods, plan numbers, times."""
        conditions = sorted(self.conditions.items())
        children = sorted(
            (kind, name) for kind, _, name in self.kubernetes.objects if kind not in ("Pod", "Event", "ServingCluster")
        )
        specs = [self.deployment(name)["spec"] for name in ("engine", "router")]
        plan = self.plan
        chunks = sorted((part.role, part.chunk_size_tokens, part.is_draining) for part in plan.engines)
        marks = sorted((pod["metadata"].get("annotations") or {}).get(COST, "") for pod in self.engines)
        counts = {name: value for name, value in self.status.items() if name not in ("conditions", "planGeneration")}
        return children, specs, conditions, sorted(self.roles.values()), chunks, marks, plan.strategy, counts


COST = "controller.kubernetes.io/pod-deletion-cost"
